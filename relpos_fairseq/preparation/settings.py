"""Declare the options of the preparations but `prepare wmt`, and check those that exclude each other."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relpos_fairseq.data.squad import BAD_ANSWER
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.options import InFile, InFolder, OutFile, OutFolder, WorkFolder, argument, flag, option, required
from relpos_fairseq.preparation.corpora import CORPORA
from relpos_fairseq.preparation.wmt_settings import MODEL_TYPES
from relpos_fairseq.text import KINDS

# prepare lm

LEVELS = ("word", "sentencepiece", "char", "byte")
DOCUMENTS = ("none", "blank", "heading")
SPLITS = ("train", "valid", "test")


TEXT = "text (plain, .gz, .bz2 or .xz)"


@dataclass(kw_only=True)
class LmOptions:
    """The options of `relpos prepare lm`."""

    train: list[InFile] = option([], metavar="FILE", group=TEXT)
    valid: list[InFile] = option([], metavar="FILE", group=TEXT)
    test: list[InFile] = option([], metavar="FILE", group=TEXT)
    text: list[InFile] = option([], "to be split", metavar="FILE", group=TEXT)
    shares: str | None = option(None, "of train, valid, test in --text", metavar="A,B[,C]", group=TEXT)
    corpus: str | None = option(None, choices=sorted(CORPORA), group=TEXT)
    downloads: WorkFolder | None = option(None, "default: OUT/downloads", metavar="DIR", group=TEXT)
    from_dir: InFolder | None = option(None, "has the corpus's archive", metavar="DIR", group=TEXT)
    yes: bool = flag("download it without asking", group=TEXT)
    on_bad_line: str = option("fail", choices=("fail", "drop"), group=TEXT)
    level: str | None = option(None, "default: the corpus's own, else word", choices=LEVELS, group="units")
    dict: InFile | None = option(None, "use this dict.txt", metavar="FILE", group="units")
    threshold: int = option(0, "units that occur fewer than N times are unknown", metavar="N", group="units", least=0)
    words: int | None = option(None, "keep the N most frequent units", metavar="N", group="units", least=1)
    padding_factor: int = option(1, metavar="N", group="units", least=1)
    sentencepiece: InFile | None = option(None, "use this model", metavar="FILE", group="units")
    vocab_size: int = option(16000, metavar="N", group="units", least=1)
    model_type: str = option("unigram", choices=MODEL_TYPES, group="units")
    character_coverage: float = option(1.0, metavar="P", group="units", above=0, most=1)
    byte_fallback: bool = flag("no character is unknown", group="units")
    learn_lines: int = option(1_000_000, "lines that sentencepiece learns from", metavar="N", group="units", least=1)
    seed: int = option(1, "chooses those lines", group="units")
    out: OutFolder = required(metavar="DIR", group="result")
    documents: str = option(
        "none", "what starts a document: a line after blank ones, a WikiText title", choices=DOCUMENTS, group="result"
    )
    shards: int = option(1, metavar="N", group="result", least=1)
    workers: int = option(2, metavar="N", group="result", least=1)
    force: bool = flag("make everything again", group="result")


def check_lm(args: LmOptions) -> str:
    """Raise an error for options that contradict each other; return the level."""
    corpus = CORPORA.get(args.corpus or "")
    level = args.level or (corpus.level if corpus else "word")
    if level == "byte" and (args.dict or args.words or args.threshold):
        raise UserError("at the level of bytes the dictionary is fixed: leave out --dict, --words, --threshold")
    if level == "char" and (args.words or args.threshold):
        raise UserError("bits a character allow no unknown character: leave out --words and --threshold")
    if args.dict and (args.words or args.threshold):
        raise UserError("--dict is used as it is: leave out --words and --threshold")
    if args.sentencepiece and level != "sentencepiece":
        raise UserError(f"--sentencepiece needs --level sentencepiece, not {level}")
    return level


# prepare mlm

PACKING = ("document", "full", "none")
LEAST_TOKENS = 8  # of a block
NAMED = re.compile(r"(?P<language>[A-Za-z][\w-]{0,15})=(?P<path>.+)")
NO_LANGUAGE = "text"
HOLD_OUT = 0.01
TOKENIZER_DEFAULTS: dict[str, Any] = {"train_tokenizer": "bpe", "vocab_size": 50_000, "learn_lines": 10_000_000}


@dataclass(frozen=True)
class Reading:
    """How the lines of a file make up documents and sentences."""

    # `blank`: an empty line ends a document; `line`: each line is a document; `file`; `json`: each line is an object
    # whose `text` is a document, as in C4; else a regular expression that matches a document's first line
    documents: str = "blank"
    sentences: str = "line"  # `line`: a line is a sentence; `split`: a line holds several
    on_bad_line: str = "fail"  # `fail` or `drop` where a line is not UTF-8

    def __post_init__(self) -> None:
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


@dataclass(kw_only=True)
class MlmOptions:
    """The options of `relpos prepare mlm`."""

    out: OutFolder = required("folder to write to")
    train: list[str] = required("text, or .gz .bz2 .xz", metavar="[LANG=]FILE")
    valid: list[str] = option([], "validation text", metavar="[LANG=]FILE")
    hold_out: float | None = option(
        None, f"without --valid: this share of the documents (default: {HOLD_OUT})", metavar="F"
    )
    documents: str = option(
        "blank",
        "what ends a document: an empty line, each line, the file; json: each line is an object with a text, "
        "as in C4; or what the line that begins one looks like (default: %(default)s)",
        metavar="blank|line|file|json|REGEX",
    )
    sentences: str = option(
        "line", "a line is a sentence, or is split into some (default: %(default)s)", choices=("line", "split")
    )
    on_bad_line: str = option("fail", "lines that are not UTF-8", choices=("fail", "drop"))
    train_tokenizer: str | None = option(None, "train one (default: bpe)", choices=KINDS)
    tokenizer_folder: InFolder | None = option(None, "use this one instead, with its dict.txt")
    vocab_size: int | None = option(None, "symbols (default: 50000)", least=5)
    lowercase: bool = flag("wordpiece: BERT's uncased normalisation")
    character_coverage: float | None = option(None, "sentencepiece's (default: 0.9995)")
    learn_lines: int | None = option(
        None, "train it on about so many sentences (default: 10000000)", metavar="N", least=1
    )
    alpha: float = option(
        0.7, "exponent of the languages' shares; 1 keeps them (default: %(default)s)", least=0, most=1
    )
    pack: str = option(
        "document", "blocks of full sentences of one document, of several, or no blocks", choices=PACKING
    )
    tokens_per_sample: int = option(
        512, "tokens of a block with <s> (default: %(default)s)", metavar="N", least=LEAST_TOKENS
    )
    shards: int = option(1, "data-bins, one an epoch (default: %(default)s)", least=1)
    workers: int = option(os.cpu_count() or 1, "processes (default: %(default)s)", least=1)
    seed: int = option(1, "of hold-out and sampling (default: %(default)s)", least=0)
    force: bool = flag("repeat stages that are done")


@dataclass(frozen=True)
class MlmSettings:
    """What follows from the options of `relpos prepare mlm`."""

    options: MlmOptions  # with a value for each
    reading: Reading
    sources: list[TextFile]


def check_mlm(given: MlmOptions) -> MlmSettings:
    """Raise an error for wrong values, and options without effect; return what follows from right ones."""
    if given.valid and given.hold_out is not None:
        raise UserError("--hold-out and --valid: there is validation text: leave one out")
    defaults = {"hold_out": HOLD_OUT} | TOKENIZER_DEFAULTS
    chosen = {name: getattr(given, name) for name in defaults if getattr(given, name) is not None}
    trained = given.tokenizer_folder is None
    if not trained and (names := [name for name in TOKENIZER_DEFAULTS if name in chosen]):
        raise UserError(
            f"--{names[0].replace('_', '-')} belongs to a tokenizer that is trained: "
            "--tokenizer-folder is taken as it is"
        )
    args = replace(given, **(defaults | chosen))
    if not 0 < (args.hold_out or 0) < 1:
        raise UserError(f"--hold-out must be between 0 and 1 where there is no --valid, got {args.hold_out}")
    if args.lowercase and not (trained and args.train_tokenizer == "wordpiece"):
        raise UserError("--lowercase belongs to --train-tokenizer wordpiece, which is not trained")
    if args.character_coverage and not (trained and args.train_tokenizer == "sentencepiece"):
        raise UserError("--character-coverage belongs to --train-tokenizer sentencepiece, which is not trained")
    sources = _sources("train", args.train) + _sources("valid", args.valid)
    return MlmSettings(args, Reading(args.documents, args.sentences, args.on_bad_line), sources)


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


@dataclass(kw_only=True)
class GlueOptions:
    """The options of `relpos prepare glue`."""

    glue: InFolder = argument("folder with a folder for every task")
    tokenizer_folder: InFolder | None = option(None, "the model's, with its dict.txt, as relpos prepare mlm writes it")
    out: OutFolder | None = option(None, "folder to write to")
    text: OutFile | None = option(
        None,
        "instead: write the training sentences as text for relpos prepare mlm, an example a document, a sentence "
        "a line",
        metavar="FILE",
    )
    tasks: str | None = option(None, "separated by commas (default: those of GLUE that are there)")
    max_length: int = option(
        512,
        "tokens of an example, special ones included; longer ones lose the end of their longer sentence, as "
        "in BERT; 0: no limit (default: %(default)s)",
        metavar="N",
    )
    on_bad_row: str = option(
        "fail", "rows with columns or labels missing (default: %(default)s)", choices=("fail", "drop")
    )
    workers: int = option(os.cpu_count() or 1, "processes (default: %(default)s)", least=1)
    force: bool = flag("repeat tasks that are done")


def check_glue(args: GlueOptions) -> None:
    """Raise an error for a command line with wrong values."""
    least = 2 * PAIR_EXTRA
    if args.max_length and args.max_length < least:
        raise UserError(f"--max-length must be 0 or at least {least}, got {args.max_length}")
    if not args.text and not (args.tokenizer_folder and args.out):
        raise UserError("give --tokenizer-folder and --out, or --text")


# prepare qa


@dataclass(kw_only=True)
class QaOptions:
    """The options of `relpos prepare qa`."""

    train: list[InFile] = required("training files")
    valid: list[InFile] = option([], "validation files")
    eval: list[InFile] = option([], "files to evaluate on")
    out: OutFolder = required("folder to make")
    train_articles: int | None = option(None, "train on the first N articles, validate on the others", least=1)
    eval_articles: str = option(
        "same", "with --train-articles: cut --eval files in the same way, or take them whole", choices=("same", "all")
    )
    tokenizer_folder: InFolder | None = option(None, "folder of a tokenizer")
    train_tokenizer: str | None = option(None, "train one on all contexts", choices=KINDS)
    vocab_size: int | None = option(None, "its size (default 8000)")
    lowercase: bool = flag("wordpiece: uncased")
    on_bad_answer: str = option(
        "drop", "answers that are not at their offset: fail here, or leave them to the task", choices=BAD_ANSWER
    )
