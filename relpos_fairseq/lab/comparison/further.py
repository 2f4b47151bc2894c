"""Say whether seeds that somebody else has run lie where those of a comparison do."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from relpos_fairseq.io.progress import counted
from relpos_fairseq.lab.comparison import statistics
from relpos_fairseq.lab.comparison.run import Run
from relpos_fairseq.lab.comparison.scores import METRICS, Metric
from relpos_fairseq.lab.comparison.summary import statistics_of

UNKNOWN = "a processor that is not recorded"


def verdicts(runs: list[tuple[Run, dict]], published: list[tuple[Run, dict]]) -> Iterator[str]:
    """Yield a line a run: each test set's score, whether it lies within the interval of a further seed, the processors.

    Args:
        runs: with their results.
        published: those of the comparison's own seeds.
    """
    for run, result in runs:
        known = [
            one
            for other, one in published
            if (other.task.label, other.scheme) == (run.task.label, run.scheme) and other.seed != run.seed
        ]
        told = [
            verdict(name, METRICS[metric], result, known)
            for name in run.task.sets()
            for metric in result["sets"][name]["statistics"]
        ]
        made = ", ".join(sorted({one.get("processor", UNKNOWN) for one in known}))
        where = f"on {result.get('processor', UNKNOWN)}"
        where += f"; {counted(len(known), 'seed')} on {made}" if known else ""
        other = sum(one["code"] != result["code"] for one in known)
        where += f", {other} of another version of the code" if other else ""
        yield f"{run.title}: {'; '.join(told)} ({where})"


def verdict(name: str, metric: Metric, result: dict, known: list[dict]) -> str:
    """Return a run's score on a test set, and whether it is where other seeds' would be."""
    rows = [statistics_of(one["sets"][name], metric) for one in (result, *known)]
    value, *others = (float(metric.value(one.sum(0))) for one in rows)
    said = f"{name} {metric.name} {value:.{metric.digits}f}"
    if len(others) < 2:
        return f"{said}, and {counted(len(others), 'seed')} to compare it with"
    one = statistics.next_seed(np.array(others), metric.step(len(rows[0]))).within(*metric.limits)
    # What is printed is what is compared: both to the digits of the tables.
    low, high, shown = (round(number, metric.digits) for number in (one.low, one.high, value))
    inside = "within" if low <= shown <= high else "OUTSIDE"
    return f"{said}, {inside} [{low:.{metric.digits}f}, {high:.{metric.digits}f}]"
