"""The table that a comparison prints, and the numbers beside the majority class."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from relpos_fairseq.comparison.glue.majority import majority
from relpos_fairseq.comparison.glue.protocols import Summary
from relpos_fairseq.data.dictionary import NSPECIAL
from relpos_fairseq.engine.tables import table
from relpos_fairseq.preparation.glue.tasks import Task
from relpos_fairseq.preparation.mlm.encoded import Encoded

TITLES = {"accuracy": "accuracy", "f1": "F1", "mcc": "Matthews", "spearman": "Spearman", "pearson": "Pearson"}
MISSING = "-"
# The columns of 004's Tables 1, 4, 8 and 10.  The paper names no metric: QQP's are accuracies by
# their size, CoLA's and STS-B's are taken to be GLUE's first.
AVERAGED = (
    ("MNLI", "accuracy"),
    ("MNLI", "valid1_accuracy"),
    ("QQP", "accuracy"),
    ("QNLI", "accuracy"),
    ("SST-2", "accuracy"),
    ("CoLA", "mcc"),
    ("STS-B", "spearman"),
)


def read_labels(task: Task, data: Path, split: str) -> list[str]:
    """The labels of a split of relpos prepare glue."""
    prefix = data / task.name / "label" / split
    if task.regression:
        return Path(f"{prefix}.label").read_text().split()
    encoded = Encoded(prefix)
    return [task.labels[int(number) - NSPECIAL] for number in encoded.ids[encoded.starts[:-1]]]


def majority_summary(task: Task, data: Path) -> dict[str, float]:
    """The scores of the most frequent training label on every validation set."""
    train, values = read_labels(task, data, "train"), {}
    for split in task.valid_splits:
        for metric, value in majority(task, train, read_labels(task, data, split)).items():
            values[metric if split == "valid" else f"{split}_{metric}"] = value
    return values


def cell(task: Task, values: dict[str, float] | None) -> str:
    """A task's metrics as GLUE writes them: `F1 / accuracy`, `matched / mismatched`."""
    if values is None:
        return MISSING
    keys = list(task.metrics)
    keys += [f"{split}_{keys[0]}" for split in task.valid_splits[1:]]
    return " / ".join(f"{values[key]:.2f}" if np.isfinite(values[key]) else MISSING for key in keys)


def average(found: dict[str, dict[str, float]]) -> str:
    """Return 004's Avg, of a task's metrics: the mean of its seven numbers, where all are there."""
    values = [found.get(task, {}).get(metric) for task, metric in AVERAGED]
    return MISSING if None in values else f"{np.mean(values):.2f}"


def title(task: Task) -> str:
    names = [TITLES[metric] for metric in task.metrics]
    if len(task.valid_splits) > 1:
        names = ["accuracy m", "mm"]
    return f"{task.name} ({' / '.join(names)})"


def scores(tasks: list[Task], data: Path, found: dict[tuple[str, str], Summary], models: list[str]) -> str:
    """One row a model under the majority class's, one column a task, and 004's mean."""
    by_model = {"majority class": {task.name: majority_summary(task, data) for task in tasks}}
    for model in models:
        summaries = {task.name: found.get((model, task.name)) for task in tasks}
        by_model[model] = {name: one.values for name, one in summaries.items() if one}
    averaged = {name for name, _ in AVERAGED} <= {task.name for task in tasks}
    rows = [
        [model, *(cell(task, values.get(task.name)) for task in tasks)] + [average(values)] * averaged
        for model, values in by_model.items()
    ]
    return table(rows, ["model", *map(title, tasks)] + ["mean of 004's seven"] * averaged)


def choices(found: dict[tuple[str, str], Summary], max_update: int = 0) -> str:
    """What was chosen for each cell, and how far its runs lie apart."""
    limited = f", at most {max_update} updates" * bool(max_update)
    rows = [
        (
            model,
            task,
            f"learning rate {one.learning_rate:g}, {one.epochs} epochs{limited}",  # bare: 0.00
            one.runs,
            one.lowest,
            one.highest,
        )
        for (model, task), one in found.items()
    ]
    headers = ("model", "task", "chosen", "runs", "lowest", "highest")
    return table(rows, headers)
