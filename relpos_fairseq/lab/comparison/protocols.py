"""Define the published ways to fine-tune on GLUE, and the table of what they report (choices.py says of which run).

- `huang` (Huang2020, section 4.2): batches of 32, 3 epochs, learning rate 3e-5.
- `multiplicative` (M4M, section 3.2): the same, and the best of the learning rates 2e-5, 3e-5 and 4e-5.
- `chen` (Chen2021, Tables 4 and 7): batches of 32, 5 or 10 epochs, learning rates 1e-5 to 4e-5, warm-up over a tenth
  of the updates, a checkpoint every 3,500 updates; of five runs the median of each run's best checkpoint.
- `xtreme` (Chen2021, section 4.2 and Table 7): 3 epochs, 1e-5 to 4e-5, five trials, for which `relpos finetune xtreme`
  reports medians; learning rates are chosen on English.

All but `chen` count a run's last checkpoint. Where a paper is silent, BERT's values hold (Devlin et al. 2018: Adam with
betas 0.9 and 0.999, weight decay 0.01, linear decay to zero), and Chen2021's warm-up.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relpos_fairseq.io.progress import table
from relpos_fairseq.preparation.documents import Encoded
from relpos_fairseq.preparation.glue_tasks import GlueTask
from relpos_fairseq.text.dictionary import NSPECIAL

BATCH_SIZE = 32
WARMUP = 0.1  # of the updates
METRIC_NAMES = {"accuracy": "accuracy", "f1": "F1", "mcc": "Matthews", "pearson": "Pearson", "spearman": "Spearman"}
MISSING_SCORE = "-"
# The columns of Chen2021's Tables 1, 4, 8 and 10. The paper names no metric: QQP's are accuracies by their size, CoLA's
# and STS-B's are taken to be GLUE's first.
AVERAGED = (
    *(("MNLI", "accuracy"), ("MNLI", "valid1_accuracy"), ("QQP", "accuracy"), ("QNLI", "accuracy")),
    *(("SST-2", "accuracy"), ("CoLA", "mcc"), ("STS-B", "spearman")),
)
Scores = dict[tuple[str, str], dict[str, float]]  # metric to value, by model and task


@dataclass(frozen=True)
class Protocol:
    """A published fine-tuning protocol: the grid of hyperparameters, and whose score is reported."""

    name: str
    learning_rates: tuple[float, ...]  # to choose from
    epochs: tuple[int, ...]  # to choose from
    seeds: tuple[int, ...]  # of the runs of each learning rate and number of epochs
    checkpoint: str  # `last` or `best`: the validation of a run that counts
    interval: int = 0  # updates between checkpoints, besides each epoch's end; 0: none


PROTOCOLS = {
    "huang": Protocol("huang", (3e-5,), (3,), (1,), "last"),
    "multiplicative": Protocol("multiplicative", (2e-5, 3e-5, 4e-5), (3,), (1,), "last"),
    "chen": Protocol("chen", (1e-5, 2e-5, 3e-5, 4e-5), (5, 10), (1, 2, 3, 4, 5), "best", 3500),
    "xtreme": Protocol("xtreme", (1e-5, 2e-5, 3e-5, 4e-5), (3,), (1, 2, 3, 4, 5), "last"),
}


def updates_of(examples: int, epochs: int, batch_size: int = BATCH_SIZE) -> int:
    """Return the updates of a fine-tuning; the last batch of an epoch may be smaller."""
    return math.ceil(examples / batch_size) * epochs


def majority(task: GlueTask, train: list[str], valid: list[str]) -> dict[str, float]:
    """Return the metrics of always answering the most frequent training label, in per cent.

    A regression's answer is the mean, which correlates with nothing: 0, as is Matthews' correlation of a
    constant (its denominator vanishes; sklearn's convention).
    """
    if not train or not valid:
        raise ValueError(f"{task.name} has no labels: {len(train)} in train, {len(valid)} in valid")
    scores = dict.fromkeys(task.metrics, 0.0)
    if task.regression:
        return scores
    counts = Counter(train)
    answer = min(counts, key=lambda label: (-counts[label], task.labels.index(label)))
    share = valid.count(answer) / len(valid)
    values = {"accuracy": share, "mcc": 0.0}
    # Precision is the share of ones, recall is 1; without an answer of one there is neither.
    values["f1"] = 2 * share / (1 + share) if answer == task.labels[-1] else 0.0
    return {metric: 100 * values[metric] for metric in task.metrics}


def read_labels(task: GlueTask, data: Path, split: str) -> list[str]:
    """Return the labels of a split that `relpos prepare glue` wrote."""
    prefix = data / task.name / "label" / split
    if task.regression:
        return Path(f"{prefix}.label").read_text().split()
    encoded = Encoded(prefix)
    return [task.labels[int(number) - NSPECIAL] for number in encoded.ids[encoded.starts[:-1]]]


def majority_summary(task: GlueTask, data: Path) -> dict[str, float]:
    """Return the scores of the most frequent training label on every validation set."""
    train, values = read_labels(task, data, "train"), {}
    for split in task.valid_splits:
        for metric, value in majority(task, train, read_labels(task, data, split)).items():
            values[metric if split == "valid" else f"{split}_{metric}"] = value
    return values


def metrics_cell(task: GlueTask, values: dict[str, float] | None) -> str:
    """Return a task's metrics in GLUE's form: `F1 / accuracy`, `matched / mismatched`."""
    if values is None:
        return MISSING_SCORE
    keys = list(task.metrics)
    keys += [f"{split}_{keys[0]}" for split in task.valid_splits[1:]]
    return " / ".join(f"{values[key]:.2f}" if np.isfinite(values[key]) else MISSING_SCORE for key in keys)


def average_score(found: dict[str, dict[str, float]]) -> str:
    """Return Chen2021's Avg of metrics by task: the mean of its seven numbers, if all are there."""
    values = [found.get(task, {}).get(metric) for task, metric in AVERAGED]
    return MISSING_SCORE if None in values else f"{np.mean(values):.2f}"


def column_title(task: GlueTask) -> str:
    """Return a task's name with those of its metrics."""
    names = [METRIC_NAMES[metric] for metric in task.metrics]
    if len(task.valid_splits) > 1:
        names = ["accuracy m", "mm"]
    return f"{task.name} ({' / '.join(names)})"


def scores_table(tasks: list[GlueTask], data: Path, found: Scores, models: list[str]) -> str:
    """Return a table: a row a model under the majority class's, a column a task, and Chen2021's mean."""
    by_model = {"majority class": {task.name: majority_summary(task, data) for task in tasks}}
    for model in models:
        by_model[model] = {task.name: found[model, task.name] for task in tasks if (model, task.name) in found}
    averaged = {name for name, _ in AVERAGED} <= {task.name for task in tasks}
    rows = [
        [model, *(metrics_cell(task, values.get(task.name)) for task in tasks)] + [average_score(values)] * averaged
        for model, values in by_model.items()
    ]
    return table(rows, ["model", *map(column_title, tasks)] + ["mean of Chen2021's seven"] * averaged)
