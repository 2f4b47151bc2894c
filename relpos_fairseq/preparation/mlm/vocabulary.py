"""A tokenizer's folder as ids of fairseq's dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.lines import read_lines

BOS, PAD, EOS, UNK = range(4)  # as fairseq's Dictionary numbers them
NSPECIAL = 4  # ids before the first symbol of a dict.txt
OVERWRITE = "#fairseq:overwrite"
DICTIONARY = "dict.txt"


def tokenizer_files(folder: str | Path) -> list[Path]:
    """The files of a tokenizer and its dictionary that a folder has."""
    from relpos_fairseq.data.tokenizers import FILES

    names = (*FILES, DICTIONARY)  # other files of the folder (a data-bin's) are not its own
    return [path for path in (Path(folder) / name for name in names) if path.is_file()]


def read_dictionary(path: Path) -> dict[str, int]:
    """Symbol to id of a dict.txt, as fairseq's Dictionary loads it.

    Args:
        path: lines `symbol count`; the ids begin behind the four special symbols.

    Raises:
        PreparationError: a line has no count, or a symbol twice.
    """
    from relpos_fairseq.data.tokenizers import SPECIAL

    ids = {symbol: number for number, symbol in enumerate(SPECIAL)}
    size = len(ids)
    for number, line in enumerate(read_lines(path), start=1):
        symbol, _, count = line.removesuffix(f" {OVERWRITE}").rpartition(" ")
        if not symbol or not count.isdigit():
            raise PreparationError(f"{path}, line {number}: expected 'symbol count', got {line!r}")
        if symbol in ids and not line.endswith(OVERWRITE):
            raise PreparationError(f"{path}, line {number}: {symbol!r} is there twice")
        ids[symbol] = size
        size += 1
    return ids


class Vocabulary:
    """A tokenizer and the dictionary beside it.

    Attributes:
        tokenizer: a `relpos_fairseq.data.tokenizers.Tokenizer`.
        ids: symbol to id.
        size: number of ids.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read a folder.

        Args:
            folder: with a tokenizer and its dict.txt.

        Raises:
            ValueError: either is missing or broken, or the dictionary is another tokenizer's.
        """
        from relpos_fairseq.data.tokenizers import load_tokenizer

        self.folder = Path(folder)
        self.tokenizer = load_tokenizer(self.folder)
        path = self.folder / DICTIONARY
        if not path.is_file():
            raise PreparationError(
                f"{self.folder} has a tokenizer but no dict.txt; put the dictionary of its model "
                "there (scripts/prepare_mlm.py writes both)"
            )
        self.ids = read_dictionary(path)
        self.size = max(self.ids.values()) + 1
        self.tokenizer.check_dictionary(self.ids, str(path))

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of every text, without any end.

        Args:
            texts: N texts.

        Returns:
            N arrays (L,) of int64; empty where a text has nothing that is encoded.
        """
        return [
            np.array([self.ids.get(piece, UNK) for piece in pieces], dtype=np.int64)
            for pieces, _ in self.tokenizer.raw(list(texts))
        ]

    def word_starts(self) -> list[bool]:
        """Whether each id begins a word; special symbols do."""
        starts = [True] * self.size
        for symbol, number in self.ids.items():
            if number >= NSPECIAL and not symbol.startswith("madeupword"):
                starts[number] = self.tokenizer.begins_word(symbol)
        return starts
