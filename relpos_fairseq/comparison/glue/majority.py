"""What a classifier scores that knows nothing but the training labels."""

from __future__ import annotations

from collections import Counter

from relpos_fairseq.preparation.glue.tasks import Task


def majority(task: Task, train: list[str], valid: list[str]) -> dict[str, float]:
    """The metrics of always answering the most frequent training label, in per cent.

    For a number it is its mean, which correlates with nothing: 0, as is Matthews' correlation of a
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
