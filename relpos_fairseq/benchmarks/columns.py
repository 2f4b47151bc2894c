"""A column of a table: candidates timed in turns, relative to one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

from relpos_fairseq.benchmarks.report import Log, progress
from relpos_fairseq.benchmarks.timing import Times, time_in_turns


class Rows:
    """Rows of one setting, written as they come; those that a continued file has are kept.

    Args:
        log: where rows go.
        setting: what must be the same for rows of an earlier run to count.
    """

    def __init__(self, log: Log, setting: str) -> None:
        """Take up what the log has."""
        self.log, self.setting = log, setting

    @property
    def found(self) -> list[dict]:
        """The rows so far."""
        return self.log.those({"setting": self.setting})

    def lacks(self, column: str, names: Iterable[str]) -> bool:
        """Whether any of these rows is yet to be measured."""
        had = {row["name"] for row in self.found if row["column"] == column}
        return not had.issuperset(names)

    def add(self, column: str, rows: Iterable[dict]) -> None:
        """Append rows of a column; a name that it has already stays as it is."""
        had = {row["name"] for row in self.found if row["column"] == column}
        self.log.add(
            {"setting": self.setting, "column": column, **row}
            for row in rows
            if row["name"] not in had
        )


def timed_rows(
    column: str,
    baseline: str,
    runs: dict[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    seconds: float,
) -> list[dict]:
    """Time candidates in turns.

    Args:
        column: what is measured, for rows and messages.
        baseline: name of the candidate that ratios are relative to.
        runs: candidates by name.
        device: where they run.
        rounds: samples of each.
        seconds: about how long that may take.

    Returns:
        A row each: name, ms, ratio of medians and of minima, spread, samples, noisy.
    """
    with progress(len(runs) * (rounds + 1), column) as bar:
        times, noisy = time_in_turns(runs, device, rounds, seconds, tick=bar.update)
    base = times[baseline]
    samples = sum(len(found.samples) for found in times.values())
    print(
        f"{column}: {len(runs)} candidates, {len(base.samples)} rounds, {noisy} of {samples} "
        f"samples on a machine that was not idle",
        flush=True,
    )
    return [{"name": name, **_numbers(found, base)} for name, found in times.items()]


def _numbers(found: Times, base: Times) -> dict[str, float]:
    return {
        "ms": found.median,
        "ratio": found.median / base.median,
        "least": found.least / base.least,
        "spread": found.spread,
        "samples": len(found.samples),
        "noisy": found.noisy,
    }


def cell(row: dict | None, baseline: str) -> str:
    """A row's numbers in a table's cell."""
    if row is None:
        return "-"
    if "MiB" in row:
        return f"{row['MiB']:.0f} MiB"
    if row["name"] == baseline:
        return f"{row['ms']:.1f} ms ±{row['spread']:.0%}"
    return f"{row['ratio']:.2f} ({row['least']:.2f}) ±{row['spread']:.0%}"


def versions(names: Sequence[str]) -> str:
    """Versions of the packages that are installed."""
    found = []
    for name in dict.fromkeys(names):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)
