"""The command line of prepare_lm.py."""

import argparse
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.preparation.lm.corpora import CORPORA
from relpos_fairseq.preparation.lm.reading import DOCUMENTS
from relpos_fairseq.preparation.lm.splitting import SPLITS
from relpos_fairseq.preparation.lm.units import LEVELS

MODEL_TYPES = ("unigram", "bpe")
COUNTS = ("threshold", "words", "padding_factor", "vocab_size", "sample_lines", "shards", "workers")


def make_parser(description: str) -> argparse.ArgumentParser:
    """Returns the command line, which begins its help with `description`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_text(parser.add_argument_group("text (plain, .gz, .bz2 or .xz)"))
    add_units(parser.add_argument_group("units"))
    add_result(parser.add_argument_group("result"))
    return parser


def add_text(text: argparse._ArgumentGroup) -> None:
    """Adds the options that say which text."""
    for split in SPLITS:
        text.add_argument(f"--{split}", nargs="+", type=Path, metavar="FILE", default=[])
    text.add_argument(
        "--text", nargs="+", type=Path, metavar="FILE", default=[], help="to be split"
    )
    text.add_argument("--split", metavar="A,B[,C]", help="shares of train, valid, test in --text")
    text.add_argument("--corpus", choices=sorted(CORPORA))
    text.add_argument("--downloads", type=Path, metavar="DIR", help="default: OUT/downloads")
    text.add_argument("--from-dir", type=Path, metavar="DIR", help="has the corpus's archive")
    text.add_argument("--on-bad-line", choices=("fail", "drop"), default="fail")


def add_units(units: argparse._ArgumentGroup) -> None:
    """Adds the options that say into which units it is cut."""
    units.add_argument("--level", choices=LEVELS, help="default: the corpus's own, else word")
    units.add_argument("--dict", type=Path, metavar="FILE", help="use this dict.txt")
    units.add_argument(
        "--threshold",
        type=int,
        default=0,
        metavar="N",
        help="units that occur fewer than N times are unknown",
    )
    units.add_argument("--words", type=int, metavar="N", help="keep the N most frequent units")
    units.add_argument("--padding-factor", type=int, default=1, metavar="N")
    units.add_argument("--sentencepiece", type=Path, metavar="FILE", help="use this model")
    units.add_argument("--vocab-size", type=int, default=16000, metavar="N")
    units.add_argument("--model-type", choices=MODEL_TYPES, default="unigram")
    units.add_argument("--character-coverage", type=float, default=1.0, metavar="P")
    units.add_argument("--byte-fallback", action="store_true", help="no character is unknown")
    units.add_argument(
        "--sample-lines",
        type=int,
        default=1_000_000,
        metavar="N",
        help="lines that sentencepiece learns from",
    )
    units.add_argument("--seed", type=int, default=1, help="chooses those lines")


def add_result(result: argparse._ArgumentGroup) -> None:
    """Adds the options that say what is made."""
    result.add_argument("--out", type=Path, required=True, metavar="DIR")
    result.add_argument(
        "--documents",
        choices=DOCUMENTS,
        default="none",
        help="what starts a document: a line after blank ones, a WikiText title",
    )
    result.add_argument("--shards", type=int, default=1, metavar="N")
    result.add_argument("--workers", type=int, default=2, metavar="N")
    result.add_argument("--force", action="store_true", help="make everything again")


def check_values(args: argparse.Namespace, level: str) -> None:
    """Checks the numbers and what does not go together.

    Raises:
        PreparationError: Names the option, its value and what is allowed.
    """
    for name in COUNTS:
        value, smallest = getattr(args, name), 0 if name == "threshold" else 1
        if value is not None and value < smallest:
            option = name.replace("_", "-")
            raise PreparationError(f"--{option} must be >= {smallest}, got {value}")
    if not 0 < args.character_coverage <= 1:
        raise PreparationError(
            f"--character-coverage must be in (0, 1], got {args.character_coverage}"
        )
    if level == "byte" and (args.dict or args.words or args.threshold):
        raise PreparationError(
            "at the level of bytes the dictionary is fixed: leave out --dict, --words, --threshold"
        )
    if args.dict and (args.words or args.threshold):
        raise PreparationError("--dict is used as it is: leave out --words and --threshold")
    if args.sentencepiece and level != "sentencepiece":
        raise PreparationError(f"--sentencepiece needs --level sentencepiece, not {level}")
