"""Define translation tasks: the built-in corpus, the user's parallel text, or a folder of `relpos prepare wmt`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import numpy as np
from sacrebleu.metrics import BLEU

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.processes import key_of
from relpos_fairseq.io.reading import Count, read_json
from relpos_fairseq.lab.comparison import scores
from relpos_fairseq.lab.comparison.tasks.base import kind, write_lines
from relpos_fairseq.lab.comparison.tasks.encoder_decoder import Pair, Pairs, binarise_pairs
from relpos_fairseq.lab.toy import corpus
from relpos_fairseq.metrics.bleu import USUAL, bleu_of, tokenizer_of
from relpos_fairseq.text.moses import Detokeniser
from relpos_fairseq.text.tokenizer import load_sentencepiece
from relpos_fairseq.text.training import train_sentencepiece_model

SPLITS = ("train", "valid", "test")
LANGUAGE = r"\.([A-Za-z][\w-]*?)(\.gz)?"
# The size of a vocabulary of subwords: one for so many running words, within bounds.
WORDS_PER_SUBWORD = 60
SUBWORDS = (300, 8000)


@dataclass(frozen=True, kw_only=True)
class Translation(Pairs):
    """Natural language: the best checkpoint, BLEU and chrF, by the words of the reference."""

    unit: ClassVar[str] = "words"
    checkpoint: ClassVar[str] = "best"
    usual: ClassVar[str] = USUAL  # BLEU's tokenizer, of most languages
    default: ClassVar[dict] = Pairs.default | {"lr": 2e-3, "label-smoothing": 0.1, "dropout": 0.2}
    search: ClassVar[dict] = {"beam": 4, "lenpen": 0.6, "max-len-b": 20}

    tokenize: str = ""  # BLEU's tokenizer, by sacrebleu's name; empty: by the target's language

    def __post_init__(self) -> None:
        object.__setattr__(self, "generate", self.search | self.generate)
        if self.tokenize and self.tokenize not in BLEU.TOKENIZERS:
            raise ValueError(f"tokenize is one of {', '.join(BLEU.TOKENIZERS)}, got {self.tokenize}")

    @cached_property
    def target_language(self) -> str:
        """The target's language, read before the first run."""
        return self.languages[1]

    def tokenizer(self) -> str:
        """Return the name of BLEU's tokenizer."""
        return self.tokenize or tokenizer_of(self.target_language)

    def options(self) -> dict[str, Any]:
        """Return them with BLEU's tokenizer where it is not the usual one: results of another are not these."""
        chosen = {key: value for key, value in super().options().items() if key != "tokenize"}
        return chosen if self.tokenizer() == self.usual else chosen | {"tokenize": self.tokenizer()}

    def prepare(self, work: Path) -> Path:
        self.metric()  # a tokenizer that is not installed is said before hours of training
        return super().prepare(work)

    def metric(self) -> BLEU:
        """Return BLEU; it does not warn of text that looks tokenised."""
        return bleu_of(self.target_language, self.tokenizer(), "the task's tokenize: char", force=True)

    def statistics(self, system: list[str], references: list[str]) -> dict[str, np.ndarray]:
        return scores.of_translations(system, references, self.metric())


@kind("built_in")
@dataclass(frozen=True, kw_only=True)
class BuiltIn(Translation):
    """The built-in English-German grammar: sentences of training's lengths, and longer ones (`test_long`)."""

    languages: ClassVar[Pair] = ("en", "de")
    test_sets: ClassVar[tuple[str, ...]] = ("test", "test_long")
    usual: ClassVar[str] = "none"
    # A grammar is learned, not memorised, without dropout.
    default: ClassVar[dict] = Translation.default | {
        "lr": 3e-3,
        "warmup-updates": 150,
        "max-update": 750,
        "dropout": 0.0,
        "save-interval-updates": 200,
    }

    tokenize: str = usual
    pairs_seed: int = 1  # of the corpus
    pairs_train: int = 24000  # pairs in each split
    pairs_valid: int = 500
    pairs_test: int = 500
    pairs_test_long: int = 300

    def pairs(self) -> dict[str, list[Pair]]:
        return corpus.build(self.pairs_seed, self.pairs_train, self.pairs_valid, self.pairs_test, self.pairs_test_long)

    def code(self) -> set[Path]:
        return super().code().union(corpus.SOURCES)


@kind("parallel")
@dataclass(frozen=True, kw_only=True)
class Parallel(Translation):
    """The user's plain text, split into subwords by one sentencepiece model of both languages."""

    data: Path  # folder of `SPLIT.LANGUAGE`, plain or .gz
    source: str | None = None  # the source's language; None: from the files' names
    target: str | None = None  # the target's language; None: from the files' names
    files: dict = field(default_factory=dict)  # the names of splits, where they are not train, valid and test
    longest: Count = 0  # words of either side in training; longer sentences are a test set of their own; 0: no limit

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "generate", {"post-process": "sentencepiece"} | self.generate)
        if set(self.files) - set(SPLITS):
            raise ValueError(f"files names {', '.join(SPLITS)}")

    @cached_property
    def found(self) -> dict[tuple[str, str], Path]:
        """The six files, by split and language: the source's first."""
        names = {split: str(self.files.get(split, split)) for split in SPLITS}
        return find_files(self.data, *guess_languages(self.data, self.source, self.target, names), names)

    @property
    def languages(self) -> Pair:
        return tuple(dict.fromkeys(language for _, language in self.found))

    @cached_property
    def target_language(self) -> str:
        """The target's language, which needs no data where it is named."""
        return self.target or self.languages[1]

    def sets(self) -> tuple[str, ...]:
        return ("test", "longer") if self.longest else ("test",)

    def inputs(self) -> list[Path]:
        return list(self.found.values())

    def make(self, folder: Path) -> None:
        """Check, divide by length, split into subwords and binarise."""
        check_lines(self.found)
        splits = {"train": ("train", False), "valid": ("valid", False), "test": ("test", False)}
        if self.longest:
            splits["longer"] = ("test", True)
        made = {}
        for name, (split, longer) in splits.items():
            sides = [list(read_lines(self.found[split, language])) for language in self.languages]
            pairs = [pair for pair in zip(*sides, strict=True) if self.is_longer(pair) == longer]
            if not pairs:
                raise UserError(f"{self.data}: no pair is left for {name}: choose another longest")
            for side, language in enumerate(self.languages):
                made[name, language] = folder / "raw" / f"{name}.{language}"
                write_lines(made[name, language], [pair[side] for pair in pairs])
        cut_into_subwords(made, folder)
        binarise_pairs(folder, "units", self.sets(), self.languages)

    def is_longer(self, pair: Pair) -> bool:
        """Return whether a pair is longer than those of training."""
        return bool(self.longest) and max(len(line.split()) for line in pair) > self.longest


class _Settings(TypedDict):
    languages: tuple[str, str]
    tokenizer: str
    bpe: str


class _Prepared(TypedDict):
    """What is read of a prepared folder's manifest."""

    settings: _Settings


@kind("prepared")
@dataclass(frozen=True, kw_only=True)
class Prepared(Translation):
    """A folder that `relpos prepare wmt` wrote."""

    data: Path  # the folder
    tests: list = field(default_factory=lambda: ["test"])  # names of its test sets

    def sets(self) -> tuple[str, ...]:
        return tuple(self.tests)

    def inputs(self) -> list[Path]:
        """Return the folders that fairseq and the scores read."""
        return [self.data / "data-bin", self.data / "reference"]

    def hash_inputs(self) -> str:
        """Return a hash of the folders, and of what the manifest says of the text, not of how it was made."""
        return key_of([super().hash_inputs(), self.settings])

    def make(self, folder: Path) -> None:
        """Copy the binary data and the references, so that runs do not depend on the user's folder."""
        shutil.copytree(self.data / "data-bin", folder / "bin")
        shutil.copytree(self.data / "reference", folder / "raw")

    @cached_property
    def settings(self) -> _Settings:
        """What the folder's manifest says of the text, read before the first run."""
        manifest = read_json(self.data / "manifest.json", _Prepared, None)
        if manifest is None:
            raise ValueError(f"task {self.label} needs what is not there: {self.data / 'manifest.json'}")
        return {name: manifest["settings"][name] for name in _Settings.__annotations__}

    @property
    def languages(self) -> Pair:
        return tuple(self.settings["languages"])

    def subset(self, name: str) -> str:
        return name

    def plain(self, system: list[str]) -> list[str]:
        whole = Detokeniser(self.target_language, self.settings["tokenizer"], self.settings["bpe"])
        return list(map(whole, system))


def guess_languages(data: Path, source: str | None, target: str | None, names: Mapping[str, str]) -> Pair:
    """Return the source and the target language; those that are None come from the names of the files.

    Raises:
        UserError: the names give another number of languages than two.
    """
    if not data.is_dir():
        raise UserError(f"{data} is not a folder")
    if source and target:
        return source, target
    pattern = re.compile(f"(?:{'|'.join(map(re.escape, names.values()))}){LANGUAGE}")
    matches = [pattern.fullmatch(path.name) for path in data.iterdir()]
    found = {match[1] for match in matches if match}
    wanted = {language for language in (source, target) if language}
    if len(found) != 2 or not wanted <= found:
        known = ", ".join(sorted(found)) or "none"
        raise UserError(
            f"the names train|valid|test.LANGUAGE[.gz] in {data} must give two languages, found: "
            f"{known}; name them: source and target"
        )
    # English first, else in alphabetical order.
    first, second = sorted(found, key=lambda language: (language != "en", language))
    if source == second or target == first:
        first, second = second, first
    return first, second


def find_files(data: Path, source: str, target: str, names: Mapping[str, str]) -> dict[tuple[str, str], Path]:
    """Find the six files by split and language, plain before .gz; an error names all that are missing."""
    if source == target:
        raise UserError(f"source and target language are both {source}")
    files, missing = {}, []
    for split in SPLITS:
        for language in (source, target):
            name = f"{names[split]}.{language}"
            paths = [path for path in (data / name, data / f"{name}.gz") if path.is_file()]
            if paths:
                files[split, language] = paths[0]
            else:
                missing.append(name)
    if missing:
        raise UserError(f"missing in {data} (plain or .gz): {', '.join(missing)}")
    return files


def check_lines(files: dict[tuple[str, str], Path]) -> None:
    """Raise an error for a split whose languages differ in their number of lines, or are empty."""
    wrong = []
    for split in SPLITS:
        counts = {path.name: sum(1 for _ in read_lines(path)) for (own, _), path in files.items() if own == split}
        if len({*counts.values()}) > 1 or 0 in counts.values():
            wrong.append(", ".join(f"{name}: {lines} lines" for name, lines in counts.items()))
    if wrong:
        raise UserError("both languages of a split need the same number of lines, at least one; " + "; ".join(wrong))


def cut_into_subwords(files: dict[tuple[str, str], Path], folder: Path) -> None:
    """Train one sentencepiece model on both languages, and write all splits in its subwords to `folder/units`."""
    model = train_subwords([path for (split, _), path in files.items() if split == "train"])
    (folder / "sentencepiece.model").write_bytes(model)
    processor = load_sentencepiece(model)
    units = folder / "units"
    units.mkdir()
    for (split, language), path in files.items():
        with (units / f"{split}.{language}").open("w", encoding="utf-8", newline="\n") as file:
            for line in read_lines(path):
                # One space for white space of every kind: some kinds would end a line elsewhere.
                pieces = processor.encode(" ".join(line.split()), out_type=str)
                file.write(" ".join(pieces) + "\n")


def train_subwords(paths: list[Path]) -> bytes:
    """Return a sentencepiece model (byte pair encoding) whose size suits the amount of text."""
    words, letters = 0, set()
    for path in paths:
        for line in read_lines(path):
            words += len(line.split())
            letters.update(line)
    smallest, largest = SUBWORDS
    size = max(min(words // WORDS_PER_SUBWORD, largest), smallest, len(letters) + 100)
    try:
        return train_sentencepiece_model(
            (line for path in paths for line in read_lines(path)),
            size,
            "their number",
            model_type="bpe",
            input_sentence_size=1_000_000,
            shuffle_input_sentence=True,
            hard_vocab_limit=False,  # little text has fewer units
        )
    except UserError as error:
        raise UserError(f"no subword units can be learned: {error}") from error
