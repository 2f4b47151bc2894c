"""The papers' tables of costs, measured here: BERT with every position scheme.

    relpos benchmark costs                               # BERT-base, minutes on a CPU
    relpos benchmark costs --model small --layers 0      # BERT-small, all of its layers
    relpos benchmark costs --layers 0 --vocabulary 30522 --batch 16 --device cuda

Parameters are counted from the real model, whole, with BERT's 30,522 words and tables for 512
positions.  Time and memory are those of a model of `--layers` layers and `--vocabulary` words (few
by default, as the softmax over words costs the same with every scheme): a step of training
(forward, loss of 15 % masked tokens, backward, Adam), a forward pass, and the step's peak memory,
relative to `learned`; steps a second stand beside those without positions.  Beside them stand the
papers' numbers: 000 is Huang et al. 2020, 003 Multiplicative Position-aware Transformer Models, 004
Chen et al. 2021.  Tables are unclipped unless --clip says otherwise, as the papers pre-train.
Candidates are timed in turns, each only once the machine is idle otherwise.
"""

import argparse
import logging
from collections.abc import Sequence

from relpos_fairseq.cli.measuring import INTERRUPTED, add_device, add_output  # noqa: F401

HELP = "the papers' tables of costs, beside what is measured here"
BACKENDS = "auto, reference, sdpa, blocked, native, triton"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="base", choices=["base", "small"])
    add("--lengths", default="512", help="separated by commas")
    add("--batch", type=int, default=2, help="rows")
    add("--layers", type=int, default=2, help="layers that are timed; 0: all")
    add("--vocabulary", type=int, default=1000, help="words that are timed")
    add("--clip", type=int, help="clip distance; 0 (default): unclipped")
    add("--dropout", type=float, default=0.0)
    add(
        "--fit",
        type=int,
        default=0,
        metavar="MIB",
        help="also search how many rows a training step holds in so much memory (000 section 3.6: "
        "16384, of a GPU); 0: do not",
    )
    add("--schemes", default="all", help="names separated by commas, or all")
    add("--backends", default="auto", help=f"a row each: of {BACKENDS}")
    add_device(parser)
    add_output(parser, rounds=3, seconds=120.0)


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    logging.basicConfig(level=logging.WARNING)  # before fairseq is imported, which reports more
    from relpos_fairseq.benchmarks.costs import benchmark

    benchmark(args)
