"""Check the command lines of the preparations: choices, defaults, and options that exclude each other."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.text.tokenizer import SENTENCEPIECE, SUBWORD_NMT

# prepare wmt

DEFAULT_YEAR = {"de": "wmt15", "cs": "wmt18", "fr": "wmt14"}
DEFAULT_TESTS = {"wmt14": ("newstest2014",)}  # of a year, where not newstest2015
DUPLICATE = "duplicate"
# The filters by their reasons to drop a pair, in the order they are tried; the first that applies counts the pair.
FILTERS = {
    "empty": "a side has no character",
    "too long": "a side has more words than `--max-words`, or more than 12 characters for each of these",
    "length ratio": "a side is more than `--max-ratio` times as long as the other, and by more than 3 words",
    "identical sides": "both sides are the same text, but for capitals",
    "wrong script": "less than half of a side's letters are of its language (beside Chinese a Latin word is one)",
    "in a test set": "a side is a sentence of the validation or test sets",
    DUPLICATE: "both sides are those of an earlier pair",
}
NO_FILTER = {reason.replace(" ", "-"): reason for reason in FILTERS}  # by the names on the command line


@dataclass(frozen=True)
class Limits:
    """Limits that a pair must keep within."""

    max_words: int = 250  # words of each side
    max_ratio: float = 3.0  # length of the longer side to that of the shorter
    min_script: float = 0.5  # the least share of a side's letters that are of its language's scripts
    max_dropped: float = 0.5  # the largest share of a corpus' pairs that one filter may drop
    no_filter: tuple[str, ...] = ()  # reasons that are no reason to drop a pair


@dataclass(frozen=True)
class WmtSettings:
    """The checked options of `relpos prepare wmt`, with the command line's defaults, and the paths of its files.

    A set of text has two files: the source's and the target's.
    """

    year: str  # wmt14, wmt15 or wmt18; "" for parallel files of the user's own
    source: str  # the source language, any code of it
    target: str  # the target language
    out: Path  # the folder that takes everything
    from_dir: Path | None = None  # a folder with archives, or with parallel files; None downloads
    czeng: Path | None = None  # the user's folder of CzEng; None leaves it out
    without: tuple[str, ...] = ()  # names of corpora to leave out
    valid: tuple[str, ...] = ("newstest2013",)  # newstests to validate on
    tests: tuple[str, ...] = ("newstest2015",)  # newstests to test on
    sample: int | None = None  # training pairs to use; None for all
    seed: int = 1  # of every random choice
    tokenizer: str = "moses"  # "moses" or "none"
    normalization: str = ""  # of NORMALIZATIONS, or "": Moses' and, with sentencepiece, nmt_nfkc
    bpe: str = SUBWORD_NMT  # "subword-nmt" or "sentencepiece"
    model_type: str = "unigram"  # "unigram" or "bpe", of sentencepiece
    vocab_size: int = 32000  # merges of subword-nmt, pieces of sentencepiece
    learn_lines: int = 100_000  # pairs that subwords are learned on, at most
    limits: Limits = field(default_factory=Limits)  # of the filter
    on_bad_line: str = "fail"  # "fail" or "drop"
    workers: int = 2  # processes
    shards: int = 1  # number of shards of the training text
    shard: int | None = None  # the shard to make now; None makes all the rest

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target."""
        return self.source, self.target

    def sides(self, folder: Path, name: str) -> tuple[Path, Path]:
        """Return the source's and the target's file of a set in a folder."""
        return folder / f"{name}.{self.source}", folder / f"{name}.{self.target}"

    @property
    def tokenises(self) -> bool:
        """Whether words are cut from punctuation before subwords are learned."""
        return self.tokenizer == "moses"

    @property
    def downloads(self) -> Path:
        """The folder of the archives that are downloaded."""
        return self.out / "downloads"

    @property
    def pairs(self) -> Path:
        """The numbers of pairs of every text."""
        return self.out / "shards" / "pairs.json"

    @property
    def lengths(self) -> Path:
        """How the lengths of the training text's sides are counted and compared."""
        return self.out / "shards" / "lengths.json"

    @property
    def folded(self) -> Path:
        """The sentences of validation and test sets, which are not trained on."""
        return self.out / "text" / "held-out.txt"

    @property
    def model(self) -> Path:
        """The subwords that were learned."""
        return self.out / "units" / ("bpe.codes" if self.bpe == SUBWORD_NMT else "sentencepiece.model")

    @property
    def learned_on(self) -> Path:
        """The sample of the training text that subwords are learned on."""
        return self.out / "units" / "sample.txt"

    def text(self, split: str) -> tuple[Path, Path]:
        """Return the files of a set before it is cut into subwords."""
        return self.sides(self.out / "text", split)

    def references(self, split: str) -> tuple[Path, Path]:
        """Return the unchanged files of a held-out set, which translations are scored on."""
        return self.sides(self.out / "reference", split)

    def units(self, split: str) -> tuple[Path, Path]:
        """Return the files of a set in subwords."""
        return self.sides(self.out / "units", split)

    def shard_folder(self, shard: int) -> Path:
        """Return the folder of a shard."""
        return self.out / "shards" / f"{shard}-of-{self.shards}"

    def cleaned(self, shard: int) -> list[Path]:
        """Return a shard's source lines, target lines and records."""
        folder = self.shard_folder(shard)
        return [*self.sides(folder, "clean"), folder / "clean.records"]

    def dropped(self, shard: int) -> Path:
        """Return the file of examples of the pairs that were dropped from a shard."""
        return self.shard_folder(shard) / "dropped.json"

    def ready(self, shard: int) -> tuple[Path, Path]:
        """Return a shard's lines as subwords are learned on them."""
        return self.sides(self.shard_folder(shard), "tokens" if self.tokenises else "clean")

    def of_shard(self, shard: int) -> list[Path]:
        """Return all files of a shard but its manifest."""
        return list(dict.fromkeys([*self.cleaned(shard), self.dropped(shard), *self.ready(shard)]))

    def cleaning(self) -> dict:
        """Return the options on which the cleaned training text depends."""
        kept = [reason for reason in FILTERS if reason in self.limits.no_filter and reason != DUPLICATE]
        limits = asdict(self.limits) | {"no_filter": kept}
        return {
            "languages": self.languages,
            "sample": self.sample,
            "seed": self.seed if self.sample else None,
            "tokenizer": self.tokenizer,
            "limits": {name: value for name, value in limits.items() if name != "max_dropped"},
            "on_bad_line": self.on_bad_line,
            "normalization": self.normalization,
        }

    def merging(self) -> dict:
        """Return the options on which the joined training text depends."""
        duplicates = "kept" if DUPLICATE in self.limits.no_filter else "dropped"
        return {"duplicates": duplicates, "max_dropped": self.limits.max_dropped}

    def learning(self) -> dict:
        """Return the options on which the subwords depend."""
        model = {"model_type": self.model_type} if self.bpe == SENTENCEPIECE else {}
        model["normalization"] = self.normalization
        chosen = {"vocab_size": self.vocab_size, "learn_lines": self.learn_lines}
        return {"bpe": self.bpe, "seed": self.seed, **chosen, **model}


# prepare lm

LEVELS = ("word", "sentencepiece", "char", "byte")
DOCUMENTS = ("none", "blank", "heading")
SPLITS = ("train", "valid", "test")
MODEL_TYPES = ("unigram", "bpe")


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
