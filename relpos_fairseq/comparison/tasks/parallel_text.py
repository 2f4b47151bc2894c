"""Define translation tasks: the built-in corpus, the user's parallel text, or a prepared folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from relpos_fairseq.comparison import scores
from relpos_fairseq.comparison.tasks.base import Workspace, kind, write_lines
from relpos_fairseq.comparison.tasks.encoder_decoder import Pair, Pairs, binarise_pairs
from relpos_fairseq.data import corpus
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import read_json
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.text.moses import Detokeniser
from relpos_fairseq.text.tokenizer import load_sentencepiece
from relpos_fairseq.text.training import train_sentencepiece_model

# ---- Translation of the user's own text, plain or prepared; BLEU and chrF by sentence length.


SPLITS = ("train", "valid", "test")
LANGUAGE = r"\.([A-Za-z][\w-]*?)(\.gz)?"
# Subword units: one for so many running words, within bounds.
BPE_WORDS_PER_UNIT = 60
BPE_UNITS = (300, 8000)


class DataError(ValueError):
    """The user's data cannot be used; nothing has been written."""


@dataclass(frozen=True, kw_only=True)
class Translation(Pairs):
    """Natural language: BLEU and chrF by the words of the reference, with the best checkpoint."""

    unit: ClassVar[str] = "words"
    checkpoint: ClassVar[str] = "best"
    tokenize: ClassVar[str] = "13a"
    default: ClassVar[dict] = Pairs.default | {"lr": 2e-3, "label-smoothing": 0.1, "dropout": 0.2}
    search: ClassVar[dict] = {"beam": 4, "lenpen": 0.6, "max-len-b": 20}

    def __post_init__(self) -> None:
        object.__setattr__(self, "generate", self.search | self.generate)

    def statistics(self, system: list[str], references: list[str]) -> dict[str, np.ndarray]:
        return scores.of_translations(system, references, self.tokenize)


@kind("parallel")
@dataclass(frozen=True, kw_only=True)
class Parallel(Translation):
    """Plain text, cut into joint sentencepiece units."""

    data: Path  # folder of `SPLIT.LANGUAGE`, plain or .gz
    source: str | None = None  # the source's language; None: from the files' names
    target: str | None = None  # the target's language
    # the names of splits, where they are not train, valid and test
    files: dict = field(default_factory=dict)
    # words of either side that training and validation keep, so that longer sentences are a test
    # set of their own; 0: no limit
    longest: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "data", Path(self.data))
        object.__setattr__(self, "generate", {"post-process": "sentencepiece"} | self.generate)
        if set(self.files) - set(SPLITS) or self.longest < 0:
            raise ValueError(f"files names {', '.join(SPLITS)}, and longest is >= 0")

    @cached_property
    def found(self) -> dict[tuple[str, str], Path]:
        """The six files, by split and language: the source's first."""
        names = {split: str(self.files.get(split, split)) for split in SPLITS}
        return find_files(self.data, *guess_languages(self.data, self.source, self.target, names), names)

    @property
    def languages(self) -> Pair:
        return tuple(dict.fromkeys(language for _, language in self.found))

    def sets(self) -> tuple[str, ...]:
        return ("test", "longer") if self.longest else ("test",)

    def inputs(self) -> list[Path]:
        return list(self.found.values())

    def make(self, folder: Path) -> None:
        """Check, split by length, cut into units and binarise."""
        check_lines(self.found)
        splits = {"train": ("train", False), "valid": ("valid", False), "test": ("test", False)}
        if self.longest:
            splits["longer"] = ("test", True)
        made = {}
        for name, (split, longer) in splits.items():
            sides = [list(read_lines(self.found[split, language])) for language in self.languages]
            pairs = [pair for pair in zip(*sides, strict=True) if self.is_longer(pair) == longer]
            if not pairs:
                raise DataError(f"{self.data}: no pair is left for {name}: choose another longest")
            for side, language in enumerate(self.languages):
                made[name, language] = folder / "raw" / f"{name}.{language}"
                write_lines(made[name, language], [pair[side] for pair in pairs])
        cut_into_subwords(made, folder)
        binarise_pairs(folder, "units", self.sets(), self.languages)

    def is_longer(self, pair: Pair) -> bool:
        """Whether a pair is longer than training allows."""
        return bool(self.longest) and max(len(line.split()) for line in pair) > self.longest


@kind("prepared")
@dataclass(frozen=True, kw_only=True)
class Prepared(Translation):
    """A folder that `relpos prepare wmt` wrote."""

    data: Path
    tests: list = field(default_factory=lambda: ["test"])  # names of its test sets

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "data", Path(self.data))

    def sets(self) -> tuple[str, ...]:
        return tuple(self.tests)

    def inputs(self) -> list[Path]:
        """Return the folders that fairseq and the scores read."""
        return [self.data / "data-bin", self.data / "reference", self.data / "manifest.json"]

    def make(self, folder: Path) -> None:
        """Copy what fairseq and the scores read: runs do not depend on the user's folder."""
        shutil.copytree(self.data / "data-bin", folder / "bin")
        shutil.copytree(self.data / "reference", folder / "raw")
        shutil.copy(self.data / "manifest.json", folder / "prepared.json")

    def pair(self, run: Workspace) -> Pair:
        return tuple(read_json(run.data / "prepared.json")["settings"]["languages"])

    def subset(self, name: str) -> str:
        return name

    def plain(self, system: list[str], run: Workspace) -> list[str]:
        made = read_json(run.data / "prepared.json")["settings"]
        return list(map(Detokeniser(made["languages"][1], made["tokenizer"], made["bpe"]), system))


def guess_languages(data: Path, source: str | None, target: str | None, names: Mapping[str, str]) -> Pair:
    """Complete the pair of languages from the names of the files, which must name exactly one."""
    if not data.is_dir():
        raise DataError(f"{data} is not a folder")
    if source and target:
        return source, target
    pattern = re.compile(f"(?:{'|'.join(map(re.escape, names.values()))}){LANGUAGE}")
    matches = [pattern.fullmatch(path.name) for path in data.iterdir()]
    found = {match[1] for match in matches if match}
    wanted = {language for language in (source, target) if language}
    if len(found) != 2 or not wanted <= found:
        known = ", ".join(sorted(found)) or "none"
        raise DataError(
            f"the names train|valid|test.LANGUAGE[.gz] in {data} must give two languages, found: "
            f"{known}; name them: source and target"
        )
    # English first, else in alphabetical order.
    first, second = sorted(found, key=lambda language: (language != "en", language))
    if source == second or target == first:
        first, second = second, first
    return first, second


def find_files(data: Path, source: str, target: str, names: Mapping[str, str]) -> dict[tuple[str, str], Path]:
    """Find the six files, plain before .gz; all that are missing are named."""
    if source == target:
        raise DataError(f"source and target language are both {source}")
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
        raise DataError(f"missing in {data} (plain or .gz): {', '.join(missing)}")
    return files


def check_lines(files: dict[tuple[str, str], Path]) -> None:
    """Refuse splits without as many lines in both languages, and some."""
    counts: dict[str, list[tuple[str, int]]] = {}
    for (split, _), path in files.items():
        try:
            number = sum(1 for _ in read_lines(path))
        except UserError as error:
            raise DataError(str(error)) from error
        counts.setdefault(split, []).append((path.name, number))
    wrong = [
        f"{first}: {lines} lines, {second}: {others} lines"
        for (first, lines), (second, others) in counts.values()
        if lines != others or lines == 0
    ]
    if wrong:
        raise DataError("both languages of a split need the same number of lines, at least one; " + "; ".join(wrong))


def cut_into_subwords(files: dict[tuple[str, str], Path], folder: Path) -> None:
    """Train one sentencepiece model on both languages and writes all splits in its units."""
    model = train_subwords([path for (split, _), path in files.items() if split == "train"])
    (folder / "sentencepiece.model").write_bytes(model)
    processor = load_sentencepiece(model)
    units = folder / "units"
    units.mkdir()
    for (split, language), path in files.items():
        with (units / f"{split}.{language}").open("w", encoding="utf-8", newline="\n") as file:
            for line in read_lines(path):
                # Split at every kind of white space: some of it would end a line elsewhere.
                pieces = processor.encode(" ".join(line.split()), out_type=str)
                file.write(" ".join(pieces) + "\n")


def train_subwords(paths: list[Path]) -> bytes:
    """Return a byte pair model whose size suits the amount of text."""
    words, letters = 0, set()
    for path in paths:
        for line in read_lines(path):
            words += len(line.split())
            letters.update(line)
    smallest, largest = BPE_UNITS
    size = max(min(words // BPE_WORDS_PER_UNIT, largest), smallest, len(letters) + 100)
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
        raise DataError(f"no subword units can be learned: {error}") from error


# ---- The built-in English-German grammar: sentences of training's lengths, and longer ones.


@kind("built_in")
@dataclass(frozen=True, kw_only=True)
class BuiltIn(Translation):
    """The quickstart's corpus."""

    languages: ClassVar[Pair] = ("en", "de")
    test_sets: ClassVar[tuple[str, ...]] = ("test", "test_long")
    tokenize: ClassVar[str] = "none"
    # A grammar is learned, not memorised, without dropout.
    default: ClassVar[dict] = Translation.default | {
        "lr": 3e-3,
        "warmup-updates": 150,
        "max-update": 750,
        "dropout": 0.0,
        "save-interval-updates": 200,
    }

    pairs_seed: int = 1  # of the corpus
    pairs_train: int = 24000  # how many pairs each split has; likewise the others
    pairs_valid: int = 500
    pairs_test: int = 500
    pairs_test_long: int = 300

    def pairs(self) -> dict[str, list[Pair]]:
        return corpus.build(self.pairs_seed, self.pairs_train, self.pairs_valid, self.pairs_test, self.pairs_test_long)

    def inputs(self) -> list[Path]:
        """Return the grammar's own files: what they say is the data."""
        return corpus.SOURCES
