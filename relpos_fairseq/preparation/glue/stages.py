"""GLUE's tasks to data-bins: a stage for each task."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import open_text_out
from relpos_fairseq.engine.manifest import write_manifest
from relpos_fairseq.engine.stages import Stage
from relpos_fairseq.engine.tables import table
from relpos_fairseq.preparation.base import Preparation
from relpos_fairseq.preparation.glue.binarise import write_task
from relpos_fairseq.preparation.glue.layout import sources_of
from relpos_fairseq.preparation.glue.reading import read_examples
from relpos_fairseq.preparation.glue.tasks import GLUE, Task, chosen_tasks
from relpos_fairseq.preparation.mlm.vocabulary import Vocabulary, tokenizer_files
from relpos_fairseq.preparation.unknown import warn_of_unknown

COLUMNS = ("rows", "dropped", "tokens", "unknown", "longest", "shortened")


class GluePreparation(Preparation):
    """GLUE's and XNLI's files to data-bins for sentence_prediction."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args.out)
        self.args = args
        self.tasks = tasks_of(args)
        self.folders = {task.name: args.out / task.name for task in self.tasks}
        self.paths = {
            task.name: sorted({source.path for source in sources_of(task, args.glue).values()}) for task in self.tasks
        }

    def stages(self) -> list[Stage]:
        args, vocabulary = self.args, Vocabulary(self.args.tokenizer)
        options = {"max_length": args.max_length, "on_bad_row": args.on_bad_row}
        how = options | {"workers": args.workers}
        stages = []
        for task in self.tasks:
            folder = self.folders[task.name]

            def write(task=task, folder=folder) -> dict:
                return write_task(task, args.glue, folder, vocabulary, how)

            read = [*self.paths[task.name], *tokenizer_files(args.tokenizer)]
            stages.append(Stage(task.name, write, read, [folder], options))
        return stages

    def report(self, counts: Mapping[str, Mapping], command: Sequence[str]) -> None:
        named = ((name, path) for name, paths in self.paths.items() for path in paths)
        write_manifest(
            self.out / "manifest.json",
            command=command,
            inputs={f"{name}/{path.name}": path for name, path in named},
            outputs=list(self.folders.values()),
            stages=counts,
            hashes=self.hashes,
        )
        rows = []
        for task in self.tasks:
            found = counts[task.name]
            for split in [name[: -len("_rows")] for name in found if name.endswith("_rows")]:
                values = (found.get(f"{split}_{name}", 0) for name in COLUMNS)
                rows.append((task.name, split, *values))
        print(table(rows, ("task", "split", *COLUMNS)))
        warn_of_unknown({f"{row[0]} {row[1]}": (row[5], row[4]) for row in rows})


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """Return the tasks that are asked for: GLUE's that are whole, where none is named."""
    if args.tasks:
        return chosen_tasks(args.tasks)
    there, tasks = [task for task in GLUE.values() if (args.glue / task.name).is_dir()], []
    if not there:
        raise PreparationError(f"{args.glue} has none of the folders {', '.join(GLUE)}")
    for task in there:
        try:
            sources_of(task, args.glue)
            tasks.append(task)
        except PreparationError as error:
            print(f"warning: {task.name} is left out: {error}", file=sys.stderr)
    if not tasks:
        raise PreparationError(f"{args.glue}: no task is complete (see the warnings)")
    return tasks


def write_sentences(tasks: list[Task], root: Path, path: Path, on_bad_row: str) -> None:
    """Write the training sentences of some tasks, without their labels."""
    rows = []
    with open_text_out(path) as file:
        for task in tasks:
            counts = Counter()
            source = sources_of(task, root)["train"]
            for example in read_examples(source, task, on_bad_row, counts):
                lines = filter(None, (example.first, example.second))
                file.write("".join(f"{line}\n" for line in lines) + "\n")
            rows.append((task.name, counts["rows"], counts["dropped"]))
    print(table(rows, ("task", "rows", "dropped")))
