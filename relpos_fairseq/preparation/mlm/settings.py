"""The command line of prepare_mlm.py."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.preparation.mlm.documents import Reading
from relpos_fairseq.preparation.mlm.packing import LEAST_TOKENS, MODES

KINDS = ("bpe", "wordpiece", "sentencepiece")
NAMED = re.compile(r"(?P<language>[A-Za-z][\w-]{0,15})=(?P<path>.+)")
NO_LANGUAGE = "text"
HOLD_OUT = 0.01
TRAINING = {"tokenizer": "bpe", "vocab_size": 50_000, "tokenizer_sentences": 10_000_000}


@dataclass(frozen=True)
class Source:
    """A text file.

    Attributes:
        name: unique, also of the files that are made of it.
        split: `train` or `valid`.
        language: its language, `text` where none was given.
        path: the file.
    """

    name: str
    split: str
    language: str
    path: Path


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read and check the command line; adds `sources` and `reading`.

    Raises:
        PreparationError: a value is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="prepare_mlm.py", description="Plain text to a data-bin for masked_lm."
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder to write to")
    add("--train", nargs="+", required=True, metavar="[LANG=]FILE", help="text, or .gz .bz2 .xz")
    add("--valid", nargs="+", default=[], metavar="[LANG=]FILE", help="validation text")
    add("--hold-out", type=float, metavar="F",
        help=f"without --valid: this share of the documents (default: {HOLD_OUT})")  # fmt: skip
    add("--documents", default="blank", metavar="blank|line|file|REGEX",
        help="what ends a document: an empty line, each line, the file; or what the line that "
        "begins one looks like (default: %(default)s)")  # fmt: skip
    add("--sentences", choices=("line", "split"), default="line",
        help="a line is a sentence, or is split into some (default: %(default)s)")  # fmt: skip
    add("--on-bad-line", choices=("fail", "drop"), default="fail", help="lines that are not UTF-8")
    add("--tokenizer", choices=KINDS, help="what to train (default: bpe)")
    add("--tokenizer-folder", type=Path, help="use this one instead, with its dict.txt")
    add("--vocab-size", type=int, help="symbols (default: 50000)")
    add("--lowercase", action="store_true", help="wordpiece: BERT's uncased normalisation")
    add("--character-coverage", type=float, help="sentencepiece's (default: 0.9995)")
    add("--tokenizer-sentences", type=int, metavar="N",
        help="train it on about so many sentences (default: 10000000)")  # fmt: skip
    add("--alpha", type=float, default=0.7,
        help="exponent of the languages' shares; 1 keeps them (default: %(default)s)")  # fmt: skip
    add("--pack", choices=MODES, default="document",
        help="blocks of full sentences of one document, of several, or no blocks")  # fmt: skip
    add("--tokens-per-sample", type=int, default=512, metavar="N",
        help="tokens of a block with <s> (default: %(default)s)")  # fmt: skip
    add("--shards", type=int, default=1, help="data-bins, one an epoch (default: %(default)s)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes (default: %(default)s)")
    add("--seed", type=int, default=1, help="of hold-out and sampling (default: %(default)s)")
    add("--force", action="store_true", help="repeat stages that are done")
    args = parser.parse_args(argv)
    _refuse_unused(args)
    _check(args)
    args.reading = Reading(args.documents, args.sentences, args.on_bad_line)
    args.sources = _sources("train", args.train) + _sources("valid", args.valid)
    return args


def _refuse_unused(args: argparse.Namespace) -> None:
    """Refuse options that others leave without effect; fill in the defaults of the rest.

    Raises:
        PreparationError: one is given.
    """
    if args.valid and args.hold_out is not None:
        raise PreparationError("--hold-out and --valid: there is validation text: leave one out")
    for name, value in (TRAINING | {"hold_out": HOLD_OUT}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        elif name in TRAINING and args.tokenizer_folder is not None:
            raise PreparationError(
                f"--{name.replace('_', '-')} belongs to a tokenizer that is trained: "
                "--tokenizer-folder is taken as it is"
            )


def _check(args: argparse.Namespace) -> None:
    least = {"vocab_size": 5, "tokenizer_sentences": 1, "shards": 1, "workers": 1, "seed": 0}
    least["tokens_per_sample"] = LEAST_TOKENS
    for name, low in least.items():
        if (value := getattr(args, name)) < low:
            raise PreparationError(
                f"--{name.replace('_', '-')} must be at least {low}, got {value}"
            )
    if not 0 <= args.alpha <= 1:
        raise PreparationError(f"--alpha must be from 0 to 1, got {args.alpha}")
    if not 0 < args.hold_out < 1:
        raise PreparationError(
            f"--hold-out must be between 0 and 1 where there is no --valid, got {args.hold_out}"
        )
    trained = args.tokenizer_folder is None
    if args.lowercase and not (trained and args.tokenizer == "wordpiece"):
        raise PreparationError("--lowercase belongs to --tokenizer wordpiece, which is not trained")
    if args.character_coverage and not (trained and args.tokenizer == "sentencepiece"):
        raise PreparationError(
            "--character-coverage belongs to --tokenizer sentencepiece, which is not trained"
        )


def _sources(split: str, names: Sequence[str]) -> list[Source]:
    sources = []
    for number, name in enumerate(names):
        match = NAMED.fullmatch(name)
        language, path = (match["language"], match["path"]) if match else (NO_LANGUAGE, name)
        if not Path(path).is_file():
            raise PreparationError(f"--{split} {name}: there is no file {path}")
        sources.append(Source(f"{split}.{number}.{language}", split, language, Path(path)))
    return sources
