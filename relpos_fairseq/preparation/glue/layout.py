"""Finds the files of GLUE's tasks, and of XNLI in the layouts in which it is handed on.

XNLI: the release's (`xnli.dev.tsv`, `xnli.test.tsv`, all languages in one file, with a header) or
XTREME's (`dev-de.tsv`, `test-de.tsv`: sentence, sentence, label, quoted as in CSV, no header; its
own test files have no label). It is trained on English: `train-en.tsv` (XTREME),
`multinli.train.en.tsv` (XNLI-MT) or GLUE's `MNLI/train.tsv`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.lines import COMPRESSED
from relpos_fairseq.preparation.glue.reading import TableFile, languages_of, width_of, without_labels
from relpos_fairseq.preparation.glue.tasks import Columns, Task

XTREME = Columns("0", "1", "2", count=3, quoted=True)
XTREME_TEST = replace(without_labels(XTREME), count=2)
XNLI_MT = Columns("premise", "hypo", "label")
DIAGNOSTIC = "diagnostic"  # beside the tasks, or in AX
BY_LANGUAGE = re.compile(r"(?P<split>dev|test)-(?P<language>[\w-]+)\.tsv(\.gz|\.bz2|\.xz)?")


def sources_of(task: Task, root: Path) -> dict[str, TableFile]:
    """Split to source, for every split that is there in the task's folder below `root`.

    Raises:
        PreparationError: the folder, its train or its dev file is missing.
    """
    folder = root / task.name
    if not folder.is_dir():
        raise PreparationError(
            f"{task.name}: there is no folder {folder}; give the folder that has {task.name}/ in "
            "GLUE's layout, or leave the task out of --tasks"
        )
    return _xnli(task, folder) if task.name == "XNLI" else _glue(task, folder)


def find_file(folder: Path, *names: str) -> Path | None:
    """The first of several files that exists, plain or compressed."""
    paths = [folder / f"{name}{ending}" for name in names for ending in COMPRESSED]
    return next((path for path in paths if path.is_file()), None)


def _glue(task: Task, folder: Path) -> dict[str, TableFile]:
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


def _xnli(task: Task, folder: Path) -> dict[str, TableFile]:
    """Train and valid in English; `valid_xx` and `test_xx` in every language that is there."""
    sources = {"train": _xnli_train(task, folder)}
    for split, stem in (("valid", "dev"), ("test", "test")):
        path = find_file(folder, f"xnli.{stem}.tsv")
        if path is not None:
            for language in languages_of(path):
                sources[f"{split}_{language}"] = TableFile(path, task.columns, language)
    for path in sorted(folder.iterdir()):
        if match := BY_LANGUAGE.fullmatch(path.name):
            split = "valid" if match["split"] == "dev" else "test"
            unlabelled = split == "test" and width_of(path) == XTREME_TEST.count
            columns = XTREME_TEST if unlabelled else XTREME
            sources[f"{split}_{match['language']}"] = TableFile(path, columns)
    if "valid_en" not in sources:
        raise _missing(task, folder, "xnli.dev.tsv with English rows, or dev-en.tsv")
    return {"train": sources.pop("train"), "valid": replace(sources["valid_en"])} | sources


def _xnli_train(task: Task, folder: Path) -> TableFile:
    if path := find_file(folder, "train-en.tsv"):
        return TableFile(path, XTREME)
    if path := find_file(folder, "multinli.train.en.tsv"):
        return TableFile(path, XNLI_MT)
    if path := find_file(folder.parent / "MNLI", "train.tsv"):
        return TableFile(path, task.columns)
    raise _missing(task, folder, "train-en.tsv (or multinli.train.en.tsv, or ../MNLI/train.tsv)")


def _missing(task: Task, folder: Path, name: str) -> PreparationError:
    return PreparationError(f"{task.name}: {folder / name} is missing (.gz, .bz2 and .xz of it would do)")
