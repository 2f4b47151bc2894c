"""A model's vocabulary in the order of fairseq's dictionary: whose rows its embedding takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor


def take_rows(table: Tensor, rows: list[int], new: float = 0.0) -> Tensor:
    """Return rows (V', ...) of a table (V, ...) by their numbers; -1 is a row of `new`."""
    order = torch.tensor(rows)
    taken = table[order.clamp(min=0)]
    taken[order < 0] = new
    return taken


@dataclass
class Vocabulary:
    """The rows of a model in fairseq's order.

    Args:
        symbols: lines of dict.txt: what follows <s>, <pad>, </s> and <unk> (and precedes <mask>).
        rows: number, in the source, of each of fairseq's rows; -1 where the source has none.
        files: the tokenizer's files.
        made: name to text of files that stand for some of those.
    """

    symbols: list[str]
    rows: list[int]
    files: list[Path] = field(default_factory=list)
    made: dict[str, str] = field(default_factory=dict)

    def take(self, table: Tensor) -> Tensor:
        """Return (V, ...) rows in the source's order as (V', ...) rows in fairseq's."""
        return take_rows(table, self.rows)

    def put(self, table: Tensor) -> Tensor:
        """Return (V', ...) rows in fairseq's order as (V, ...) in the source's."""
        rows = torch.tensor(self.rows)
        known = rows >= 0
        result = table.new_zeros(int(rows.max()) + 1, *table.shape[1:])
        result[rows[known]] = table[known]
        return result

    def dictionary(self) -> str:
        """Return the text of dict.txt; fairseq's tools read no counts of it."""
        return "".join(f"{symbol} 1\n" for symbol in self.symbols)
