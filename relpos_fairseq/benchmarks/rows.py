"""Rows of results: candidates timed in turns, relative to one of them, and kept in a CSV file."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from relpos_fairseq.benchmarks.report import progress
from relpos_fairseq.benchmarks.timing import time_in_turns
from relpos_fairseq.engine.files import atomic_path


class RowLog:
    """Rows of results, kept in a CSV file as they come, so that a run may be continued.

    Without a path rows are in memory only; a file that is there is continued or refused.
    """

    def __init__(self, path: Path | None, resume: bool = False) -> None:
        self.path, self.rows = path, []
        if path is None:
            return
        if not path.parent.is_dir():
            raise ValueError(f"--csv {path}: there is no folder {path.parent}")
        if path.exists() and not resume:
            raise ValueError(f"--csv {path} has an earlier run's rows: --resume continues it; or name another")
        if path.exists():
            self.rows = read_csv(path)

    def those(self, where: dict) -> list[dict]:
        """Return the rows whose columns say the same as `where`."""
        return [row for row in self.rows if _is_of(row, where)]

    def lacks(self, where: dict, names: Iterable[str]) -> bool:
        """Tell whether any of these candidates has no row yet."""
        return not {row["name"] for row in self.those(where)}.issuperset(names)

    def add(self, where: dict, rows: Iterable[dict]) -> None:
        """Append rows of candidates that have none; the file has them when this returns."""
        had = {row["name"] for row in self.those(where)}
        self.rows += [{**where, **row} for row in rows if row["name"] not in had]
        if self.path is not None:
            write_csv(self.path, self.rows)

    def replace(self, where: dict, rows: Iterable[dict]) -> None:
        """Put rows in the place of those that were there."""
        self.rows = [row for row in self.rows if not _is_of(row, where)]
        self.add(where, rows)


def _is_of(row: dict, where: dict) -> bool:
    return all(str(row.get(name, "")) == str(value) for name, value in where.items())


def write_csv(path: Path, rows: list[dict]) -> None:
    """Write all rows, whole or not at all."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with atomic_path(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict]:
    """Return the rows of a CSV file; numbers are numbers, empty cells are left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: _value(text) for name, text in row.items() if text} for row in rows]


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def add_times(
    log: RowLog,
    column: dict,
    baseline: str,
    others: Sequence[str],
    together: int,
    make: Callable[[str], Callable[[], object]],
    args: argparse.Namespace,
) -> None:
    """Time what a log lacks, `together` others at a time, and the baseline anew with each handful.

    A run is made by its name when its handful's turn comes, as models fill the memory.
    """
    for start in range(0, max(len(others), 1), together):
        names = [baseline, *others[start : start + together]]
        if log.lacks(column, names):
            runs = {name: make(name) for name in names}
            device, how = torch.device(args.device), (args.rounds, args.seconds)
            log.add(column, timed_rows(column["column"], baseline, runs, device, *how))


def timed_rows(
    column: str, baseline: str, runs: dict[str, Callable[[], object]], device: torch.device, rounds: int, seconds: float
) -> list[dict]:
    """Time candidates in turns; ratios are to the baseline's.

    Returns:
        A row each: name, ms, least_ms, spread, ratio of medians, least_ratio of minima, samples,
        noisy.
    """
    with progress(len(runs) * (rounds + 1), column) as bar:
        times, noisy = time_in_turns(runs, device, rounds, seconds, bar.update)
    base = times[baseline]
    samples = sum(len(found.samples) for found in times.values())
    print(
        f"{column}: {len(runs)} candidates, {len(base.samples)} rounds, {noisy} of {samples} "
        f"samples on a machine that was not idle",
        flush=True,
    )
    return [
        {
            "name": name,
            "ms": round(found.median, 4),
            "least_ms": round(found.least, 4),
            "spread": round(found.spread, 4),
            "ratio": round(found.median / base.median, 4),
            "least_ratio": round(found.least / base.least, 4),
            "samples": len(found.samples),
            "noisy": found.noisy,
        }
        for name, found in times.items()
    ]
