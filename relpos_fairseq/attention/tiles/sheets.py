"""Scalars over distances, and products of factors: one matrix for all rows of the batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from relpos_fairseq.attention.tiles.geometry import Tile, scratch
from relpos_fairseq.attention.tiles.plan import Sheet
from relpos_fairseq.attention.tiles.wide import sheared

if TYPE_CHECKING:
    from relpos_fairseq.attention.tiles.forward import Forward

SMALL = 1 << 16  # elements of a matrix; larger ones are added one by one


class Matrix:
    """A sheet, formed for the tiles that share it, and its gradient.

    A vector over distances becomes a matrix by reading it from another place in every row: where
    rows fall, the place moves on by 1 and the matrix is a view; where they rise, a copy of the
    vector for every row is read along diagonals (`sheared`).  The adjoint sums diagonals.

    Args:
        sheet: which.
        run: the pass.
        name: of its storage.
    """

    def __init__(self, sheet: Sheet, run: Forward, name: str) -> None:
        """Nothing is formed yet."""
        self.sheet, self.run, self.name = sheet, run, name
        self.tables, self.totals = run.tables, run.totals
        places = [p for p in (sheet.vector, *(sheet.factors or ())) if p is not None]
        self.wanted = self.totals is not None and any(self.totals[p] is not None for p in places)
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

    def _vector(self, of: list[Tensor | None]) -> Tensor | None:
        """(heads|1, S + n - 1): the numbers of the tile's distances, or their gradient."""
        if self.sheet.vector is None or of[self.sheet.vector] is None:
            return None
        tile = self._tile
        first = 1 - tile.slot - tile.rows - self.run.inputs.positions.lowest_distance
        return of[self.sheet.vector][self._heads(), first : first + tile.keys + tile.rows - 1]

    def _factors(self, of: list[Tensor | None]) -> list[Tensor | None]:
        """The tile's factors, or their gradients."""
        query, key = (of[place] for place in self.sheet.factors)
        heads, tile = self._heads(), self._tile
        return [
            None if query is None else query[heads, tile.start : tile.stop],
            None if key is None else key[heads, : tile.keys],
        ]

    def _storage(self, name: str, columns: int) -> Tensor:
        tile = self._tile
        heads = 1 if self.sheet.heads == 1 else tile.heads[1] - tile.heads[0]
        return scratch(self.run.q, f"{self.name} {name}", heads, tile.rows, columns)

    def _cells(self, name: str) -> tuple[Tensor, Tensor]:
        """Storage (heads, n, S + n - 1) over distances, and the matrix (heads, n, S) in it."""
        tile = self._tile
        cells = self._storage(name, tile.keys + tile.rows - 1)
        if not self.run.plan.falling:
            return cells, sheared(cells, tile.keys)
        span = cells.size(2)
        shape, strides = (cells.size(0), tile.rows, tile.keys), (tile.rows * span, span + 1, 1)
        return cells, cells.as_strided(shape, strides)

    def _form(self, tile: Tile) -> Tensor:
        vector, values = self._vector(self.tables), None
        if vector is not None and self.run.plan.falling:
            shape, strides = (vector.size(0), tile.rows, tile.keys), (vector.stride(0), 1, 1)
            values = vector.as_strided(shape, strides, vector.storage_offset())
        elif vector is not None:
            cells, values = self._cells("values")
            cells.copy_(vector[:, None])
        if self.sheet.factors is None:
            return values
        query, key = self._factors(self.tables)
        found = self._storage("product", tile.keys)
        torch.bmm(self.run.turned(query), key.transpose(1, 2), out=found)
        return found if values is None else found.add_(values)

    def add_gradient(self, tile: Tile, grad: Tensor) -> None:
        """Add that of a tile's logits (N, n, S)."""
        if not self.wanted:
            return
        if self._grads is None:
            if self.sheet.factors is None:
                self._of_vector, self._grads = self._cells("gradients")
                self._of_vector.zero_()
            else:
                self._grads = self._storage("gradients", tile.keys).zero_()
        parts = grad[:, None] if self.sheet.heads == 1 else tile.apart(grad)  # (batch, heads, ...)
        if parts[0].numel() < SMALL:
            self._grads += parts.sum(0)
            return
        for part in parts:
            self._grads += part

    def finish(self) -> None:
        """Take the gradient to the tables, when no further tile shares the matrix."""
        if self._grads is None:
            return
        grads, self._grads = self._grads, None
        of_vector = self._vector(self.totals)
        if of_vector is not None and self.sheet.factors is not None:
            self._of_vector, matrix = self._cells("diagonals")
            self._of_vector.zero_()
            matrix.copy_(grads)
        if of_vector is not None:
            of_vector += self._of_vector.sum(1)
        if self.sheet.factors is not None:
            query, key = self._factors(self.tables)
            of_query, of_key = self._factors(self.totals)
            if of_query is not None:
                of_query += self.run.turned(torch.bmm(grads, key))
            if of_key is not None:
                of_key += torch.bmm(grads.transpose(1, 2), self.run.turned(query))
