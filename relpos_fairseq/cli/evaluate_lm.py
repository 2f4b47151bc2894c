"""Perplexity and bits a token of language models, on the same predictions.

    relpos evaluate lm CHECKPOINT... --data DATA_BIN [--split test] [--mem-len 640 | --context 256]

A model with memory reads segments of its trained length with --mem-len of memory (default: its
own); any other, or every model with --context, reads windows of that many tokens (default: as
trained) that move on by --stride (default: half a window), so that each prediction sees at least
the rest of a window.  fairseq-eval-lm and fairseq-validate score a checkpoint as it was trained.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "perplexity of language models at a chosen memory or context"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("checkpoints", type=Path, nargs="+", metavar="CHECKPOINT")
    add("--data", type=Path, required=True, help="folder of binarised text")
    add("--split", default="valid", help="default: %(default)s")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--mem-len", type=int, metavar="N", help="tokens of memory")
    which.add_argument("--context", type=int, metavar="N", help="tokens a window")
    add("--stride", type=int, metavar="N", help="tokens between windows (default: half of one)")
    add("--tokens", type=int, metavar="N", help="predictions scored: the last (default: all)")
    add("--rows", type=int, default=4, help="rows or windows evaluated together (%(default)s)")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.evaluation.perplexity import Reading, compare

    reading = Reading(args.mem_len, args.context, args.stride, args.rows)
    print(compare(args.checkpoints, args.data, args.split, args.tokens, reading))
