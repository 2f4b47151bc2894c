"""Find, read and copy the files by which the text of a data folder or a checkpoint becomes symbols and ids.

The manifest.json of `relpos prepare wmt` names languages, Moses' tokenizer and the kind of subwords; that of `relpos
prepare lm` (and of the quickstart) names a level; beside the data of `prepare mlm`, `qa` and `glue` lies a tokenizer.
Without any of these, text is symbols of dict.txt, joined by spaces.

Training copies these files into `text/` of --save-dir, and into `text-HASH/` where `text/` is another model's.  The
folder is of the data folder's own shape, so that it also stands for the data folder where fairseq asks for
dictionaries.  The hashes that a checkpoint keeps (`provenance.py`) tell which of several folders is its own.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_folder, copy_file, sha256_of
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.manifests import Manifest, check_unchanged
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.text import provenance
from relpos_fairseq.text.dictionary import FILE as DICTIONARY
from relpos_fairseq.text.dictionary import SPECIAL, UNK, read_dictionary, symbol_of
from relpos_fairseq.text.folders import FILES, holds_tokenizer, load_tokenizer, tokenizer_paths
from relpos_fairseq.text.levels import BUILT_IN, LevelText
from relpos_fairseq.text.subwords import IDENTITY, NORMALIZATIONS, load_subwords
from relpos_fairseq.text.tokenizer import (
    SENTENCEPIECE,
    SENTENCEPIECE_MODEL,
    SUBWORD_NMT,
    load_sentencepiece,
    stands_alone,
    word_start_flags,
)

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)
WORD_STARTS_FILE = "word_starts.txt"
UNIT_FILES = ("bpe.codes", SENTENCEPIECE_MODEL)  # of `prepare wmt`, in its folder units/
TEXT_FOLDER, HASHED = "text", re.compile(r"text-[0-9a-f]{8}")
TEXT_FILES = (*FILES, *UNIT_FILES, WORD_STARTS_FILE)
DATA_PARTS = ("", "input0", "input1", "label")  # sentence_prediction has dictionaries in these; pairs have input1
LANGUAGE_CODE = re.compile(">>.+?<<")
MANY = 20  # codes that a warning names


# Text of one side of a model to symbols and back


class Text(Protocol):
    """The text of one side of a model, as symbols."""

    def encode(self, text: str) -> list[str]:
        """Return the symbols of a text."""

    def decode(self, symbols: Iterable[str]) -> str:
        """Return the text of symbols."""


class ParallelText:
    """A side of `prepare wmt`: normalized, tokenized and split into subwords as its training text was.

    Args:
        language: any code of it.
        tokenizer: "moses" or "none".
        bpe: "subword-nmt", "sentencepiece", or "none" for whole words.
        model: the file of merges, or of sentencepiece's model.
        normalization: "identity" leaves all but white space as it is; what a sentencepiece model does is its own.
        known: the dictionary's symbols, as in `load_subwords`.
    """

    def __init__(
        self,
        language: str,
        tokenizer: str,
        bpe: str,
        model: Path | None,
        normalization: str = "",
        known: Collection[str] = (),
    ) -> None:
        from relpos_fairseq.text.moses import Detokeniser, FastMoses, Normaliser, on_one_line

        self.steps: list[Callable[[str], str]] = [on_one_line if normalization == IDENTITY else Normaliser(language)]
        if tokenizer == "moses":
            self.steps.append(FastMoses(language))
        self.cut = whole_words if model is None else load_subwords(bpe, model, known)
        self.detokenise = Detokeniser(language, tokenizer, bpe)

    def encode(self, text: str) -> list[str]:
        for step in self.steps:
            text = step(text)
        return self.cut(text)

    def decode(self, symbols: Iterable[str]) -> str:
        return self.detokenise(" ".join(symbols))


def whole_words(line: str) -> list[str]:
    """Return the symbols of a line's words."""
    return list(map(symbol_of, line.split()))


class TokenizerText:
    """Text of the tokenizer in a folder."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)

    def encode(self, text: str) -> list[str]:
        return self.tokenizer.encode(text).pieces

    def decode(self, symbols: Iterable[str]) -> str:
        return self.tokenizer.decode(list(symbols))


class SentencePieceText:
    """A side of a model converted from Marian's or OpenNMT-py's: sentencepiece's own subwords.

    A text may begin with Marian's code of its target's language, such as >>fra<<.

    Args:
        model: sentencepiece's file.
        symbols: of the dictionary; those that are language codes are no text.
    """

    def __init__(self, model: Path, symbols: Iterable[str]) -> None:
        self.codes = set(filter(LANGUAGE_CODE.fullmatch, symbols))
        self.unknown: set[str] = set()
        self.processor = load_sentencepiece(model)

    def encode(self, text: str) -> list[str]:
        found = LANGUAGE_CODE.match(text)
        code = [found.group()] if found and found.group() in self.codes else []
        if self.codes and found and not code and found.group() not in self.unknown and len(found.group().split()) == 1:
            self.unknown.add(found.group())
            known = ", ".join(sorted(self.codes)[:MANY]) + ", ..." * (len(self.codes) > MANY)
            logger.warning("%s names no language of this model (%s): it is read as text", found.group(), known)
        return code + self.processor.encode(text.removeprefix("".join(code)), out_type=str)

    def decode(self, symbols: Iterable[str]) -> str:
        return self.processor.decode_pieces(list(symbols)).strip()


class SymbolText:
    """Symbols of dict.txt joined by spaces: text of a folder that says nothing else."""

    def encode(self, text: str) -> list[str]:
        return text.split()

    def decode(self, symbols: Iterable[str]) -> str:
        return " ".join(symbols)


def read_text(folder: Path, language: str | None = None) -> Text:
    """Return how text becomes symbols, from a data folder or the `text/` beside checkpoints.

    Of parallel text `language` chooses the side; both are in the same units, and without it the target's rules hold.

    Raises:
        UserError: a file that the manifest names, or a dictionary, is missing, or was changed since.
    """
    for path in asset_files(folder).values():
        check_unchanged(path)
    if language and (model := folder / piece_file(language)).is_file():
        return SentencePieceText(model, read_dictionary(folder / f"dict.{language}.txt"))
    manifest = manifest_of(folder)
    facts: Manifest = read_json(manifest, Manifest) if manifest else {}
    _check_facts(facts, manifest)
    settings = facts.get("settings", {})
    if {"languages", "tokenizer", "bpe"} <= settings.keys():
        language = language or settings["languages"][-1]
        if language not in settings["languages"]:
            known = " and ".join(settings["languages"])
            raise UserError(f"{manifest} is of {known}, and the model asks for {language}")
        units = None if settings["bpe"] == "none" else unit_file(folder, settings["bpe"])
        normal, symbols = settings.get("normalization", ""), symbols_in(folder, f"dict.{language}.txt")
        return ParallelText(language, settings["tokenizer"], settings["bpe"], units, normal, symbols)
    if level := facts.get("level"):
        return LevelText(level, unit_file(folder, level) if level == SENTENCEPIECE else None, symbols_in(folder))
    place = tokenizer_folder(folder)
    return TokenizerText(place) if place else SymbolText()


def symbols_in(folder: Path, *names: str) -> list[str]:
    """Return the symbols of a folder's dictionary, the first of the named ones or dict.txt; [] if it has none."""
    found = next((path for name in (*names, DICTIONARY) if (path := folder / name).is_file()), None)
    return read_dictionary(found) if found else []


_FACTS = {  # of a manifest's settings
    "tokenizer": ("moses", "none"),
    "bpe": (SUBWORD_NMT, SENTENCEPIECE, "none"),
    "normalization": ("", *NORMALIZATIONS),
}


def _check_facts(facts: Manifest, manifest: Path | None) -> None:
    """Raise an error that names what a manifest says of its text and no version of ours does.

    Raises:
        UserError: as said.
    """
    said: dict[str, Any] = {**facts.get("settings", {})}
    wrong: dict[str, Any] = {
        name: said[name] for name, known in _FACTS.items() if name in said and said[name] not in known
    }
    if (level := facts.get("level")) not in (None, SENTENCEPIECE, *BUILT_IN):
        wrong["level"] = level
    for name, value in wrong.items():
        raise UserError(f"{manifest}: {name} is {value!r}, which no version writes: prepare the data again")


# Ids of a folder's dictionary


class Vocabulary:
    """The tokenizer of a folder and the dictionary beside it; one that lacks the tokenizer's symbols is refused."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.tokenizer = load_tokenizer(self.folder)
        path = self.folder / DICTIONARY
        if not path.is_file():
            raise UserError(
                f"{self.folder} has a tokenizer but no dict.txt; put the dictionary of its model "
                "there (relpos prepare mlm writes both)"
            )
        symbols = (*SPECIAL, *read_dictionary(path))
        self.ids = {symbol: number for number, symbol in enumerate(symbols)}
        self.size = len(symbols)
        self.tokenizer.check_dictionary(self.ids, str(path))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the ids (L,) int64 of every text, without `</s>`; empty where nothing is encoded."""
        return [
            np.array([self.ids.get(piece, UNK) for piece in pieces], dtype=np.int64)
            for pieces, _ in self.tokenizer.raw(list(texts))
        ]

    def word_starts(self) -> list[bool]:
        """Return for each id True if it begins a word."""
        return word_start_flags(self.tokenizer, self.ids)


def word_starts(folder: str | Path, dictionary: Any) -> Tensor:
    """Return (V,) 1 where a symbol begins a word, for fairseq's whole-word masking.

    `word_starts.txt` of a data folder has a line for every id of its dictionary, special symbols included: `1` where
    the symbol begins a word and `0` where it continues one.  Without that file the folder's tokenizer decides.

    Raises:
        UserError: the folder has neither, or a file of another dictionary.
    """
    import torch

    folder = Path(folder)
    path = folder / WORD_STARTS_FILE
    symbols = [dictionary[number] for number in range(len(dictionary))]
    if path.is_file():
        flags = [flag or stands_alone(one) for flag, one in zip(_read_flags(path, len(symbols)), symbols, strict=True)]
    else:
        try:
            tokenizer = load_tokenizer(folder)
        except ValueError as error:
            raise UserError(
                f"--mask-whole-words needs to know which symbols begin a word, and {folder} has neither "
                f"{WORD_STARTS_FILE} (a line with 0 or 1 for every id of its dictionary) nor a tokenizer ({error})"
            ) from None
        flags = word_start_flags(tokenizer, symbols)
    return torch.tensor(flags, dtype=torch.uint8)


def _read_flags(path: Path, size: int) -> list[bool]:
    lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    wrong = next((n for n, line in enumerate(lines, 1) if line not in ("0", "1")), None)
    if wrong is not None:
        raise UserError(f"{path}:{wrong}: expected 0 or 1, got {lines[wrong - 1]!r}")
    added = size - len(lines)  # masked_lm appends <mask> to the dictionary of the file
    if added not in (0, 1):
        raise UserError(
            f"{path} has {len(lines):,} lines and the dictionary {size:,} symbols: "
            f"it belongs to another dictionary, prepare the data again"
        )
    return [line == "1" for line in lines] + [True] * added


# Files


def tokenizer_files(folder: str | Path) -> list[Path]:
    """Return the files of a tokenizer and its dictionary that a folder has; other files of it are not listed."""
    return [*tokenizer_paths(Path(folder)), *filter(Path.is_file, [Path(folder) / DICTIONARY])]


def tokenizer_folder(*data: Path) -> Path | None:
    """Return the first folder with a tokenizer: a data folder, or the input0 of one; None if there is none."""
    places = (place for folder in data for place in (folder, folder / "input0"))
    return next(filter(holds_tokenizer, places), None)


def piece_file(language: str) -> str:
    """Return the name of a language's own sentencepiece model, as `relpos convert` writes it."""
    return f"sentencepiece.{language}.model"


def manifest_of(folder: Path) -> Path | None:
    """Return a data folder's manifest.json: its own, or a parent's that lists the folder."""
    for depth, place in enumerate((folder, *folder.absolute().parents[:2])):
        path = place / "manifest.json"
        if not path.is_file():
            continue
        name = folder.absolute().relative_to(place.absolute()).as_posix()
        found = None if depth == 0 else read_json(path)  # another program's may hold anything
        if depth == 0 or (isinstance(found, dict) and name in (found.get("outputs") or ())):
            return path
    return None


def unit_file(folder: Path, kind: str) -> Path:
    """Return the file of subwords ("subword-nmt" or "sentencepiece") that belongs to a data folder.

    Raises:
        UserError: the file is missing.
    """
    name = UNIT_FILES[kind == SENTENCEPIECE]
    places = [folder, folder.parent / "units", folder.parent]
    found = next((place / name for place in places if (place / name).is_file()), None)
    if found is None:
        raise UserError(
            f"{folder} has no {name}, nor {places[1]}: its manifest names {kind} units; name the "
            f"data folder with --data"
        )
    return found


def asset_files(data: Path, tokenizer: Path | None = None) -> dict[str, Path]:
    """Return the files that a data folder's text needs, by their places in `text/`.

    The tokenizer may lie in a folder of its own.
    """
    found: dict[str, Path] = {}
    for place in (data, *([tokenizer] if tokenizer else [])):
        for part in DATA_PARTS:
            patterns = ("dict*.txt", piece_file("*")) if place == data else (piece_file("*"),)
            paths = [path for pattern in patterns for path in sorted((place / part).glob(pattern))]
            paths += [path for name in TEXT_FILES if (path := place / part / name).is_file()]
            found |= {str(Path(part, path.name)): path for path in paths}
    if manifest := manifest_of(data):
        found["manifest.json"] = manifest
        for kind in ("subword-nmt", SENTENCEPIECE):
            try:
                path = unit_file(data, kind)
            except UserError:
                continue  # the manifest names the other kind, or none
            found.setdefault(path.name, path)
    return found


def asset_files_of(folder: Path) -> dict[str, Path]:
    """Return a folder's dict.txt, which may lie in its input0/, and its tokenizer's files, by their names."""
    dictionary = next((path for part in DATA_PARTS[:2] if (path := folder / part / DICTIONARY).is_file()), None)
    place = tokenizer_folder(folder)
    found = [*([dictionary] if dictionary else []), *(tokenizer_paths(place) if place else [])]
    return {path.name: path for path in found}


def label_names(text: Path | None, classes: int) -> list[str]:
    """Return names of the classes from the data's dictionary of labels, if it has as many."""
    path = text / "label" / DICTIONARY if text else None
    if path is None or not path.is_file():
        return []
    names = [line.rpartition(" ")[0] for line in read_lines(path)][:classes]
    return names if len(names) == classes else []


def copy_assets(data: Path, folder: Path, tokenizer: Path | None = None) -> Path:
    """Copy a data folder's text files beside the checkpoints of `folder`, and return the folder that holds them.

    That is `text/`, or `text-HASH/` (of the files' hash) where `text/` holds another model's files or a user's own.
    A folder that holds equal files already is returned as it is.  Nothing is changed or removed.

    Raises:
        UserError: `text-HASH/` holds other files than its name says.
    """
    files = asset_files(data, tokenizer)
    for place in text_folders(folder):
        if any(path.is_relative_to(place) for path in files.values()) or holds(place, files):
            return place
    first = folder / TEXT_FOLDER
    if not files:
        return first
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name}\0{sha256_of(path)}\n".encode())
    for place in (first, folder / f"{TEXT_FOLDER}-{digest.hexdigest()[:8]}"):
        if not place.exists() or (place.is_dir() and not any(place.iterdir())):
            with atomic_folder(place) as temporary:
                for name, path in files.items():
                    copy_file(path, temporary / name)
            return place
    raise UserError(f"{place} does not hold what its name says: move it, or what is written beside it")


def text_folders(folder: Path) -> list[Path]:
    """Return the folders of text beside the checkpoints of a folder, `text/` first."""
    named = sorted(path for path in folder.glob(f"{TEXT_FOLDER}-*") if HASHED.fullmatch(path.name))
    return [path for path in (folder / TEXT_FOLDER, *named) if path.is_dir()]


def holds(place: Path, files: Mapping[str, Path]) -> bool:
    """Return True if a folder of text holds these files, and no other file by which text is read."""
    known = {name: path for name, path in asset_files(place).items() if path.is_relative_to(place)}
    return known.keys() == files.keys() and all(
        known[name].read_bytes() == path.read_bytes() for name, path in files.items()
    )


def find_assets(
    checkpoint: Path, data: Path | None, trained_on: str = "", kept: Mapping[str, Mapping[str, str]] = {}
) -> Path:
    """Return the folder of a checkpoint's dictionaries and subwords.

    Args:
        checkpoint: the model's file.
        data: the data folder that the user names; None: what lies beside the checkpoint.
        trained_on: the data folder that the checkpoint names, for the error.
        kept: the hashes that it keeps of the text of its training.

    Raises:
        UserError: there is none, or it is of another training.
    """
    places = [data] if data else [*text_folders(checkpoint.parent), checkpoint.parent]
    places = [place for place in places if any(any((place / part).glob("dict*.txt")) for part in DATA_PARTS[:2])]
    differing = [provenance.differing(kept, asset_files(place)) for place in places]
    if same := [place for place, names in zip(places, differing, strict=True) if not names]:
        return max(same, key=lambda place: len(kept.get("files", {}).keys() & asset_files(place).keys()))
    if places:
        raise another(checkpoint, differing[0], places[0])
    if data:
        raise UserError(f"--data {data} has no dict.txt and no dict.LANGUAGE.txt")
    where = f" (it was {trained_on})" if trained_on else ""
    raise UserError(
        f"no {TEXT_FOLDER}/ beside {checkpoint}, which newer trainings write: name the data folder that "
        f"it was trained on with --data{where}"
    )


def another(checkpoint: Path, differing: Sequence[str], place: Path) -> UserError:
    """Return the error of a folder of text that is not that of a checkpoint's training; `differing` names its files."""
    said = ""
    if provenance.MANIFEST in differing:
        manifest = asset_files(place).get(provenance.MANIFEST)
        facts = provenance.text_facts(read_json(manifest)) if manifest else {}
        told = ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)
        said = f" ({manifest} says {told or 'nothing of how text is read'})" if manifest else " (it has none)"
    return UserError(
        f"{checkpoint} was trained with another {', '.join(differing)} than {place} holds{said}: name the data folder "
        f"of its training with --data"
    )


def check_text(checkpoint: Path, data: Path, kept: Mapping[str, Mapping[str, str]]) -> None:
    """Raise a UserError for a data folder whose text is not read as in a checkpoint's training, if that is known."""
    if differing := provenance.differing(kept, asset_files(data)):
        raise another(checkpoint, differing, data)
