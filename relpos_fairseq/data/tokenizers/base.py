"""What every tokenizer gives: pieces, where they stand in the text, and which begin a word."""

from __future__ import annotations

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.data.dictionary import SPECIAL, UNK, write_dictionary

UNKNOWN = SPECIAL[UNK]
MASK = "<mask>"  # what fairseq's masked_lm task adds after all pieces
# How BERT's vocabularies spell them.
FROM_BERT = {"[CLS]": "<s>", "[PAD]": "<pad>", "[SEP]": "</s>", "[UNK]": UNKNOWN, "[MASK]": MASK}


@dataclass(frozen=True)
class Encoding:
    """A tokenised text."""

    pieces: list[str]  # symbols as in dict.txt, L of them
    # for each the half-open range of characters (Unicode code points) of the text that it covers,
    # without the space before a word.  Ranges never go back; pieces that are parts of one character
    # all cover that character; a piece for nothing but the beginning of a word covers nothing
    offsets: list[tuple[int, int]]
    word_begins: list[bool]  # whether a piece begins a word, for whole-word masking

    def __len__(self) -> int:
        return len(self.pieces)


class Tokenizer(ABC):
    """Splits text into the symbols of a fairseq dictionary."""

    kind: str  # `bpe`, `wordpiece` or `sentencepiece` (or a library's own name for another model)
    # all that `encode` can give, in the order of dict.txt, special ones left out
    symbols: list[str]

    @abstractmethod
    def raw(self, texts: Sequence[str]) -> list[tuple[list[str], list[tuple[int, int]]]]:
        """Pieces and the library's own offsets of every text."""

    @abstractmethod
    def begins_word(self, piece: str) -> bool:
        """Whether a symbol begins a word.

        Scripts that are written without spaces have no mark: there every piece that begins with an
        ideograph or kana counts as a word.
        """

    @abstractmethod
    def decode(self, pieces: Iterable[str]) -> str:
        """The text of some pieces."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the model's own files."""

    def encode(self, text: str) -> Encoding:
        """Tokenise one text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Tokenise many texts; half a surrogate pair, which is no character, is refused."""
        for text in texts:
            require_characters(text)
        found = self.raw(texts)
        return [
            Encoding(
                pieces,
                exact_offsets(text, pieces, offsets),
                [first or self.begins_word(piece) for first, piece in _mark_first(pieces)],
            )
            for text, (pieces, offsets) in zip(texts, found, strict=True)
        ]

    def save(self, folder: str | Path) -> None:
        """Write the model and its fairseq dictionary, dict.txt, into a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.write(folder)
        write_dictionary(folder / "dict.txt", ((symbol, 1) for symbol in self.symbols))

    def check_dictionary(self, known: Collection[str], name: str) -> None:
        """Refuse the dictionary of a data set or a model that lacks symbols of this tokenizer.

        `name` is the dictionary in the error's words.
        """
        missing = [symbol for symbol in self.symbols if symbol not in known]
        if missing:
            raise ValueError(
                f"{name} lacks {len(missing):,} of the {len(self.symbols):,} symbols of this "
                f"{self.kind} tokenizer ({', '.join(map(repr, missing[:3]))}): give the tokenizer "
                f"that the dictionary was made with, or the dict.txt beside the tokenizer"
            )


def require_characters(text: str) -> None:
    """Raise a ValueError if a text holds half a surrogate pair, which JSON can smuggle in."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text holds {text[error.start]!r} at character {error.start}, half of a surrogate "
            f"pair: repair or leave out this text"
        ) from None


def _mark_first(pieces: list[str]) -> Iterable[tuple[bool, str]]:
    return ((number == 0, piece) for number, piece in enumerate(pieces))


def exact_offsets(text: str, pieces: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Make a library's offsets exact: half-open ranges in characters, one for each piece.

    Spaces around a piece are not the piece's.  Combining marks that the tokenizer dropped belong to
    the letter before them (else a WordPiece model would cut the accent off an answer's last
    letter).  An empty range within a character, one of several pieces for it, becomes the
    character's.  Ranges never go back.
    """
    exact = []
    following = [start for start, _ in [*offsets, (len(text), 0)][1:]]
    for piece, (start, end), limit in zip(pieces, offsets, following, strict=True):
        if start == end and piece != "▁" and end < len(text) and not text[end].isspace():
            end += 1
        inner_start, inner_end = start, end
        while inner_start < inner_end and text[inner_start].isspace():
            inner_start += 1
        while inner_end > inner_start and text[inner_end - 1].isspace():
            inner_end -= 1
        if inner_start < inner_end:
            start, end = inner_start, inner_end
            while end < limit and unicodedata.category(text[end]).startswith("M"):
                end += 1
        exact.append((start, end))
    return exact


def is_unspaced(character: str) -> bool:
    """Whether a character is of a script written without spaces: ideographs and kana."""
    code = ord(character)
    return (
        0x3040 <= code <= 0x30FF
        or 0x3400 <= code <= 0x4DBF
        or 0x4E00 <= code <= 0x9FFF
        or 0xF900 <= code <= 0xFAFF
        or 0x20000 <= code <= 0x323AF
    )
