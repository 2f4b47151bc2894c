"""Raw text to the symbols of a dictionary and back, as the data's manifest says.

The manifest of `relpos prepare wmt` names languages, Moses' tokenizer and units; that of `relpos
prepare lm` (and of the quickstart) a level; beside the data of `prepare mlm`, `qa` and `glue` lies
a tokenizer.  Without any of these text is symbols of dict.txt, joined by spaces.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

from relpos_fairseq.data.dictionary import EOS, SPECIAL, UNK, read_dictionary
from relpos_fairseq.data.tokenizers import MODEL_FILES, load_tokenizer
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import read_json

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
        from relpos_fairseq.preparation.wmt.detokenise import Detokeniser
        from relpos_fairseq.preparation.wmt.normalise import Normaliser
        from relpos_fairseq.preparation.wmt.subwords import load_units
        from relpos_fairseq.preparation.wmt.tokenise import FastMoses

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
        from relpos_fairseq.preparation.lm.units import SPACE, char_symbol, make_units

        self.level, self.space, self.char = level, SPACE, char_symbol
        self.units = make_units(level, model)

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


class PieceText:
    """A side of a model converted from Marian's or OpenNMT-py's: sentencepiece's own pieces.

    A text may begin with Marian's code of its target's language, such as >>fra<<.

    Args:
        model: sentencepiece's.
        symbols: of the dictionary; those that are codes are no text.
    """

    def __init__(self, model: Path, symbols: Iterable[str]) -> None:
        from relpos_fairseq.data.tokenizers.pieces import import_library

        self.codes = set(filter(LANGUAGE_CODE.fullmatch, symbols))
        self.pieces = import_library().SentencePieceProcessor(model_file=str(model))

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
        PreparationError: a file that the manifest names, or a dictionary, is not there.
    """
    if language and (pieces := folder / piece_file(language)).is_file():
        return PieceText(pieces, read_dictionary(folder / f"dict.{language}.txt"))
    manifest = manifest_of(folder)
    facts = read_json(manifest) if manifest else {}
    settings = facts.get("settings", {})
    if language and {"languages", "tokenizer", "bpe"} <= settings.keys():
        if language not in settings["languages"]:
            known = " and ".join(settings["languages"])
            raise PreparationError(f"{manifest} is of {known}, and the model asks for {language}")
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
        PreparationError: it is not there.
    """
    name = UNIT_FILES[kind == "sentencepiece"]
    places = [folder, folder.parent / "units", folder.parent]
    found = next((place / name for place in places if (place / name).is_file()), None)
    if found is None:
        raise PreparationError(
            f"{folder} has no {name}, nor {places[1]}: its manifest names {kind} units; name the "
            f"data folder with --data"
        )
    return found
