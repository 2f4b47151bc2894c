"""Reads the tab-separated files of GLUE and XNLI: only newlines end lines.

Quotes are letters but in XTREME's files, which Python's csv has written.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.lines import read_lines
from relpos_fairseq.preparation.glue.tasks import Columns, Task

LABEL_SPELLINGS = {"contradictory": "contradiction"}  # as XNLI-MT's training files write it
LOWEST_SCORE, HIGHEST_SCORE = 0.0, 5.0  # STS-B's


@dataclass(frozen=True)
class TableFile:
    """Where the rows of a split are."""

    path: Path
    columns: Columns  # its columns; without a label's name it has no labels
    language: str = ""  # only rows whose column `language` says so; empty: all


@dataclass(frozen=True)
class Example:
    """One row."""

    first: str  # first sentence
    second: str  # second sentence, empty where the task has one
    label: str  # as the file spells it; empty in a test file


def read_examples(
    source: TableFile, task: Task, on_bad_row: str = "fail", counts: Counter | None = None
) -> Iterator[Example]:
    """The rows of a split.

    Args:
        source: the file.
        task: its task.
        on_bad_row: `fail`, or `drop` rows with columns or labels missing.
        counts: counts `rows` and `dropped`.

    Raises:
        PreparationError: a column is missing, or a row is bad and `on_bad_row` is `fail`; the
            message names file and line.
    """
    counts = Counter() if counts is None else counts
    rows = enumerate(read_lines(source.path), start=1)
    width, places = _places(source, rows)
    for number, line in rows:
        if not line.strip():
            continue
        try:
            fields = _fields(line, source.columns.quoted)
            if source.language and source.language not in fields[places["language"] :][:1]:
                continue
            example = _example(fields, width, places, task)
        except PreparationError as error:
            if on_bad_row != "drop":
                raise PreparationError(
                    f"{source.path}, line {number}: {error}; correct the row, or leave such rows "
                    "out with --on-bad-row drop"
                ) from None
            counts["dropped"] += 1
            continue
        counts["rows"] += 1
        yield example


def width_of(path: Path) -> int:
    """The number of columns of a quoted file's first row; 0: it has no rows."""
    for line in filter(str.strip, read_lines(path)):
        try:
            return len(_fields(line, quoted=True))
        except PreparationError as error:
            raise PreparationError(f"{path}, first row: {error}") from None
    return 0


def _fields(line: str, quoted: bool) -> list[str]:
    if not quoted:
        return line.split("\t")
    try:
        return next(csv.reader([line], delimiter="\t", strict=True))
    except csv.Error as error:
        raise PreparationError(f"quotes are not as in CSV ({error})") from None


def languages_of(path: Path) -> list[str]:
    """The languages of a file that has a column `language`, in alphabetical order."""
    rows = read_lines(path)
    header = next(rows, "").split("\t")
    if "language" not in header:
        raise PreparationError(f"{path}, line 1: there is no column 'language' in {header}")
    place = header.index("language")
    return sorted({fields[place] for line in rows if len(fields := line.split("\t")) > place})


def _places(source: TableFile, rows: Iterator[tuple[int, str]]) -> tuple[int, dict[str, int]]:
    """Number of columns, and where each needed one is; reads the header where there is one."""
    columns = source.columns
    wanted = {"first": columns.first, "second": columns.second, "label": columns.label}
    wanted = {part: name for part, name in wanted.items() if name}
    if source.language:
        wanted["language"] = "language"
    if columns.count:
        return columns.count, {part: int(name) for part, name in wanted.items()}
    header = next(rows, (0, ""))[1].split("\t")
    missing = [name for name in wanted.values() if name not in header]
    if missing:
        raise PreparationError(
            f"{source.path}, line 1: there is no column {missing[0]!r} in the header {header}; "
            "is this the task's own file?"
        )
    return len(header), {part: header.index(name) for part, name in wanted.items()}


def _example(fields: list[str], width: int, places: dict[str, int], task: Task) -> Example:
    """One row; what is wrong with it is an error."""
    # A tab too many inside a sentence would shift the columns behind it, silently.
    if len(fields) <= max(places.values()) or len(fields) > width:
        raise PreparationError(f"{len(fields)} columns where {width} are expected")
    found = {part: fields[place].strip() for part, place in places.items()}
    for part in ("first", "second"):
        if part in found and not found[part]:
            raise PreparationError(f"the {part} sentence is empty")
    label = found.get("label", "")
    if "label" in places:
        label = _checked_label(LABEL_SPELLINGS.get(label, label), task)
    return Example(found["first"], found.get("second", ""), label)


def _checked_label(label: str, task: Task) -> str:
    """The label; one that is none of the task's is an error."""
    if not label:
        raise PreparationError("the label is missing")
    if not task.regression:
        if label not in task.labels:
            raise PreparationError(f"the label must be one of {list(task.labels)}, got {label!r}")
        return label
    try:
        score = float(label)
    except ValueError:
        score = float("nan")
    if not LOWEST_SCORE <= score <= HIGHEST_SCORE:
        raise PreparationError(f"the score must be a number from {LOWEST_SCORE:g} to {HIGHEST_SCORE:g}, got {label!r}")
    return label


def without_labels(columns: Columns) -> Columns:
    """The same columns of a file that has no labels."""
    return replace(columns, label="")
