"""The units of a language model: words, sentencepiece's pieces, characters or bytes.

A unit is a *symbol* of fairseq's dictionary: no white space in it, which would break `dict.txt`.
At the levels of words and pieces `</s>` ends every line. At the levels of characters and bytes
`</s>` *is* the line feed, so that tokens are exactly the text's characters or bytes.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.text.dictionary import NSPECIAL, UNK, ids_of

SPACE = "\u2581"  # sentencepiece's sign for a space


def char_symbol(char: str) -> str:
    """Return a character's symbol: itself if it is visible, a sign for space, else its number."""
    if char == " ":
        return SPACE
    if char.isprintable() and not char.isspace() and char != SPACE:
        return char
    return f"<U+{ord(char):04X}>"


class Words:
    """Words between white space, as fairseq-preprocess cuts them."""

    exact = False  # whether tokens are the text's characters, with </s> for the line feed

    def count(self, lines: Iterable[str]) -> Counter:
        return Counter("\n".join(lines).split())

    def encoder(self, symbols: list[str]):
        """Return a function from a line to a new list of ids.

        A literal `<s>`, `<pad>` or `</s>` in the text is an unknown word, never a special token.
        """
        index = ids_of(symbols)
        return lambda line: [index.get(word, UNK) for word in line.split()]


class Characters:
    """Characters (code points)."""

    exact = True

    def count(self, lines: Iterable[str]) -> Counter:
        characters = Counter()
        for line in lines:
            characters.update(line)
        return Counter({char_symbol(char): count for char, count in characters.items()})

    def encoder(self, symbols: list[str]):
        index, known = ids_of(symbols), {}

        def encode(line: str) -> list[int]:
            for char in set(line) - known.keys():
                known[char] = index.get(char_symbol(char), UNK)
            return [known[char] for char in line]

        return encode


class Bytes:
    """Bytes, as decimal numbers (so does the enwik8 preparation that Transformer-XL released)."""

    exact = True
    symbols = tuple(str(byte) for byte in range(256) if byte != ord("\n"))

    def encoder(self, symbols: list[str]):
        table = [UNK] * 256
        for place, symbol in enumerate(symbols):
            table[int(symbol)] = NSPECIAL + place
        return lambda line: [table[byte] for byte in line]


class SentencePieces:
    """The pieces of a sentencepiece model; runs of white space count as one space."""

    exact = False

    def __init__(self, model: str | Path) -> None:
        import sentencepiece

        try:
            self.processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
        except (OSError, RuntimeError) as error:
            raise UserError(f"{model} is not a sentencepiece model: {error}") from error
        processor = self.processor
        self.pieces = [processor.id_to_piece(i) for i in range(processor.get_piece_size())]
        self.usable = [
            piece for i, piece in enumerate(self.pieces) if not (processor.is_control(i) or processor.is_unknown(i))
        ]

    def ids(self, line: str) -> list[int]:
        """Return the model's own ids of a line."""
        return self.processor.encode(" ".join(line.split()))

    def count(self, lines: Iterable[str]) -> Counter:
        """Count the symbols of lines; every piece of the model is in the result."""
        ids = Counter()
        for line in lines:
            ids.update(self.ids(line))
        counts = Counter(dict.fromkeys(self.usable, 0))
        usable = set(self.usable)
        counts.update({self.pieces[i]: n for i, n in ids.items() if self.pieces[i] in usable})
        return counts

    def encoder(self, symbols: list[str]):
        index = ids_of(symbols)
        table = [index.get(piece, UNK) for piece in self.pieces]
        return lambda line: [table[i] for i in self.ids(line)]


def load_level(level: str, model: str | Path | None = None):
    """Return the units of a level; `model` is sentencepiece's."""
    if level == "sentencepiece":
        return SentencePieces(model)
    return {"word": Words, "char": Characters, "byte": Bytes}[level]()
