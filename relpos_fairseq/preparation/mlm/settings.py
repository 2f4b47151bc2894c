"""What prepare mlm may be asked for: the choices, their defaults, and what does not go together."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.preparation.mlm.documents import Reading

KINDS = ("bpe", "wordpiece", "sentencepiece")
PACKING = ("document", "full", "none")
LEAST_TOKENS = 8  # of a block
NAMED = re.compile(r"(?P<language>[A-Za-z][\w-]{0,15})=(?P<path>.+)")
NO_LANGUAGE = "text"
HOLD_OUT = 0.01
TRAINING = {"tokenizer": "bpe", "vocab_size": 50_000, "tokenizer_sentences": 10_000_000}


@dataclass(frozen=True)
class TextFile:
    """A text file."""

    name: str  # unique, also of the files that are made of it
    split: str  # `train` or `valid`
    language: str  # its language, `text` where none was given
    path: Path


def check(args: argparse.Namespace) -> None:
    """Refuse wrong values of the command line; add its `sources` and `reading`."""
    _refuse_unused(args)
    _check_values(args)
    args.reading = Reading(args.documents, args.sentences, args.on_bad_line)
    args.sources = _sources("train", args.train) + _sources("valid", args.valid)


def _refuse_unused(args: argparse.Namespace) -> None:
    """Refuse options that others leave without effect; fill in the defaults of the rest."""
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


def _check_values(args: argparse.Namespace) -> None:
    least = {"vocab_size": 5, "tokenizer_sentences": 1, "shards": 1, "workers": 1, "seed": 0}
    least["tokens_per_sample"] = LEAST_TOKENS
    for name, low in least.items():
        if (value := getattr(args, name)) < low:
            raise PreparationError(f"--{name.replace('_', '-')} must be at least {low}, got {value}")
    if not 0 <= args.alpha <= 1:
        raise PreparationError(f"--alpha must be from 0 to 1, got {args.alpha}")
    if not 0 < args.hold_out < 1:
        raise PreparationError(f"--hold-out must be between 0 and 1 where there is no --valid, got {args.hold_out}")
    trained = args.tokenizer_folder is None
    if args.lowercase and not (trained and args.tokenizer == "wordpiece"):
        raise PreparationError("--lowercase belongs to --tokenizer wordpiece, which is not trained")
    if args.character_coverage and not (trained and args.tokenizer == "sentencepiece"):
        raise PreparationError("--character-coverage belongs to --tokenizer sentencepiece, which is not trained")


def _sources(split: str, names: Sequence[str]) -> list[TextFile]:
    sources = []
    for number, name in enumerate(names):
        match = NAMED.fullmatch(name)
        language, path = (match["language"], match["path"]) if match else (NO_LANGUAGE, name)
        if not Path(path).is_file():
            raise PreparationError(f"--{split} {name}: there is no file {path}")
        sources.append(TextFile(f"{split}.{number}.{language}", split, language, Path(path)))
    return sources
