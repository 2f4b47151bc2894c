"""Scalars over distances, and products of factors: one matrix for all rows of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.attention.tiles.geometry import Tile, scratch
from relpos_fairseq.attention.tiles.plan import Sheet
from relpos_fairseq.attention.tiles.wide import sheared

SMALL = 1 << 16  # elements of a matrix; larger ones are added one by one


class Matrix:
    """A sheet, formed for the tiles that share it, and its gradient.

    Cells (heads, n, S + n - 1) are a row's numbers over distances: a vector is copied into every
    row, read along diagonals (`sheared`), and its gradient is the sum over rows.

    Args:
        sheet: which.
        tables: the plan's tables.
        totals: gradients of the tables, None where unwanted; None: no backward pass.
        lowest: the call's most negative distance.
        name: of its storage.
    """

    def __init__(
        self, sheet: Sheet, tables: list[Tensor], totals: list[Tensor | None] | None, lowest: int,
        name: str,
    ) -> None:  # fmt: skip
        """Nothing is formed yet."""
        self.sheet, self.tables, self.totals = sheet, tables, totals
        self.lowest, self.name = lowest, name
        places = (sheet.vector, *(sheet.factors or ()))
        self.given = [place for place in places if place is not None]
        self.wanted = totals is not None and any(totals[p] is not None for p in self.given)
        self._tile = self._values = self._grads = None

    def of(self, tile: Tile) -> Tensor:
        """(heads|1, n, S) for a tile; rows of the batch share it."""
        if self._tile is None or not self._same(tile):
            self.finish()
            self._tile = tile
            self._values = self._form(tile)
        return self._values

    def _same(self, tile: Tile) -> bool:
        heads = self.sheet.heads == 1 or tile.heads == self._tile.heads
        return heads and tile.start == self._tile.start

    def _heads(self) -> slice:
        return slice(None) if self.sheet.heads == 1 else slice(*self._tile.heads)

    def _window(self) -> slice:
        """The tile's distances."""
        tile = self._tile
        first = 1 - tile.slot - tile.rows - self.lowest
        return slice(first, first + tile.keys + tile.rows - 1)

    def _factors(self, of: list[Tensor | None]) -> list[Tensor | None]:
        """The tile's factors, or gradients of them."""
        query, key = (of[place] for place in self.sheet.factors)
        heads, tile = self._heads(), self._tile
        return [
            None if query is None else query[heads, tile.start : tile.stop],
            None if key is None else key[heads, : tile.keys],
        ]

    def _storage(self, tile: Tile, name: str) -> Tensor:
        heads = 1 if self.sheet.heads == 1 else tile.heads[1] - tile.heads[0]
        span = tile.keys + tile.rows - 1
        return scratch(self.tables[self.given[0]], name, heads, tile.rows, span)

    def _form(self, tile: Tile) -> Tensor:
        cells = self._storage(tile, self.name)
        if self.sheet.vector is None:
            cells.zero_()
        else:
            cells.copy_(self.tables[self.sheet.vector][self._heads(), None, self._window()])
        values = sheared(cells, tile.keys)
        if self.sheet.factors is not None:
            query, key = self._factors(self.tables)
            values.baddbmm_(query, key.transpose(1, 2))
        return values

    def add_gradient(self, tile: Tile, grad: Tensor) -> None:
        """Add that of a tile's logits (N, n, S)."""
        if not self.wanted:
            return
        if self._grads is None:
            self._grads = self._storage(tile, self.name + "'s gradient").zero_()
        total = sheared(self._grads, tile.keys)
        parts = grad[:, None] if self.sheet.heads == 1 else tile.apart(grad)  # (batch, heads, ...)
        if parts[0].numel() < SMALL:
            total += parts.sum(0)
            return
        for part in parts:
            total += part

    def finish(self) -> None:
        """Take the gradient to the tables, when no further tile shares the matrix."""
        if self._grads is None:
            return
        grads, self._grads = self._grads, None
        vector = None if self.sheet.vector is None else self.totals[self.sheet.vector]
        if vector is not None:
            vector[self._heads(), self._window()] += grads.sum(1)
        if self.sheet.factors is not None:
            query, key = self._factors(self.tables)
            of_query, of_key = self._factors(self.totals)
            grads = sheared(grads, self._tile.keys)
            if of_query is not None:
                of_query += torch.bmm(grads, key)
            if of_key is not None:
                of_key += torch.bmm(grads.transpose(1, 2), query)
