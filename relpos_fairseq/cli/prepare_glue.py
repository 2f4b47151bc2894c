#!/usr/bin/env python3
"""Makes data-bins for fairseq's sentence_prediction from GLUE's files, and from XNLI's.

    python scripts/prepare_glue.py glue_data --tokenizer data/wiki/data-bin --out data-bin/glue \
        --tasks CoLA,MRPC,RTE,STS-B --max-length 128

`glue_data` has a folder for every task, in GLUE's own layout (`RTE/train.tsv`, `RTE/dev.tsv`; .gz,
.bz2 and .xz will do); XNLI also in its release's or XTREME's. Tasks that are done are kept.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.engine.command import run_command
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import open_text_out
from relpos_fairseq.engine.manifest import table, write_manifest
from relpos_fairseq.engine.stages import Stage, run_stages
from relpos_fairseq.preparation.glue.binarise import PAIR_EXTRA, write_task
from relpos_fairseq.preparation.glue.layout import sources_of
from relpos_fairseq.preparation.glue.reading import read_examples
from relpos_fairseq.preparation.glue.tasks import GLUE, Task, chosen_tasks
from relpos_fairseq.preparation.mlm.vocabulary import Vocabulary, tokenizer_files


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read and check the command line.

    Raises:
        PreparationError: a value is wrong.
    """
    parser = argparse.ArgumentParser(prog="prepare_glue.py", description="GLUE to data-bins.")
    add = parser.add_argument
    add("glue", type=Path, help="folder with a folder for every task")
    add("--tokenizer", type=Path,
        help="folder of the model's tokenizer and dict.txt, as prepare_mlm.py writes")  # fmt: skip
    add("--out", type=Path, help="folder to write to")
    add("--text", type=Path, metavar="FILE",
        help="instead: write the training sentences as text for prepare_mlm.py, an example a "
        "document, a sentence a line")  # fmt: skip
    add("--tasks", default=None, help="separated by commas (default: those of GLUE that are there)")
    add("--max-length", type=int, default=512, metavar="N",
        help="tokens of an example, special ones included; longer ones lose the end of their "
        "longer sentence, as in BERT; 0: no limit (default: %(default)s)")  # fmt: skip
    add("--on-bad-row", choices=("fail", "drop"), default="fail",
        help="rows with columns or labels missing (default: %(default)s)")  # fmt: skip
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    add("--force", action="store_true", help="repeat tasks that are done")
    args = parser.parse_args(argv)
    if args.max_length and args.max_length < 2 * PAIR_EXTRA:
        raise PreparationError(f"--max-length must be 0 or at least {2 * PAIR_EXTRA}, got "
                               f"{args.max_length}")  # fmt: skip
    if args.workers < 1:
        raise PreparationError(f"--workers must be at least 1, got {args.workers}")
    if not args.text and not (args.tokenizer and args.out):
        raise PreparationError("give --tokenizer and --out, or --text")
    if not args.glue.is_dir():
        raise PreparationError(f"there is no folder {args.glue}: give the one with GLUE's tasks")
    return args


def present(root: Path) -> list[Task]:
    """GLUE's tasks that have a folder.

    Raises:
        PreparationError: none has.
    """
    tasks = [task for task in GLUE.values() if (root / task.name).is_dir()]
    if not tasks:
        raise PreparationError(f"{root} has none of the folders {', '.join(GLUE)}")
    return tasks


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare.

    Raises:
        ValueError: what is wrong with the input or the command line.
    """
    args = parse(argv)
    tasks = chosen_tasks(args.tasks) if args.tasks else present(args.glue)
    if args.text:
        write_sentences(tasks, args.glue, args.text, args.on_bad_row)
        return
    vocabulary = Vocabulary(args.tokenizer)
    options = {name: getattr(args, name) for name in ("max_length", "on_bad_row")}
    stages, inputs = [], {}
    for task in tasks:
        paths = {source.path for source in sources_of(task, args.glue).values()}
        inputs |= {f"{task.name}/{path.name}": path for path in paths}
        stages.append(
            Stage(
                task.name,
                lambda task=task: write_task(
                    task,
                    args.glue,
                    args.out / task.name,
                    vocabulary,
                    options | {"workers": args.workers},
                ),
                [*sorted(paths), *tokenizer_files(args.tokenizer)],
                [args.out / task.name],
                options,
            )  # fmt: skip
        )
    counts = run_stages(stages, args.out, force=args.force)
    write_manifest(
        args.out / "manifest.json",
        command=["prepare_glue.py", *(sys.argv[1:] if argv is None else map(str, argv))],
        inputs=inputs,
        outputs=[args.out / task.name for task in tasks],
        stages=counts,
    )
    report(tasks, counts)


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


def report(tasks: list[Task], counts: dict[str, dict]) -> None:
    """Print what was made."""
    rows = []
    for task in tasks:
        found = counts[task.name]
        for split in [name[: -len("_rows")] for name in found if name.endswith("_rows")]:
            values = [found.get(f"{split}_{name}", 0) for name in
                      ("rows", "dropped", "tokens", "unknown", "longest", "shortened")]  # fmt: skip
            rows.append((task.name, split, *values))
    headers = ("task", "split", "rows", "dropped", "tokens", "unknown", "longest", "shortened")
    print(table(rows, headers))


if __name__ == "__main__":
    sys.exit(run_command(main))
