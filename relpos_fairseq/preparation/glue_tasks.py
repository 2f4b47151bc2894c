"""Describe the tasks of GLUE (Wang et al. 2018) and XNLI (Conneau et al. 2018), find their files and read their rows.

A task's first metric chooses checkpoints and learning rates, and is the one in the papers' tables: F1 for
MRPC and QQP, Spearman's correlation for STS-B, Matthews' for CoLA, else accuracy (Huang2020, section 4.2; M4M,
Table 2).

GLUE is read from the files of gluebenchmark.com.
XNLI is read from its release (`xnli.dev.tsv`, `xnli.test.tsv`: all languages in one file, with a header) or from
XTREME (`dev-de.tsv`, `test-de.tsv`: sentence, sentence, label, quoted as in CSV, no header; its own test files have
no label). It is trained on English: `train-en.tsv` (XTREME), `multinli.train.en.tsv` (XNLI-MT) or GLUE's
`MNLI/train.tsv`.
"""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.lines import COMPRESSED, read_lines

NLI = ("contradiction", "entailment", "neutral")


@dataclass(frozen=True)
class Columns:
    """The columns of a file that hold the sentences and the label."""

    first: str  # column of the first sentence: its name in the header
    second: str = ""  # column of the second sentence; empty: there is none
    label: str = "label"  # column of the label
    count: int = 0  # number of columns where there is no header; the others are then numbers ("3")
    quoted: bool = False  # whether columns may be quoted as in CSV; else a quote is a character like others


@dataclass(frozen=True)
class GlueTask:
    """One task of GLUE, or XNLI."""

    name: str  # name of the task and of its folder
    columns: Columns  # the columns of train and dev
    metrics: tuple[str, ...] = ("accuracy",)  # the one that chooses checkpoints first
    labels: tuple[str, ...] = ("0", "1")  # the classes in their order; empty: a number is predicted
    test_columns: Columns | None = None  # the columns of test, where they differ; it has no labels
    # from fairseq's name of a split to the file's name without ending
    splits: dict[str, str] = field(default_factory=lambda: {"train": "train", "valid": "dev", "test": "test"})

    @property
    def regression(self) -> bool:
        """Whether the task predicts a number, not a class."""
        return not self.labels

    @property
    def classes(self) -> int:
        """The number of outputs of the classification head: 1 for regression."""
        return len(self.labels) or 1

    @property
    def pairs(self) -> bool:
        """Whether an example has two sentences."""
        return bool(self.columns.second)

    @property
    def valid_splits(self) -> list[str]:
        """The validation splits: two for MNLI (matched, mismatched), else one."""
        return [split for split in self.splits if split.startswith("valid")]


_MATCHED = {
    "train": "train",
    "valid": "dev_matched",
    "valid1": "dev_mismatched",
    "test": "test_matched",
    "test1": "test_mismatched",
    "test2": "diagnostic",  # GLUE's diagnostic set, which lies in a folder of its own
}

GLUE = {
    task.name: task
    for task in (
        GlueTask("CoLA", Columns("3", label="1", count=4), ("mcc",), test_columns=Columns("sentence")),
        GlueTask("MNLI", Columns("sentence1", "sentence2", "gold_label"), labels=NLI, splits=_MATCHED),
        GlueTask("MRPC", Columns("#1 String", "#2 String", "Quality"), ("f1", "accuracy")),
        GlueTask("QNLI", Columns("question", "sentence"), labels=("entailment", "not_entailment")),
        GlueTask("QQP", Columns("question1", "question2", "is_duplicate"), ("f1", "accuracy")),
        GlueTask("RTE", Columns("sentence1", "sentence2"), labels=("entailment", "not_entailment")),
        GlueTask("SST-2", Columns("sentence")),
        GlueTask("STS-B", Columns("sentence1", "sentence2", "score"), ("spearman", "pearson"), labels=()),
        GlueTask("WNLI", Columns("sentence1", "sentence2")),
    )
}
XNLI = GlueTask("XNLI", Columns("sentence1", "sentence2", "gold_label"), labels=NLI)
TASKS = GLUE | {"XNLI": XNLI}


def chosen_tasks(names: str) -> list[GlueTask]:
    """Return the tasks named in a comma-separated list, each once, in the order of the list.

    Raises:
        ValueError: a name is unknown, or there is none.
    """
    folded = {name.replace("-", "").lower(): task for name, task in TASKS.items()}
    tasks = {}
    for name in filter(None, (name.strip() for name in names.split(","))):
        task = folded.get(name.replace("-", "").lower())
        if task is None:
            raise ValueError(f"there is no GLUE task {name!r}; choose from {', '.join(TASKS)}")
        tasks[task.name] = task
    if not tasks:
        raise ValueError(f"no task was named in {names!r}; choose from {', '.join(TASKS)}")
    return list(tasks.values())


# Rows

LABEL_SPELLINGS = {"contradictory": "contradiction"}  # as XNLI-MT's training files write it
LOWEST_SCORE, HIGHEST_SCORE = 0.0, 5.0  # STS-B's


@dataclass(frozen=True)
class TableFile:
    """The file of a split, and how to read it."""

    path: Path
    columns: Columns  # its columns; where `label` is empty, the file has no labels
    language: str = ""  # only rows whose column `language` says so; empty: all
    languages: tuple[str, ...] = ()  # all of the file
    strays: bool = True  # whether lines that are rows of no language count here


@dataclass(frozen=True)
class Example:
    """One example of a task: a row of its file."""

    first: str  # first sentence
    second: str  # second sentence; empty where the task has only one
    label: str  # as the file spells it; empty in a test file


def read_examples(
    source: TableFile, task: GlueTask, on_bad_row: str = "fail", counts: Counter | None = None
) -> Iterator[Example]:
    """Yield the examples of a split's file.

    Args:
        source: the file.
        task: its task.
        on_bad_row: `fail` raises an error at a malformed row; `drop` skips it.
        counts: its entries `rows`, `dropped` and `blank` are increased by the numbers of rows yielded and
            skipped and of lines that are blank, `label NAME` by the rows of a class.

    Raises:
        UserError: a column is missing, or a row is bad and `on_bad_row` is `fail`; the
            message names file and line.
    """
    counts = Counter() if counts is None else counts
    rows = enumerate(read_lines(source.path), start=1)
    width, places = _places(source, rows)
    for number, line in rows:
        if not line.strip():
            counts["blank"] += source.strays
            continue
        try:
            fields = _fields(line, source.columns.quoted)
            if source.language and (found := _language(fields, places["language"])) != source.language:
                if source.strays and found not in source.languages:
                    raise UserError(f"{len(fields)} columns of {width}, and the language {found!r}: this is no row")
                continue
            example = _example(fields, width, places, task)
        except UserError as error:
            if on_bad_row != "drop":
                raise UserError(
                    f"{source.path}, line {number}: {error}; correct the row, or leave such rows "
                    "out with --on-bad-row drop"
                ) from None
            counts["dropped"] += 1
            continue
        counts["rows"] += 1
        if example.label and not task.regression:
            counts[f"label {example.label}"] += 1
        yield example


def width_of(path: Path) -> int:
    """Return the number of columns in the first row of a file whose columns may be quoted; 0 if it has no rows."""
    for line in filter(str.strip, read_lines(path)):
        try:
            return len(_fields(line, quoted=True))
        except UserError as error:
            raise UserError(f"{path}, first row: {error}") from None
    return 0


def _fields(line: str, quoted: bool) -> list[str]:
    """Split a row into columns at tabs; if they may be quoted, by the rules of CSV."""
    if not quoted:
        return line.split("\t")
    try:
        return next(csv.reader([line], delimiter="\t", strict=True))
    except csv.Error as error:
        raise UserError(f"quotes are not as in CSV ({error})") from None


def languages_of(path: Path) -> tuple[str, ...]:
    """Return the languages of the whole rows of a file that has a column `language`, in alphabetical order."""
    rows = read_lines(path)
    header = next(rows, "").split("\t")
    if "language" not in header:
        raise UserError(f"{path}, line 1: there is no column 'language' in {header}")
    place = header.index("language")
    found = {_language(fields, place) for line in rows if len(fields := line.split("\t")) == len(header)}
    return tuple(sorted(filter(LANGUAGE.fullmatch, found)))


def _language(fields: list[str], place: int) -> str:
    """Return the language of a row; "" where it has none."""
    return fields[place].strip().lower() if len(fields) > place else ""


def _places(source: TableFile, rows: Iterator[tuple[int, str]]) -> tuple[int, dict[str, int]]:
    """Return the number of columns, and the index of each column that is read; consume the header if there is one.

    Raises:
        UserError: the header lacks a column.
    """
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
        raise UserError(
            f"{source.path}, line 1: there is no column {missing[0]!r} in the header {header}; "
            "is this the task's own file?"
        )
    return len(header), {part: header.index(name) for part, name in wanted.items()}


def _example(fields: list[str], width: int, places: dict[str, int], task: GlueTask) -> Example:
    """Return a row as an example; raise UserError if the row is malformed."""
    # A tab too many inside a sentence would shift the columns behind it, and half a row end in half a sentence.
    if len(fields) != width:
        raise UserError(f"{len(fields)} columns where {width} are expected")
    found = {part: fields[place].strip() for part, place in places.items()}
    for part in ("first", "second"):
        if part in found and not found[part]:
            raise UserError(f"the {part} sentence is empty")
    label = found.get("label", "")
    if "label" in places:
        label = _checked_label(LABEL_SPELLINGS.get(label, label), task)
    return Example(found["first"], found.get("second", ""), label)


def _checked_label(label: str, task: GlueTask) -> str:
    """Return the label; raise UserError if it is missing, or no class or score of the task."""
    if not label:
        raise UserError("the label is missing")
    if not task.regression:
        if label not in task.labels:
            raise UserError(f"the label must be one of {list(task.labels)}, got {label!r}")
        return label
    try:
        score = float(label)
    except ValueError:
        score = float("nan")
    if not LOWEST_SCORE <= score <= HIGHEST_SCORE:
        raise UserError(f"the score must be a number from {LOWEST_SCORE:g} to {HIGHEST_SCORE:g}, got {label!r}")
    return label


def without_labels(columns: Columns) -> Columns:
    """Return a copy of the columns without the label, for a file without labels."""
    return replace(columns, label="")


# Files

XTREME = Columns("0", "1", "2", count=3, quoted=True)
XTREME_TEST = replace(without_labels(XTREME), count=2)
XNLI_MT = Columns("premise", "hypo", "label")
DIAGNOSTIC = "diagnostic"  # beside the tasks, or in AX
LANGUAGE = re.compile(r"[a-z]{2,3}([-_]\w+)*")
BY_LANGUAGE = re.compile(r"(?P<split>dev|test)-(?P<language>[\w-]+)\.tsv(\.gz|\.bz2|\.xz)?")


def sources_of(task: GlueTask, root: Path) -> dict[str, TableFile]:
    """Find the files of a task in its folder below `root`; return them by split.

    Raises:
        UserError: the folder, its train or its dev file is missing.
    """
    folder = root / task.name
    if not folder.is_dir():
        raise UserError(
            f"{task.name}: there is no folder {folder}; give the folder that has {task.name}/ in "
            "GLUE's layout, or leave the task out of --tasks"
        )
    return _xnli(task, folder) if task.name == "XNLI" else _glue(task, folder)


def find_file(folder: Path, *names: str) -> Path | None:
    """Return the first of several files that exists, plain or compressed."""
    paths = [folder / f"{name}{ending}" for name in names for ending in COMPRESSED]
    return next((path for path in paths if path.is_file()), None)


def _glue(task: GlueTask, folder: Path) -> dict[str, TableFile]:
    """Find the files of one of GLUE's tasks; return them by split."""
    sources = {}
    for split, stem in task.splits.items():
        path = find_file(folder, f"{stem}.tsv")
        if stem == DIAGNOSTIC:
            others = (folder.parent / one for one in ("diagnostic", "AX"))
            found = (find_file(one, f"{stem}.tsv", "AX.tsv") for one in (folder, *others))
            path = next(filter(None, found), None)
        if path is None and not split.startswith("test"):
            raise _missing(task, folder, f"{stem}.tsv")
        if path is not None:
            columns = task.columns
            if split.startswith("test"):
                columns = without_labels(task.test_columns or columns)
            sources[split] = TableFile(path, columns)
    return sources


def _xnli(task: GlueTask, folder: Path) -> dict[str, TableFile]:
    """Return XNLI's files by split: English `train` and `valid`; `valid_xx` and `test_xx` for each language xx."""
    sources = {"train": _xnli_train(task, folder)}
    for split, stem in (("valid", "dev"), ("test", "test")):
        path = find_file(folder, f"xnli.{stem}.tsv")
        if path is not None:
            languages = languages_of(path)
            for language in languages:
                sources[f"{split}_{language}"] = TableFile(path, task.columns, language, languages, strays=False)
    for path in sorted(folder.iterdir()):
        match = BY_LANGUAGE.fullmatch(path.name)
        if match and not (match[3] and path.with_suffix("").is_file()):  # what is not compressed comes first
            split = "valid" if match["split"] == "dev" else "test"
            unlabelled = split == "test" and width_of(path) == XTREME_TEST.count
            columns = XTREME_TEST if unlabelled else XTREME
            sources[f"{split}_{match['language']}"] = TableFile(path, columns)
    for path in {source.path for source in sources.values() if source.languages}:
        first = next(split for split, source in sources.items() if source.path == path)
        sources[first] = replace(sources[first], strays=True)
    if "valid_en" not in sources:
        raise _missing(task, folder, "xnli.dev.tsv with English rows, or dev-en.tsv")
    return {"train": sources.pop("train"), "valid": replace(sources["valid_en"])} | sources


def _xnli_train(task: GlueTask, folder: Path) -> TableFile:
    """Return XNLI's training file: XTREME's, else XNLI-MT's, else MNLI's from the folder beside."""
    if path := find_file(folder, "train-en.tsv"):
        return TableFile(path, XTREME)
    if path := find_file(folder, "multinli.train.en.tsv"):
        return TableFile(path, XNLI_MT)
    if path := find_file(folder.parent / "MNLI", "train.tsv"):
        return TableFile(path, task.columns)
    raise _missing(task, folder, "train-en.tsv (or multinli.train.en.tsv, or ../MNLI/train.tsv)")


def _missing(task: GlueTask, folder: Path, name: str) -> UserError:
    """Return the error that reports a missing file of a task."""
    return UserError(f"{task.name}: {folder / name} is missing (.gz, .bz2 and .xz of it would do)")
