"""Prepare a WMT translation pair, or parallel text of your own, for fairseq: one command.

    relpos prepare wmt wmt15 en-de --out data/wmt15.en-de --workers 8
    relpos prepare wmt wmt18 en-cs --out data/wmt18.en-cs --czeng ~/czeng16
    relpos prepare wmt en-de --from-dir my_text --out data/mine --vocab-size 8000

Downloads (or takes from --from-dir), extracts, normalises, filters, tokenises, learns and applies
subword units and runs fairseq-preprocess. Interrupted at any moment, the same command continues;
run again, it does nothing; what changed is made anew. OUT/data-bin is what fairseq reads,
OUT/manifest.json says what was made of what.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.preparation.wmt.settings import (
    DEFAULT_TESTS,
    DEFAULT_YEAR,
    SENTENCEPIECE,
    SUBWORD_NMT,
    Limits,
    WmtSettings,
)

HELP = "a WMT pair or your own parallel text, for translation"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False
    add_text(parser)
    add_result(parser)


def add_text(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which text."""
    add = parser.add_argument
    add("pair", nargs="+", metavar="[YEAR] PAIR", help="wmt14 en-fr, wmt15 de-en, wmt18 en-cs, ...")
    add("--out", type=Path, help="folder that takes everything (default: data/YEAR.PAIR)")
    help = "use local files: the archives, or train.LANG, valid.LANG, test*.LANG (also .gz)"
    add("--from-dir", type=Path, metavar="DIR", help=help)
    help = "folder of CzEng 1.6 (its licence forbids fetching)"
    add("--czeng", type=Path, metavar="DIR", help=help)
    add("--without", nargs="+", default=[], metavar="CORPUS", help="corpora to leave out")
    valid = [*WmtSettings.valid]
    add("--valid", nargs="+", default=valid, metavar="SET", help="sacrebleu's name")
    help = "sacrebleu's name (default: newstest2015; wmt14: newstest2014)"
    add("--test", nargs="+", metavar="SET", help=help)
    add("--sample", type=positive, metavar="N", help="use N training pairs, chosen by --seed")
    add("--seed", type=int, default=WmtSettings.seed)
    add("--max-words", type=positive, default=Limits.max_words, metavar="N")
    add("--max-ratio", type=float, default=Limits.max_ratio, metavar="R")
    help = "invalid UTF-8 in training text: stop, or drop the pair and count it"
    add("--on-bad-line", choices=("fail", "drop"), default=WmtSettings.on_bad_line, help=help)


def add_result(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what is made of it, and how."""
    add = parser.add_argument
    help = "default: moses for subword-nmt, none for sentencepiece"
    add("--tokenizer", choices=("moses", "none"), help=help)
    add("--bpe", choices=(SUBWORD_NMT, SENTENCEPIECE), default=WmtSettings.bpe)
    help = f"of sentencepiece (default: {WmtSettings.model_type})"
    add("--model-type", choices=("unigram", "bpe"), help=help)
    help = "merges (subword-nmt) or pieces (sentencepiece), joint (default: %(default)s)"
    add("--vocab-size", type=positive, default=WmtSettings.vocab_size, metavar="N", help=help)
    help = "pairs that units are learned on, at most (default: %(default)s)"
    add("--learn-lines", type=positive, default=WmtSettings.learn_lines, metavar="N", help=help)
    help = "processes (default: %(default)s)"
    add("--workers", type=positive, default=WmtSettings.workers, metavar="N", help=help)
    help = "only clean and tokenise part I of N of the training text"
    add("--shard", type=shard, metavar="I/N", help=help)
    add("--merge", type=positive, metavar="N", help="join N shards and do the rest")
    add("--force", action="store_true", help="run every stage again")
    add("--dry-run", action="store_true", help="print sources, sizes and disk needed; do nothing")


def positive(text: str) -> int:
    """Read a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be >= 1, got {text}")
    return number


def shard(text: str) -> tuple[int, int]:
    """Read I/N."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"must be I/N with 1 <= I <= N, got {text}")
    return int(number), int(count)


def read_settings(args: argparse.Namespace) -> WmtSettings:
    """Check the command line.

    Raises:
        PreparationError: Options that do not go together, or a pair that is none.
    """
    *years, pair = args.pair
    languages = pair.split("-")
    if len(languages) != 2 or not all(languages) or len(set(languages)) != 2 or len(years) > 1:
        raise PreparationError(f"give [YEAR] PAIR, as in wmt15 en-de; got {' '.join(args.pair)}")
    if args.shard and args.merge:
        raise PreparationError("--shard makes one part, --merge joins all: give one of them")
    if args.model_type and args.bpe != SENTENCEPIECE:
        raise PreparationError(f"--model-type {args.model_type} goes with --bpe sentencepiece, not with {args.bpe}")
    if not args.max_ratio >= 1:  # nan is not
        raise PreparationError(f"--max-ratio must be >= 1, got {args.max_ratio}")
    other = languages[1] if languages[0] == "en" else languages[0]
    year = years[0] if years else ("" if args.from_dir else DEFAULT_YEAR.get(other, ""))
    if not year and not args.from_dir:
        raise PreparationError(f"no training set is known for {pair}: give yours with --from-dir")
    out = (args.out or Path("data", ".".join(filter(None, (year, pair))))).absolute()
    if "," in str(out):
        raise PreparationError(f"--out must have no comma, at which fairseq-preprocess ends a path; got {out}")
    same = ("from_dir", "czeng", "sample", "seed", "bpe", "vocab_size", "learn_lines", "workers")
    return WmtSettings(
        year=year,
        source=languages[0],
        target=languages[1],
        out=out,
        without=tuple(args.without),
        valid=tuple(args.valid),
        tests=tuple(args.test or DEFAULT_TESTS.get(year, WmtSettings.tests)),
        tokenizer=args.tokenizer or ("moses" if args.bpe == SUBWORD_NMT else "none"),
        model_type=args.model_type or WmtSettings.model_type,
        limits=Limits(max_words=args.max_words, max_ratio=args.max_ratio),
        on_bad_line=args.on_bad_line,
        shards=args.shard[1] if args.shard else args.merge or 1,
        shard=args.shard[0] if args.shard else None,
        **{name: getattr(args, name) for name in same},
    )


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    settings = read_settings(args)

    from relpos_fairseq.preparation.wmt.stages import WmtPreparation

    preparation = WmtPreparation(settings)
    preparation.announce()
    if not args.dry_run:
        preparation.require_space()
        preparation.run(["prepare_wmt.py", *argv], args.force)
