"""Measure text preparation: pairs a second by workers, peak memory by size, beside the usual way.

    relpos benchmark preparation --text my_text --pair en-de --pairs 100000 1000000

The text is real text replicated with variation: in every copy words are replaced by words drawn
from the same text, and some become compounds that were not there. Timed are the stages of `relpos
prepare wmt` on it: clean (normalise, filter), tokenise, merge (duplicates), sample and learn
(units), and apply. The usual way is one process doing the same to every line: sacremoses'
normalizer and tokenizer, then subword-nmt's apply-bpe with the same merges; it filters nothing.
Pairs a second are without learning, which is the same program in both. Memory is the proportional
set size of the whole process tree, sampled. The processor's seconds tell more where other programs
run beside it.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "text preparation: pairs a second, memory, beside the usual way"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--text", type=Path, required=True, help="folder with train, valid and test")
    add("--pair", default="en-de")
    add("--pairs", type=int, nargs="+", default=[100_000, 1_000_000])
    add("--workers", type=int, nargs="+", default=[1, 2])
    add("--vocab-size", type=int, default=8000)
    add("--usual-pairs", type=int, help="for the usual way (default: the largest of --pairs)")
    add("--out", type=Path, required=True, help="folder for texts and results")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.benchmarks.preparation import measure

    measure(args)
