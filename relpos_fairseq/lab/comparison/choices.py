"""Choose the learning rate and number of epochs of a grid that count for each scheme, and the run that is reported."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from dataclasses import dataclass

from relpos_fairseq.io.progress import table
from relpos_fairseq.lab.comparison.run import Run
from relpos_fairseq.lab.comparison.spec import Spec
from relpos_fairseq.lab.comparison.tasks.glue import FineTuning

CHOICE_HEADERS = ("scheme", "task", "chosen", "runs", "lowest", "highest", "reported")


@dataclass(frozen=True)
class Choice:
    """The learning rate and number of epochs of a grid that count for a scheme, and the run that is reported."""

    run: Run  # the only one with these settings, or the median one
    values: dict[str, float]  # metric to value of that run's validation that counts
    runs: tuple[Run, ...]  # all with these settings, by seed
    lowest: float  # the lowest of their deciding values
    highest: float  # the highest of them

    def numbers(self) -> dict[str, object]:
        """Return the choice as JSON."""
        task = self.run.task
        chosen = {"values": self.values, "learning_rate": task.lr, "epochs": task.epochs}
        return chosen | {"runs": len(self.runs), "lowest": self.lowest, "highest": self.highest}

    def row(self) -> list[str]:
        """Return the cells of CHOICE_HEADERS after the scheme and the task."""
        task = self.run.task
        # A learning rate by itself would be printed as 0.00.
        chosen = f"learning rate {task.lr:g}, {task.epochs} epochs"
        chosen += f", at most {task.max_update} updates" * bool(task.max_update)
        metrics = [name.removeprefix("valid_") for name in task.logged if not name.endswith("loss")]
        reported = ", ".join(f"{name} {self.values[name]:.2f}" for name in metrics)
        return [chosen, str(len(self.runs)), f"{self.lowest:.2f}", f"{self.highest:.2f}", reported]


def choices_of(spec: Spec, made: list[tuple[Run, dict]]) -> dict[tuple[str, str], Choice]:
    """Return what is chosen of each grid of a specification that has results, by scheme and the grid's label."""
    found = defaultdict(list)
    for run, result in made:
        if label := spec.grids.get(run.task.label):
            found[run.scheme, label].append((run, result))
    return {key: choose(some) for key, some in found.items()}


def choose(made: list[tuple[Run, dict]]) -> Choice:
    """Return the best learning rate and number of epochs of runs with results, by their medians of the task's metric.

    Of an even number of runs the median is the lower of the two in the middle, so that a run that was made is
    reported, with all its metrics.
    """
    groups, choices = defaultdict(list), []
    for run, result in sorted(made, key=lambda one: one[0].seed):
        groups[run.task.lr, run.task.epochs].append((run, counted(run.task, result["validations"])))
    for _, found in sorted(groups.items()):
        scores = [_comparable(values[run.task.metric]) for run, values in found]
        run, values = found[scores.index(statistics.median_low(scores))]
        choices.append(Choice(run, values, tuple(run for run, _ in found), min(scores), max(scores)))
    return max(choices, key=lambda one: _comparable(one.values[one.run.task.metric]))


def counted(task: FineTuning, validations: list[dict[str, float]]) -> dict[str, float]:
    """Return a run's validation that counts: the last, or the best by the task's metric (the first of equals).

    The metrics of a second validation set keep its name in front: `valid1_accuracy`.
    """
    if not validations:
        raise ValueError(f"a run of {task.label} has no validation, by which its settings are chosen")
    found = [{name.removeprefix("valid_"): value for name, value in one.items()} for one in validations]
    return found[-1] if task.checkpoint == "last" else max(found, key=lambda one: _comparable(one[task.metric]))


def _comparable(value: float) -> float:
    """Return a score for comparing: a correlation that is no number (all predictions are the same) is the worst."""
    return -math.inf if math.isnan(value) else value


def choices_table(found: dict[tuple[str, str], Choice], headers: tuple[str, ...] = CHOICE_HEADERS) -> str:
    """Return a table of what was chosen for each scheme and task, how far the runs lie apart, and what is reported."""
    return table([[*key, *one.row()][: len(headers)] for key, one in found.items()], headers)
