"""Find, read and copy the files by which the text of a data folder or a checkpoint becomes symbols and ids."""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_folder, copy_file, read_json, sha256_of
from relpos_fairseq.text import FILES, MODEL_FILES, dictionary, load_tokenizer, provenance
from relpos_fairseq.text.dictionary import EOS, SPECIAL, UNK, read_dictionary

# ---- Raw text to the symbols of a dictionary and back, as the data's manifest says.
# The manifest of `relpos prepare wmt` names languages, Moses' tokenizer and units; that of `relpos
# prepare lm` (and of the quickstart) a level; beside the data of `prepare mlm`, `qa` and `glue` lies
# a tokenizer.  Without any of these text is symbols of dict.txt, joined by spaces.


END, UNKNOWN = SPECIAL[EOS], SPECIAL[UNK]
UNIT_FILES = ("bpe.codes", "sentencepiece.model")  # of `prepare wmt`, in its folder units/
EXACT = ("char", "byte")
LANGUAGE_CODE = re.compile(">>.+?<<")


class Text(Protocol):
    """One side of a model: its text and its symbols."""

    def encode(self, text: str) -> list[str]:
        """Return the symbols of a text."""

    def decode(self, symbols: Iterable[str]) -> str:
        """Return the text of symbols."""


class ParallelText:
    """A side of `prepare wmt`: normalised, tokenised and cut as its training text was.

    Args:
        language: ISO 639-1 code.
        tokenizer: "moses" or "none".
        bpe: "subword-nmt", "sentencepiece", or "none" for whole words.
        units: the file of what was learned.
    """

    def __init__(self, language: str, tokenizer: str, bpe: str, units: Path | None) -> None:
        from relpos_fairseq.preparation.subwords import load_units
        from relpos_fairseq.text.moses import Detokeniser, FastMoses, Normaliser

        self.steps: list[Callable[[str], str]] = [Normaliser(language)]
        if tokenizer == "moses":
            self.steps.append(FastMoses(language))
        if units is not None:
            self.steps.append(load_units(bpe, units))
        self.detokenise = Detokeniser(language, tokenizer, bpe)

    def encode(self, text: str) -> list[str]:
        for step in self.steps:
            text = step(text)
        return text.split()

    def decode(self, symbols: Iterable[str]) -> str:
        return self.detokenise(" ".join(symbols))


class LevelText:
    """Text of `prepare lm`: words, pieces, characters or bytes; `</s>` ends a line.

    Args:
        level: "word", "sentencepiece", "char" or "byte".
        model: sentencepiece's.
    """

    def __init__(self, level: str, model: Path | None = None) -> None:
        from relpos_fairseq.text.levels import SPACE, char_symbol, load_level

        self.level, self.space, self.char = level, SPACE, char_symbol
        self.units = load_level(level, model)

    def encode(self, text: str) -> list[str]:
        """Return the symbols of a text; a line feed becomes `</s>`."""
        first, *more = (self._line(line) for line in text.split("\n"))
        return first + [symbol for line in more for symbol in (END, *line)]

    def _line(self, line: str) -> list[str]:
        if self.level == "char":
            return [self.char(char) for char in line]
        if self.level == "byte":
            return [str(byte) for byte in line.encode("utf-8")]
        if self.level == "word":
            found = line.split()
        else:
            found = [self.units.pieces[number] for number in self.units.ids(line)]
        return [UNKNOWN if symbol in SPECIAL else symbol for symbol in found]

    def decode(self, symbols: Iterable[str]) -> str:
        stream = self.stream()
        return "".join(map(stream, symbols)) + stream(None)

    def stream(self) -> Callable[[str | None], str]:
        """Return a function from the next symbol to the text that it adds; None ends the text."""
        decoder, begins = codecs.getincrementaldecoder("utf-8")(errors="replace"), True

        def add(symbol: str | None) -> str:
            nonlocal begins
            if symbol is None:
                return decoder.decode(b"", final=True)
            if symbol == END:
                begins = True
                return decoder.decode(b"", final=True) + "\n"
            raw, begins = self._bytes(symbol, begins), False
            return decoder.decode(raw)

        return add

    def _bytes(self, symbol: str, begins: bool) -> bytes:
        """The bytes that a symbol adds to its line."""
        if self.level == "byte":
            return bytes([int(symbol)]) if symbol.isdigit() else UNKNOWN.encode()
        if self.level == "char":
            return _character(symbol, self.space).encode()
        if self.level == "word":
            return symbol.encode() if begins else f" {symbol}".encode()
        if len(symbol) == 6 and symbol.startswith("<0x"):  # sentencepiece's fallback
            return bytes([int(symbol[3:5], 16)])
        text = symbol.replace(self.space, " ")
        return (text.removeprefix(" ") if begins else text).encode()


def _character(symbol: str, space: str) -> str:
    """The character of a symbol of the level `char`."""
    if symbol == space:
        return " "
    if symbol.startswith("<U+") and symbol.endswith(">"):
        return chr(int(symbol[3:-1], 16))
    return symbol


class TokenizerText:
    """Text of a tokenizer that lies beside the data."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = load_tokenizer(folder)

    def encode(self, text: str) -> list[str]:
        return self.tokenizer.encode(text).pieces

    def decode(self, symbols: Iterable[str]) -> str:
        return self.tokenizer.decode(list(symbols))


class SentencePieceText:
    """A side of a model converted from Marian's or OpenNMT-py's: sentencepiece's own pieces.

    A text may begin with Marian's code of its target's language, such as >>fra<<.

    Args:
        model: sentencepiece's.
        symbols: of the dictionary; those that are codes are no text.
    """

    def __init__(self, model: Path, symbols: Iterable[str]) -> None:
        from relpos_fairseq.text.tokenizer import import_sentencepiece

        self.codes = set(filter(LANGUAGE_CODE.fullmatch, symbols))
        self.pieces = import_sentencepiece().SentencePieceProcessor(model_file=str(model))

    def encode(self, text: str) -> list[str]:
        found = LANGUAGE_CODE.match(text)
        code = [found.group()] if found and found.group() in self.codes else []
        return code + self.pieces.encode(text.removeprefix("".join(code)), out_type=str)

    def decode(self, symbols: Iterable[str]) -> str:
        return self.pieces.decode_pieces(list(symbols)).strip()


class SymbolText:
    """Symbols of dict.txt joined by spaces: what nothing else is known of."""

    def encode(self, text: str) -> list[str]:
        return text.split()

    def decode(self, symbols: Iterable[str]) -> str:
        return " ".join(symbols)


def read_text(folder: Path, language: str | None = None) -> Text:
    """Return how text becomes symbols, by a data folder or what training wrote beside checkpoints.

    Of parallel text `language` chooses the side.

    Raises:
        UserError: a file that the manifest names, or a dictionary, is not there.
    """
    if language and (pieces := folder / piece_file(language)).is_file():
        return SentencePieceText(pieces, read_dictionary(folder / f"dict.{language}.txt"))
    manifest = manifest_of(folder)
    facts = read_json(manifest) if manifest else {}
    settings = facts.get("settings", {})
    if language and {"languages", "tokenizer", "bpe"} <= settings.keys():
        if language not in settings["languages"]:
            known = " and ".join(settings["languages"])
            raise UserError(f"{manifest} is of {known}, and the model asks for {language}")
        return ParallelText(language, settings["tokenizer"], settings["bpe"], unit_file(folder, settings["bpe"]))
    if level := facts.get("level"):
        pieces = level == "sentencepiece"
        return LevelText(level, unit_file(folder, level) if pieces else None)
    for place in (folder, folder / "input0"):
        if any((place / name).is_file() for name in MODEL_FILES):
            return TokenizerText(place)
    return SymbolText()


def piece_file(language: str) -> str:
    """Return the name of a language's own sentencepiece model, as `relpos convert` writes it."""
    return f"sentencepiece.{language}.model"


def manifest_of(folder: Path) -> Path | None:
    """Return the manifest of a data folder: in it, or above it where that one names it."""
    for depth, place in enumerate((folder, *folder.absolute().parents[:2])):
        path = place / "manifest.json"
        if not path.is_file():
            continue
        name = folder.absolute().relative_to(place.absolute()).as_posix()
        if depth == 0 or name in (read_json(path) or {}).get("outputs", {}):
            return path
    return None


def unit_file(folder: Path, kind: str) -> Path:
    """Return the file of learned units that belongs to a data folder.

    Raises:
        UserError: it is not there.
    """
    name = UNIT_FILES[kind == "sentencepiece"]
    places = [folder, folder.parent / "units", folder.parent]
    found = next((place / name for place in places if (place / name).is_file()), None)
    if found is None:
        raise UserError(
            f"{folder} has no {name}, nor {places[1]}: its manifest names {kind} units; name the "
            f"data folder with --data"
        )
    return found


# ---- A tokenizer's folder as ids of fairseq's dictionary.


def tokenizer_files(folder: str | Path) -> list[Path]:
    """The files of a tokenizer and its dictionary that a folder has."""
    names = (*FILES, dictionary.FILE)  # other files of the folder (a data-bin's) are not its own
    return [path for path in (Path(folder) / name for name in names) if path.is_file()]


class Vocabulary:
    """A folder's tokenizer and the dictionary beside it; what is missing or foreign is refused."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.tokenizer = load_tokenizer(self.folder)
        path = self.folder / dictionary.FILE
        if not path.is_file():
            raise UserError(
                f"{self.folder} has a tokenizer but no dict.txt; put the dictionary of its model "
                "there (relpos prepare mlm writes both)"
            )
        symbols = (*dictionary.SPECIAL, *dictionary.read_dictionary(path))
        self.ids = {symbol: number for number, symbol in enumerate(symbols)}
        self.size = len(symbols)
        self.tokenizer.check_dictionary(self.ids, str(path))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids (L,) int64 of every text, without any end; empty where nothing is encoded."""
        return [
            np.array([self.ids.get(piece, dictionary.UNK) for piece in pieces], dtype=np.int64)
            for pieces, _ in self.tokenizer.raw(list(texts))
        ]

    def word_starts(self) -> list[bool]:
        """Whether each id begins a word; special symbols do."""
        starts = [True] * self.size
        starts[dictionary.UNK] = self.tokenizer.begins_word(dictionary.SPECIAL[dictionary.UNK])
        for symbol, number in self.ids.items():
            if number >= dictionary.NSPECIAL and not symbol.startswith("madeupword"):
                starts[number] = self.tokenizer.begins_word(symbol)
        return starts


# ---- Which symbols of a dictionary begin a word: what whole-word masking must know.
# A data-bin says it in `word_starts.txt`, one line for every id of its dictionary, special symbols
# included: `1` where the symbol begins a word and `0` where it continues one.  Without that file the
# tokenizer is asked that lies in the same folder.


WORD_STARTS_FILE = "word_starts.txt"


def word_starts(folder: str | Path, dictionary: Any) -> Tensor:
    """(V,) 1 where a symbol begins a word, as fairseq's MaskTokensDataset takes it.

    Special symbols of the dictionary, fillers and <mask> begin words.  A folder that says nothing
    of words, or of another dictionary, is refused.
    """
    folder = Path(folder)
    path = folder / WORD_STARTS_FILE
    if path.is_file():
        flags = _read(path, dictionary)
    else:
        try:
            tokenizer = load_tokenizer(folder)
        except ValueError as error:
            raise ValueError(
                f"--mask-whole-words needs to know which symbols begin a word, and {folder} has "
                f"neither {WORD_STARTS_FILE} (a line with 0 or 1 for every id of its dictionary) nor a "
                f"tokenizer ({error})"
            ) from None
        flags = [tokenizer.begins_word(dictionary[i]) for i in range(len(dictionary))]
    return torch.tensor([flag or _stands_alone(i, dictionary) for i, flag in enumerate(flags)], dtype=torch.uint8)


def _read(path: Path, dictionary: Any) -> list[bool]:
    lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    wrong = next((n for n, line in enumerate(lines, 1) if line not in ("0", "1")), None)
    if wrong is not None:
        raise ValueError(f"{path}:{wrong}: expected 0 or 1, got {lines[wrong - 1]!r}")
    added = len(dictionary) - len(lines)  # masked_lm adds <mask> to what the file knows
    if added not in (0, 1):
        raise ValueError(
            f"{path} has {len(lines):,} lines and the dictionary {len(dictionary):,} symbols: "
            f"it belongs to another dictionary, prepare the data again"
        )
    return [line == "1" for line in lines] + [True] * added


def _stands_alone(index: int, dictionary: Any) -> bool:
    symbol = dictionary[index]
    if index == dictionary.unk():
        return False  # where a tokenizer spells a word in pieces, an unknown one may continue it
    return index < dictionary.nspecial or symbol.startswith("madeupword") or symbol == "<mask>"


# ---- What lies beside a checkpoint so that its folder is enough: dictionaries, units, manifest.
# Training copies them into `text/` of --save-dir, and into `text-HASH/` where `text/` is another model's.  The folder
# is of the data's own shape, so that it also stands for the data folder where fairseq asks for dictionaries.  Which of
# several is a checkpoint's is known by the hashes that it keeps (`provenance`).


TEXT_FOLDER = "text"
HASHED = re.compile(r"text-[0-9a-f]{8}")
TEXT_FILES = (*FILES, *UNIT_FILES, "word_starts.txt")
DATA_PARTS = ("", "input0", "label")  # of GLUE's data, input0 and label have dictionaries


def asset_files(data: Path, tokenizer: Path | None = None) -> dict[str, Path]:
    """Return the files that a data folder's text needs, by their places in `text/`.

    The tokenizer may lie in a folder of its own.
    """
    found = {}
    for place in (data, *([tokenizer] if tokenizer else [])):
        for part in DATA_PARTS:
            for path in sorted((place / part).glob("dict*.txt")) if place == data else []:
                found[str(Path(part, path.name))] = path
            for path in sorted((place / part).glob(piece_file("*"))):
                found[str(Path(part, path.name))] = path
            found |= {str(Path(part, n)): place / part / n for n in TEXT_FILES if (place / part / n).is_file()}
    if manifest := manifest_of(data):
        found["manifest.json"] = manifest
        for kind in ("subword-nmt", "sentencepiece"):
            try:
                path = unit_file(data, kind)
            except UserError:
                continue  # the manifest's is the other, or none
            found.setdefault(path.name, path)
    return found


def copy_assets(data: Path, folder: Path, tokenizer: Path | None = None) -> Path:
    """Copy a data folder's text files beside the checkpoints of `folder`; what is the same stays.

    They lie in `text/`. Where that is another model's, or a user's, they lie in a folder that is named for them,
    `text-HASH/`. Nothing that lies there is changed or removed.

    Returns:
        That folder.

    Raises:
        UserError: `text-HASH/` holds something else, as its name says.
    """
    there, files = folder / TEXT_FOLDER, asset_files(data, tokenizer)
    for place in text_folders(folder):
        if any(path.is_relative_to(place) for path in files.values()) or holds(place, files):
            return place
    if not files:
        return there
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name}\0{sha256_of(path)}\n".encode())
    for place in (there, folder / f"{TEXT_FOLDER}-{digest.hexdigest()[:8]}"):
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
    """Say whether a folder of text holds these files, and no other that the reading of text depends on."""
    known = {name: path for name, path in asset_files(place).items() if path.is_relative_to(place)}
    return known.keys() == files.keys() and all(
        known[name].read_bytes() == path.read_bytes() for name, path in files.items()
    )


def find_assets(
    checkpoint: Path, data: Path | None, trained_on: str = "", state: Mapping[str, Any] | None = None
) -> Path:
    """Return the folder of a checkpoint's dictionaries and units.

    Args:
        checkpoint: the model's file.
        data: the data folder that the user names; None: what lies beside the checkpoint.
        trained_on: the data folder that the checkpoint names, for the error.
        state: the loaded checkpoint, whose hashes are compared; None: it is read if there are several folders.

    Raises:
        UserError: there is none, or it is of another training.
    """
    places = [data] if data else [*text_folders(checkpoint.parent), checkpoint.parent]
    places = [place for place in places if any(any((place / part).glob("dict*.txt")) for part in DATA_PARTS[:2])]
    kept = provenance.read(state) if state is not None else _hashes_of(checkpoint) if places else {}
    differing = [provenance.differing(kept, asset_files(place)) for place in places]
    if [] in differing:
        return places[differing.index([])]
    if places:
        raise UserError(
            f"{checkpoint} was trained with another {', '.join(differing[0])} than {places[0]} holds: name the data "
            f"folder of its training with --data"
        )
    if data:
        raise UserError(f"--data {data} has no dict.txt and no dict.LANGUAGE.txt")
    where = f" (it was {trained_on})" if trained_on else ""
    raise UserError(
        f"no {TEXT_FOLDER}/ beside {checkpoint}, which newer trainings write: name the data folder that "
        f"it was trained on with --data{where}"
    )


def _hashes_of(checkpoint: Path) -> dict[str, dict[str, str]]:
    """Return the hashes that a checkpoint keeps, without reading its tensors; nothing where it does not load."""
    import torch

    try:
        state = torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # an older format, a folder, or no checkpoint: whoever loads it says so
        return {}
    return provenance.read(state) if isinstance(state, Mapping) else {}
