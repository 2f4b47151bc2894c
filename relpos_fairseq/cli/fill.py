"""Fill the one <mask> of each line by a pretrained masked language model.

    echo "The capital of France is <mask>." | relpos fill checkpoints/checkpoint_best.pt
    relpos fill checkpoints/checkpoint_best.pt lines.txt --top-k 10 --jsonl

Prints the line's number, a probability, the piece and the whole line, parted by tabs, the best
first; with --jsonl {"line", "source", "filled": [{"text", "probability", "piece"}]}.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "the likeliest words for <mask>, by a masked language model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT")
    add("file", type=Path, nargs="?", metavar="FILE", help="a text a line (standard input)")
    add("--out", type=Path, help="write here, whole or not at all (standard output)")
    add("--data", type=Path, help="data folder, where the checkpoint has no text/ beside it")
    add("--top-k", type=int, default=5, metavar="K", help="pieces a line (%(default)s)")
    add("--jsonl", action="store_true", help="print a JSON object a line")
    add("--cpu", action="store_true", help="no GPU")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.inference.commands import fill_lines

    fill_lines(args)
