"""One term's vectors over clipped distances, in one pass over all tiles.

Queries and keys meet the vectors once for all tiles, and what tiles give back in a band's columns
is taken to queries, keys and vectors once in the end: a tile only adds columns, or takes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from relpos_fairseq.attention.tiles.bands import STRIP, Columns, KeyProducts
from relpos_fairseq.attention.tiles.geometry import (
    Buffer,
    Tile,
    add_products,
    products,
    products_back,
    scratch,
)
from relpos_fairseq.attention.tiles.plan import Vectors

if TYPE_CHECKING:
    from relpos_fairseq.attention.tiles.forward import Forward


class BandVectors:
    """The vectors of a pass.

    Args:
        run: the pass.
        part: which vectors.
        number: of the term, for the names of storage.
    """

    def __init__(self, run: Forward, part: Vectors, number: int) -> None:
        """Meet queries and keys with their vectors."""
        self.run, self.part, self.number, self.band = run, part, number, part.band
        self.queries = self.keys = self.values = self.mass = None
        rows = min(STRIP, run.inputs.positions.tgt_len)
        self.triangle = run.q.new_ones(rows, rows).triu_()
        if part.query is not None:
            self.queries = self._columns("queries")
            table = self._table(part.query).transpose(1, 2)
            add_products(self.queries.cells, self._projected(), table, run.scale, beta=0)
            self.queries.clear()
        if part.key is not None:
            self.keys = self._key_products("keys")
            self.keys.set(run.k, self._table(part.key), run.scale)
        if part.value is not None:
            self.values = self._columns(None)
            # Without dropout and padding the probabilities of every row sum to 1.
            if run.seed is not None or run.inputs.key_padding is not None:
                self.mass = run.q.new_zeros(*run.q.shape[:2], 1)

    def _projected(self) -> Tensor:
        """(N, T, D) queries that meet the vectors."""
        if self.part.offset is None:
            return self.run.q
        return self.run.q + self._table(self.part.offset)[:, None]

    def _columns(self, name: str | None) -> Columns:
        """Columns with any cells, in kept storage if it has a name."""
        run = self.run
        shape = (*run.q.shape[:2], self.band.width)
        if name is None:
            cells = run.q.new_empty(shape)
        else:
            cells = scratch(run.q, f"{name} {self.number}", *shape)
        return Columns(self.band, cells, run.inputs.positions)

    def _key_products(self, name: str) -> KeyProducts:
        return KeyProducts(self.band, self.run.k, f"{name} {self.number}")

    def _table(self, place: int) -> Tensor:
        """(1|N, W, D)."""
        return self.run.everything.of_heads(self.run.tables[place])

    # --- between a tile and columns ----------------------------------------------------------

    def _add(
        self, buffer: Buffer, tile: Tile, rows: Columns | None, keys: KeyProducts | None
    ) -> None:
        """Add columns of rows, of keys or of both to what a buffer holds of a tile."""
        columns = self.band.columns(tile)
        given = [] if rows is None else [rows.cells[tile.query][:, :, columns]]
        lasts = [] if rows is None else [rows.cells[tile.query][:, :, -1:]]
        if keys is not None:
            given.append(keys.diagonals(tile)[:, :, columns])
            lasts.append(keys.last(tile))
        diagonals = buffer.diagonals(tile, self.band, columns)
        if len(given) == 2:
            both = scratch(diagonals, "columns", *diagonals.shape)
            given = [torch.add(*given, out=both)]
        diagonals.add_(given[0])
        logits = buffer.of(tile)
        for strip, corner, beyond in self.band.tails(tile):
            for last in lasts:
                of_rows = last.size(2) == 1
                near = last[:, strip] if of_rows else last[:, :, corner]
                logits[:, strip, corner].addcmul_(near, self._triangle(strip, corner))
                if beyond.start < beyond.stop:
                    logits[:, strip, beyond] += near if of_rows else last[:, :, beyond]

    def _take(
        self, buffer: Buffer, tile: Tile, rows: Columns | None, keys: KeyProducts | None
    ) -> None:
        """The adjoint of `_add`."""
        columns, matrix = self.band.columns(tile), buffer.of(tile)
        diagonals = buffer.diagonals(tile, self.band, columns)
        if rows is not None:
            cells = rows.cells[tile.query]
            cells[:, :, columns] = diagonals
            cells[:, :, : columns.start] = 0.0
            cells[:, :, columns.stop :] = 0.0
        if keys is not None:
            keys.diagonals(tile)[:, :, columns].add_(diagonals)
        for strip, corner, beyond in self.band.tails(tile):
            near, far = matrix[:, strip, corner], matrix[:, strip, beyond]
            own = scratch(near, "triangle", *near.shape)
            near = torch.mul(near, self._triangle(strip, corner), out=own)
            for part, at in ((near, corner), (far, beyond)):
                if at.start == at.stop:
                    continue
                if rows is not None:
                    cells[:, strip, -1] += part.sum(-1)
                if keys is not None:
                    keys.last(tile)[:, 0, at] += part.sum(1)

    def _triangle(self, strip: slice, corner: slice) -> Tensor:
        return self.triangle[: strip.stop - strip.start, : corner.stop - corner.start]

    # --- forward ---------------------------------------------------------------------------------

    def add(self, tile: Tile) -> None:
        """Add to a tile's logits."""
        if self.queries is not None or self.keys is not None:
            self._add(self.run.buffer, tile, self.queries, self.keys)

    def take_values(self, tile: Tile, out: Tensor) -> None:
        """Take what a tile's probabilities give the values' vectors, and overwrite them."""
        if self.values is None:
            return
        buffer = self.run.buffer
        if self.mass is not None:
            self.mass[tile.query] = buffer.of(tile).sum(-1, keepdim=True)
        self._take(buffer, tile, self.values, None)

    def finish_values(self, out: Tensor) -> None:
        """Add the values' vectors to the output (N, T, Dv)."""
        if self.values is None:
            return
        self.values.clear()
        add_products(out, self.values.cells, self._table(self.part.value))
        left = self._table(self.part.value_left)
        out += left if self.mass is None else self.mass * left

    # --- backward --------------------------------------------------------------------------------

    def start_back(self, grad: Tensor, taken: Iterator[Tensor]) -> None:
        """Meet the output's gradient (N, T, Dv) with the values' vectors.

        Args:
            grad: the gradient.
            taken: what `kept` gave in the forward pass.
        """
        part, run = self.part, self.run
        self.query_grads = None if part.query is None else self._columns("query gradients")
        self.key_grads = None if part.key is None else self._key_products("key gradients")
        self.of_left = None
        if part.value is None:
            return
        cells, mass = next(taken), None if self.mass is None else next(taken)
        run.add_to_table(part.value, cells, grad)
        ones = grad.new_ones(*grad.shape[:2], 1) if mass is None else mass
        run.add_to_table(part.value_left, ones, grad)
        table = self._table(part.value).transpose(1, 2)
        add_products(self.values.cells, grad, table, beta=0)
        self.values.clear()
        if run.seed is not None:  # without dropout softmax does not see what a whole row gets
            self.of_left = products(grad, self._table(part.value_left))

    def add_values(self, tile: Tile, upstream: Tensor) -> None:
        """Add to the gradient of a tile's probabilities."""
        if self.part.value is None:
            return
        self._add(self.run.grads, tile, self.values, None)
        if self.of_left is not None:
            self.run.grads.of(tile).add_(self.of_left[tile.query])

    def back_to_values(self, tile: Tile, probs: Tensor, upstream: Tensor) -> None:
        """Their gradient is `start_back`'s."""

    def back(self, tile: Tile) -> None:
        """Take the gradient of a tile's logits."""
        if self.query_grads is not None or self.key_grads is not None:
            self._take(self.run.grads, tile, self.query_grads, self.key_grads)

    def finish_back(self) -> None:
        """To queries, keys and vectors."""
        part, run = self.part, self.run
        if self.query_grads is not None:
            self.query_grads.clear()
            columns = self.query_grads.cells.mul_(run.scale)
            add_products(run.dq, columns, self._table(part.query))
            run.add_to_table(part.query, columns, self._projected())
            if part.offset is not None:
                sums = columns.sum(1, keepdim=True)  # (N, 1, W)
                run.add_to_offset(part.offset, products_back(sums, self._table(part.query)))
        if self.key_grads is not None:
            columns = self.key_grads.taken() * run.scale
            add_products(run.dk, columns, self._table(part.key))
            run.add_to_table(part.key, columns, run.k)

    def kept(self) -> list[Tensor]:
        """What the backward pass is given of the forward pass."""
        if self.values is None:
            return []
        return [self.values.cells] if self.mass is None else [self.values.cells, self.mass]
