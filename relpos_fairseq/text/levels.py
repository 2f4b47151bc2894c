"""Split the text of language models at a level: words, sentencepiece's subwords, characters or bytes.

A symbol of fairseq's dictionary holds no white space, which would break `dict.txt`.  At the levels of words and
subwords `</s>` ends every line.  At the levels of characters and bytes `</s>` is the line feed itself, so that the
tokens are exactly the characters or bytes of the text.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from relpos_fairseq.io.manifests import Manifest
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.text.dictionary import CONTINUED, EOS, SPECIAL, UNK, UNKNOWN, WORD_START, ids_of, symbol_of, word_of
from relpos_fairseq.text.subwords import with_spaces
from relpos_fairseq.text.tokenizer import load_sentencepiece, usable_pieces

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = ("auto", "word", "subword", "char", "byte")  # of --text-level
SUBWORD_LEVELS = ("sentencepiece", "bpe")  # names of `relpos prepare lm` for the level "subword"
END = SPECIAL[EOS]


def char_symbol(char: str) -> str:
    """Return a character's symbol: itself if it is visible, a mark for the space, else its code point."""
    if char == " ":
        return WORD_START
    if char.isprintable() and not char.isspace() and char != WORD_START:
        return char
    return f"<U+{ord(char):04X}>"


class Level(ABC):
    """One level: a line is split into units (words, characters, ...), each with its symbol in the dictionary."""

    exact = False  # True if the symbols are exactly the text, with </s> for the line feed

    @abstractmethod
    def split(self, line: str) -> Sequence[Hashable]:
        """Return the units of a line."""

    def symbol(self, unit) -> str:
        """Return the symbol of a unit."""
        return unit

    @abstractmethod
    def to_bytes(self, symbol: str, begins: bool) -> bytes:
        """Return the UTF-8 bytes that a symbol adds to its line; `begins`: it is the line's first symbol."""

    def symbols_of(self, line: str) -> list[str]:
        """Return the symbols of a line; a literal special symbol is unknown."""
        found = map(self.symbol, self.split(line))
        return [UNKNOWN if symbol in SPECIAL else symbol for symbol in found]

    def count(self, lines: Iterable[str]) -> Counter:
        """Count the symbols of lines."""
        units: Counter = Counter()
        for line in lines:
            units.update(self.split(line))
        return Counter({self.symbol(unit): count for unit, count in units.items()})

    def encoder(self, symbols: Sequence[str]) -> Callable[[str], list[int]]:
        """Return a function from a line to its ids in the dictionary of `symbols`; unknown symbols are `UNK`."""
        index = ids_of(symbols)
        known = _Computed(lambda unit: index.get(self.symbol(unit), UNK))
        return lambda line: [known[unit] for unit in self.split(line)]


class _Computed(dict):
    """A dict whose missing values are computed by a function of their key, once."""

    def __init__(self, compute: Callable) -> None:
        super().__init__()
        self.compute = compute

    def __missing__(self, key):
        self[key] = value = self.compute(key)
        return value


class Words(Level):
    """Words between white space, as fairseq-preprocess splits them; a literal `</s>` has a symbol of its own."""

    def split(self, line: str) -> list[str]:
        return line.split()

    def symbol(self, unit: str) -> str:
        return symbol_of(unit)

    def to_bytes(self, symbol: str, begins: bool) -> bytes:
        word = word_of(symbol)
        return word.encode() if begins else f" {word}".encode()

    def encoder(self, symbols: Sequence[str]) -> Callable[[str], list[int]]:
        index = {word_of(symbol): number for symbol, number in ids_of(symbols).items()}
        return lambda line: [index.get(word, UNK) for word in line.split()]  # remembers no unknown word


class Characters(Level):
    """Characters (Unicode code points)."""

    exact = True

    def split(self, line: str) -> str:
        return line

    def symbol(self, unit: str) -> str:
        return char_symbol(unit)

    def to_bytes(self, symbol: str, begins: bool) -> bytes:
        if symbol == WORD_START:
            return b" "
        if symbol.startswith("<U+") and symbol.endswith(">"):
            return chr(int(symbol[3:-1], 16)).encode()
        return symbol.encode()


class Bytes(Level):
    """Bytes, of a line of text its UTF-8, as decimal numbers: Transformer-XL's released preparation of enwik8."""

    exact = True
    symbols = tuple(str(byte) for byte in range(256) if byte != ord("\n"))

    def split(self, line: str | bytes) -> bytes:
        return line if isinstance(line, bytes) else line.encode("utf-8")

    def symbol(self, unit: int) -> str:
        return str(unit)

    def to_bytes(self, symbol: str, begins: bool) -> bytes:
        return bytes([int(symbol)]) if symbol.isdigit() else UNKNOWN.encode()


class SentencePieces(Level):
    """Subwords of a sentencepiece model; a run of white space, and of its mark of a space, counts as one space."""

    def __init__(self, model: str | Path, known: Collection[str] = ()) -> None:
        self.processor = load_sentencepiece(Path(model), known)
        self.usable = usable_pieces(self.processor)
        numbers = range(self.processor.get_piece_size())
        self.bytes = {self.processor.id_to_piece(n) for n in numbers if self.processor.is_byte(n)}

    def split(self, line: str) -> list[int]:
        return self.processor.encode(with_spaces(" ".join(line.split())))

    def symbol(self, unit: int) -> str:
        return UNKNOWN if self.processor.is_unknown(unit) else self.processor.id_to_piece(unit)

    def to_bytes(self, symbol: str, begins: bool) -> bytes:
        if symbol in self.bytes:
            return bytes([int(symbol[3:5], 16)])
        text = symbol.replace(WORD_START, " ")
        return (text.removeprefix(" ") if begins else text).encode()

    def count(self, lines: Iterable[str]) -> Counter:
        """Count the symbols of lines; the result names every usable subword of the model."""
        found = super().count(lines)
        return Counter({piece: found[piece] for piece in self.usable})


BUILT_IN: dict[str, type[Words] | type[Characters] | type[Bytes]] = {"word": Words, "char": Characters, "byte": Bytes}


def load_level(level: str, model: str | Path | None = None, known: Collection[str] = ()) -> Level:
    """Return the level of a name: "word", "sentencepiece" (of the file `model`), "char" or "byte".

    Pieces that are none of `known`, the symbols of a dictionary, are split further; without any nothing is.
    """
    if model is not None:
        return SentencePieces(model, known)
    return BUILT_IN[level]()


class LevelText:
    """Text of `prepare lm` to symbols and back; `</s>` ends a line.

    Args:
        level: "word", "sentencepiece", "char" or "byte".
        model: sentencepiece's file.
        known: the dictionary's symbols, as in `load_level`.
    """

    def __init__(self, level: str, model: Path | None = None, known: Collection[str] = ()) -> None:
        self.level = load_level(level, model, known)

    def encode(self, text: str) -> list[str]:
        """Return the symbols of a text; a line feed becomes `</s>`."""
        first, *more = map(self.level.symbols_of, text.split("\n"))
        return first + [symbol for line in more for symbol in (END, *line)]

    def decode(self, symbols: Iterable[str]) -> str:
        """Return the text of symbols; `</s>` becomes a line feed."""
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
            raw, begins = self.level.to_bytes(symbol, begins), False
            return decoder.decode(raw)

        return add


# The level of a data folder


def text_level(folder: Path, dictionary: Any, wanted: str = "auto") -> str:
    """Return the level of a data folder's tokens, which decides what a loss means: `wanted`, one of LEVELS.

    For "auto" the manifest.json of `relpos prepare lm` names the level; without it the symbols of the (fairseq)
    dictionary are looked at.
    """
    if wanted not in LEVELS:
        raise ValueError(f"text_level must be one of {', '.join(LEVELS)}, got {wanted!r}")
    if wanted != "auto":
        return wanted
    manifest = folder / "manifest.json"
    if manifest.exists():
        named = read_json(manifest, Manifest).get("level")
        named = "subword" if named in SUBWORD_LEVELS else named
        if named in LEVELS:
            return named
    symbols = dictionary.symbols[dictionary.nspecial :]
    if all(len(symbol) == 1 or symbol.startswith("madeupword") for symbol in symbols):
        return "char"
    marked = any(symbol.startswith(WORD_START) or symbol.endswith(CONTINUED) for symbol in symbols)
    return "subword" if marked else "word"


def word_ends(dictionary: Any) -> Tensor:
    """Return (V,) bool: True for the tokens by which words are counted, one a word; the end of a line is one.

    Dai2019's perplexity on WikiText-103 counts `<eos>` as a word too.
    """
    import torch

    symbols = dictionary.symbols
    if any(symbol.startswith(WORD_START) for symbol in symbols):
        ends = [symbol.startswith(WORD_START) for symbol in symbols]
    else:
        ends = [not symbol.endswith(CONTINUED) for symbol in symbols]
    counted = torch.tensor(ends)
    counted[dictionary.pad()] = False
    counted[dictionary.eos()] = True
    return counted


def refuse_unknown_characters(tokens: np.ndarray, dictionary: Any, source: str) -> None:
    """Raise an error if tokens have characters outside the dictionary, which make bits a character meaningless."""
    unknown = int(np.count_nonzero(tokens == dictionary.unk()))
    if unknown:
        raise ValueError(
            f"{source}: {unknown:,} of {len(tokens):,} characters are outside the dictionary "
            f"({len(dictionary) - dictionary.nspecial} characters): binarise all splits with one "
            f"dictionary of every character, or give --text-level word to accept <unk>"
        )
