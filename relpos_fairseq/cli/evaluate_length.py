"""Perplexity of a language model by the length of its context and of its memory.

    relpos evaluate length CHECKPOINT DATA_BIN --out DIR
        [--lengths 64,128,256] [--mem-lens 0,128,512] [--split valid] [--tokens 20000]
        [--override position_rope_scaling=yarn]

For every length, windows of that many tokens, moved on by half a window (--stride), score the same
predictions: the last --tokens of the split.  For a model with memory, every memory length is
scored too, with segments of the trained length.  By default both go from half to 16 times what was
trained.  Writes length.csv and length.png; finished points are kept, so an interrupted run goes on.
A scheme that cannot read a length is reported so, and so is one that reads it badly, compared with
the trained length, which is always scored.  --override evaluates under other flags of the model
than it was trained with, as fairseq's --model-overrides does; what must not change is refused.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "perplexity of a language model by length of context and memory"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoint", type=Path)
    add("data", type=Path, help="folder of binarised text")
    add("--lengths", type=numbers, help="tokens of context, joined by commas")
    add("--mem-lens", type=numbers, help="memory lengths, joined by commas")
    add("--split", default="valid")
    add("--tokens", type=int, default=20000, help="predictions scored: the last")
    add("--stride", type=int, help="tokens between windows; default: half of each")
    add("--override", action="append", default=[], metavar="FIELD=VALUE", help="a flag of the model")
    add("--rows", type=int, default=4, help="rows or windows evaluated together")
    add("--out", type=Path, required=True)


def numbers(text: str) -> list[int]:
    """Read numbers joined by commas."""
    return [int(part) for part in text.split(",") if part.strip()]


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.evaluation.length import Options, evaluate

    evaluate(Options(**vars(args)))
