"""Which symbols of a dictionary begin a word: what whole-word masking must know.

A data-bin says it in `word_starts.txt`, one line for every id of its dictionary, special symbols
included: `1` where the symbol begins a word and `0` where it continues one.  Without that file the
tokenizer is asked that lies in the same folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.data.tokenizers import load_tokenizer

FILE = "word_starts.txt"


def word_starts(folder: str | Path, dictionary: Any) -> Tensor:
    """(V,) 1 where a symbol begins a word, as fairseq's MaskTokensDataset takes it.

    Special symbols of the dictionary, fillers and <mask> begin words.  A folder that says nothing
    of words, or of another dictionary, is refused.
    """
    folder = Path(folder)
    path = folder / FILE
    if path.is_file():
        flags = _read(path, dictionary)
    else:
        try:
            tokenizer = load_tokenizer(folder)
        except ValueError as error:
            raise ValueError(
                f"--mask-whole-words needs to know which symbols begin a word, and {folder} has "
                f"neither {FILE} (a line with 0 or 1 for every id of its dictionary) nor a "
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
