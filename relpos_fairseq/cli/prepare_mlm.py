r"""Prepare plain text for masked language models: tokenizer, blocks, shards.

    relpos prepare mlm --out data/wiki --train en=wiki.en.txt.gz de=wiki.de.txt.gz \
        --tokenizer sentencepiece --vocab-size 120000 --alpha 0.7 --tokens-per-sample 512

The result is a data-bin for fairseq's masked_lm. The same command again continues after an
interruption, and does only what has changed.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.preparation.mlm.settings import HOLD_OUT, KINDS, PACKING, check

HELP = "plain text in one or many languages, for masked language models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write to")
    add("--train", nargs="+", required=True, metavar="[LANG=]FILE", help="text, or .gz .bz2 .xz")
    add("--valid", nargs="+", default=[], metavar="[LANG=]FILE", help="validation text")
    add(
        "--hold-out",
        type=float,
        metavar="F",
        help=f"without --valid: this share of the documents (default: {HOLD_OUT})",
    )
    add(
        "--documents",
        default="blank",
        metavar="blank|line|file|json|REGEX",
        help="what ends a document: an empty line, each line, the file; json: each line is an "
        "object with a text, as in C4; or what the line that begins one looks like "
        "(default: %(default)s)",
    )
    add(
        "--sentences",
        choices=("line", "split"),
        default="line",
        help="a line is a sentence, or is split into some (default: %(default)s)",
    )
    add("--on-bad-line", choices=("fail", "drop"), default="fail", help="lines that are not UTF-8")
    add("--tokenizer", choices=KINDS, help="what to train (default: bpe)")
    add("--tokenizer-folder", type=Path, help="use this one instead, with its dict.txt")
    add("--vocab-size", type=int, help="symbols (default: 50000)")
    add("--lowercase", action="store_true", help="wordpiece: BERT's uncased normalisation")
    add("--character-coverage", type=float, help="sentencepiece's (default: 0.9995)")
    add("--tokenizer-sentences", type=int, metavar="N", help="train it on about so many sentences (default: 10000000)")
    add(
        "--alpha",
        type=float,
        default=0.7,
        help="exponent of the languages' shares; 1 keeps them (default: %(default)s)",
    )
    add(
        "--pack",
        choices=PACKING,
        default="document",
        help="blocks of full sentences of one document, of several, or no blocks",
    )
    add(
        "--tokens-per-sample",
        type=int,
        default=512,
        metavar="N",
        help="tokens of a block with <s> (default: %(default)s)",
    )
    add("--shards", type=int, default=1, help="data-bins, one an epoch (default: %(default)s)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    add("--seed", type=int, default=1, help="of hold-out and sampling (default: %(default)s)")
    add("--force", action="store_true", help="repeat stages that are done")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    check(args)

    from relpos_fairseq.preparation.mlm.stages import MlmPreparation

    MlmPreparation(args).run(["prepare_mlm.py", *argv], args.force)
