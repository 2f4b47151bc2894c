r"""Make data-bins for fairseq's sentence_prediction from GLUE's files, and from XNLI's.

    relpos prepare glue glue_data --tokenizer data/wiki/data-bin --out data-bin/glue \
        --tasks CoLA,MRPC,RTE,STS-B --max-length 128

`glue_data` has a folder for every task, in GLUE's own layout (`RTE/train.tsv`, `RTE/dev.tsv`; .gz,
.bz2 and .xz will do); XNLI also in its release's or XTREME's. Tasks that are done are kept.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.preparation.glue.settings import check

HELP = "GLUE's and XNLI's files, for fine-tuning"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("glue", type=Path, help="folder with a folder for every task")
    add("--tokenizer", type=Path, help="folder of the model's tokenizer and dict.txt, as prepare_mlm.py writes")
    add("--out", type=Path, help="folder to write to")
    add(
        "--text",
        type=Path,
        metavar="FILE",
        help="instead: write the training sentences as text for prepare_mlm.py, an example a "
        "document, a sentence a line",
    )
    add("--tasks", default=None, help="separated by commas (default: those of GLUE that are there)")
    add(
        "--max-length",
        type=int,
        default=512,
        metavar="N",
        help="tokens of an example, special ones included; longer ones lose the end of their "
        "longer sentence, as in BERT; 0: no limit (default: %(default)s)",
    )
    add(
        "--on-bad-row",
        choices=("fail", "drop"),
        default="fail",
        help="rows with columns or labels missing (default: %(default)s)",
    )
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    add("--force", action="store_true", help="repeat tasks that are done")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    check(args)

    from relpos_fairseq.preparation.glue import stages

    if args.text:
        stages.write_sentences(stages.tasks_of(args), args.glue, args.text, args.on_bad_row)
    else:
        stages.GluePreparation(args).run(["prepare_glue.py", *argv], args.force)
