"""Check the command lines of the preparations: choices, defaults, and options that exclude each other."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.io.errors import UserError

# prepare lm

LEVELS = ("word", "sentencepiece", "char", "byte")
DOCUMENTS = ("none", "blank", "heading")
SPLITS = ("train", "valid", "test")


def check_lm(args: argparse.Namespace, level: str) -> None:
    """Raise an error for options that contradict each other."""
    if level == "byte" and (args.dict or args.words or args.threshold):
        raise UserError("at the level of bytes the dictionary is fixed: leave out --dict, --words, --threshold")
    if args.dict and (args.words or args.threshold):
        raise UserError("--dict is used as it is: leave out --words and --threshold")
    if args.sentencepiece and level != "sentencepiece":
        raise UserError(f"--sentencepiece needs --level sentencepiece, not {level}")


# prepare mlm

PACKING = ("document", "full", "none")
LEAST_TOKENS = 8  # of a block
NAMED = re.compile(r"(?P<language>[A-Za-z][\w-]{0,15})=(?P<path>.+)")
NO_LANGUAGE = "text"
HOLD_OUT = 0.01
TOKENIZER_DEFAULTS = {"train_tokenizer": "bpe", "vocab_size": 50_000, "learn_lines": 10_000_000}


@dataclass(frozen=True)
class Reading:
    """How the lines of a file make up documents and sentences."""

    # `blank`: an empty line ends a document; `line`: each line is a document; `file`; `json`: each line is an object
    # whose `text` is a document, as in C4; else a regular expression that matches a document's first line
    documents: str = "blank"
    sentences: str = "line"  # `line`: a line is a sentence; `split`: a line holds several
    on_bad_line: str = "fail"  # `fail` or `drop` where a line is not UTF-8

    def __post_init__(self) -> None:
        if self.sentences not in ("line", "split"):
            raise UserError(f"sentences must be 'line' or 'split', got {self.sentences!r}")
        try:
            re.compile(self.documents)
        except re.error as error:
            raise UserError(
                f"documents must be blank, line, file, json or a regular expression for a "
                f"document's first line, got {self.documents!r}: {error}"
            ) from None


@dataclass(frozen=True)
class TextFile:
    """A file of the command line."""

    name: str  # unique, also of the files that are made of it
    split: str  # `train` or `valid`
    language: str  # its language, `text` where none was given
    path: Path


def check_mlm(args: argparse.Namespace) -> None:
    """Raise an error for wrong values of the command line; add its `sources` and `reading`."""
    _refuse_unused(args)
    _check_values(args)
    args.reading = Reading(args.documents, args.sentences, args.on_bad_line)
    args.sources = _sources("train", args.train) + _sources("valid", args.valid)


def _refuse_unused(args: argparse.Namespace) -> None:
    """Raise an error for options that have no effect beside others; fill in the defaults of the rest."""
    if args.valid and args.hold_out is not None:
        raise UserError("--hold-out and --valid: there is validation text: leave one out")
    for name, value in (TOKENIZER_DEFAULTS | {"hold_out": HOLD_OUT}).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
        elif name in TOKENIZER_DEFAULTS and args.tokenizer_folder is not None:
            raise UserError(
                f"--{name.replace('_', '-')} belongs to a tokenizer that is trained: "
                "--tokenizer-folder is taken as it is"
            )


def _check_values(args: argparse.Namespace) -> None:
    """Raise an error for values out of range, and options of other tokenizers."""
    if not 0 < args.hold_out < 1:
        raise UserError(f"--hold-out must be between 0 and 1 where there is no --valid, got {args.hold_out}")
    trained = args.tokenizer_folder is None
    if args.lowercase and not (trained and args.train_tokenizer == "wordpiece"):
        raise UserError("--lowercase belongs to --train-tokenizer wordpiece, which is not trained")
    if args.character_coverage and not (trained and args.train_tokenizer == "sentencepiece"):
        raise UserError("--character-coverage belongs to --train-tokenizer sentencepiece, which is not trained")


def _sources(split: str, names: Sequence[str]) -> list[TextFile]:
    """Read `[LANG=]FILE` arguments of a split; each file must exist."""
    sources = []
    for number, name in enumerate(names):
        match = NAMED.fullmatch(name)
        language, path = (match["language"], match["path"]) if match else (NO_LANGUAGE, name)
        if not Path(path).is_file():
            raise UserError(f"--{split} {name}: there is no file {path}")
        sources.append(TextFile(f"{split}.{number}.{language}", split, language, Path(path)))
    return sources


# prepare glue

PAIR_EXTRA, SINGLE_EXTRA = 4, 2  # <s> A </s> </s> B </s>, <s> A </s>


def check_glue(args: argparse.Namespace) -> None:
    """Raise an error for a command line with wrong values."""
    least = 2 * PAIR_EXTRA
    if args.max_length and args.max_length < least:
        raise UserError(f"--max-length must be 0 or at least {least}, got {args.max_length}")
    if not args.text and not (args.tokenizer_folder and args.out):
        raise UserError("give --tokenizer-folder and --out, or --text")
    if not args.glue.is_dir():
        raise UserError(f"there is no folder {args.glue}: give the one with GLUE's tasks")
