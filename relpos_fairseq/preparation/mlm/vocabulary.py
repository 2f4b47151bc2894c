"""A tokenizer's folder as ids of fairseq's dictionary."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from relpos_fairseq.data import dictionary
from relpos_fairseq.data.tokenizers import FILES, load_tokenizer
from relpos_fairseq.engine.errors import PreparationError


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
            raise PreparationError(
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
