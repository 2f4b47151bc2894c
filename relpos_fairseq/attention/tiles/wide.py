"""Vectors over all distances of a tile: unclipped tables, Transformer-XL.

Row t of a matrix over distances holds in column m what belongs to the distance m + lowest; read
along its diagonals (`sheared`) it is a matrix over keys.  Keys meet their vectors in chunks, each
with the distances from itself to the tile's rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from relpos_fairseq.attention.tiles.geometry import Tile, scratch
from relpos_fairseq.attention.tiles.plan import Vectors

if TYPE_CHECKING:
    from relpos_fairseq.attention.tiles.forward import Forward

CHUNK = 64  # keys that meet their vectors at once


def sheared(distances: Tensor, keys: int) -> Tensor:
    """View (N, n, S) of (N, n, S + n - 1): row t's column m is key m + t - (n - 1)."""
    count, rows, span = distances.shape
    return distances.as_strided(
        (count, rows, keys),
        (distances.stride(0), span - 1 if rows > 1 else span, 1),
        distances.storage_offset() + rows - 1,
    )


def unsheared(matrix: Tensor) -> Tensor:
    """(N, n, S) over distances (N, n, S + n - 1), in kept storage; cells of no key are 0."""
    count, rows, keys = matrix.shape
    span = keys + rows - 1
    distances = scratch(matrix, "distances", count, rows, span)
    distances[:, 0, : rows - 1] = 0
    distances[:, -1, keys:] = 0
    if rows > 2:  # between the keys of a row and those of the next
        gaps, strides = (count, rows - 1, rows - 2), (rows * span, span - 1, 1)
        distances.as_strided(gaps, strides, distances.storage_offset() + span).zero_()
    sheared(distances, keys).copy_(matrix)
    return distances


def meet(x: Tensor, table: Tensor) -> Tensor:
    """X (N, n, D) by vectors (1|N, W, D): (N, n, W) in kept storage."""
    out = scratch(x, "distances", *x.shape[:2], table.size(1))
    if table.size(0) > 1:
        return torch.bmm(x, table.transpose(1, 2), out=out)
    torch.mm(x.reshape(-1, x.size(2)), table[0].t(), out=out.view(-1, table.size(1)))
    return out


def meet_back(distances: Tensor, table: Tensor) -> Tensor:
    """The gradient (N, n, D) of `meet` by x."""
    if table.size(0) > 1:
        return torch.bmm(distances, table)
    return (distances.view(-1, distances.size(2)) @ table[0]).view(*distances.shape[:2], -1)


def window(table: Tensor, tile: Tile, lowest: int) -> Tensor:
    """(1|N, S + n - 1, D): the rows of a table over the distances of a tile.

    Args:
        table: (1|N, L, D) over the distances lowest, lowest + 1, ...
        tile: the tile.
        lowest: the call's most negative distance.
    """
    first = -(tile.slot + tile.rows - 1) - lowest
    return table[:, first : first + tile.keys + tile.rows - 1]


def falling_window(table: Tensor, tile: Tile, highest: int, keys: slice) -> Tensor:
    """The same for some keys, of a table over the distances highest, highest - 1, ..."""
    first = highest - (keys.stop - 1 - tile.slot)
    return table[:, first : first + keys.stop - keys.start + tile.rows - 1]


def chunks(tile: Tile) -> Iterator[slice]:
    """The keys of a tile in chunks."""
    for start in range(0, tile.keys, CHUNK):
        yield slice(start, min(start + CHUNK, tile.keys))


def of_keys(products: Tensor, rows: int) -> Tensor:
    """(N, w, n + w - 1) of keys over falling distances as a view (N, n, w) over rows and keys."""
    return sheared(products, rows).transpose(1, 2)


def to_keys(matrix: Tensor) -> Tensor:
    """The adjoint of `of_keys`."""
    return unsheared(matrix.transpose(1, 2))


class WideVectors:
    """One term's vectors over all distances, in one pass over all tiles.

    Args:
        run: the pass.
        part: which vectors.
        number: of the term.
    """

    def __init__(self, run: Forward, part: Vectors, number: int) -> None:
        """Each tile meets its vectors."""
        self.run, self.part = run, part
        positions = run.inputs.positions
        self.lowest, self.highest = positions.lowest_distance, positions.highest_distance
        if part.key is not None:  # keys meet their vectors in falling order of distance
            self.falling = run.tables[part.key].flip(1) * run.scale
            if run.totals is not None and run.totals[part.key] is not None:
                self.falling_total = torch.zeros_like(self.falling)

    def _table(self, tile: Tile, place: int) -> Tensor:
        """(1|N, S + n - 1, D): a table's vectors over the distances of a tile."""
        return window(tile.of_heads(self.run.tables[place]), tile, self.lowest)

    def _queries(self, tile: Tile) -> Tensor:
        """(N, n, D) queries that meet the vectors, scaled."""
        q = self.run.q[tile.query]
        if self.part.offset is not None:
            q = q + tile.of_heads(self.run.tables[self.part.offset])[:, None]
        return q * self.run.scale

    def add(self, tile: Tile) -> None:
        """Add to a tile's logits."""
        logits, part = self.run.buffer.of(tile), self.part
        if part.query is not None:
            distances = meet(self._queries(tile), self._table(tile, part.query))
            logits.add_(sheared(distances, tile.keys))
        if part.key is None:
            return
        table = tile.of_heads(self.falling)
        for keys in chunks(tile):
            vectors = falling_window(table, tile, self.highest, keys)
            distances = meet(self.run.k[tile.matrices, keys], vectors)
            logits[:, :, keys] += of_keys(distances, tile.rows)

    def take_values(self, tile: Tile, out: Tensor) -> None:
        """Add what a tile's probabilities give the values' vectors to its output (N, n, Dv)."""
        if self.part.value is not None:
            distances = unsheared(self.run.buffer.of(tile))
            out += meet_back(distances, self._table(tile, self.part.value))

    def finish_values(self, out: Tensor) -> None:
        """Every tile has added its own."""

    def kept(self) -> list[Tensor]:
        """Nothing is kept for the backward pass."""
        return []

    def start_back(self, grad: Tensor, taken: Iterator[Tensor]) -> None:
        """Every tile meets its own."""

    def add_values(self, tile: Tile, upstream: Tensor) -> None:
        """Add to the gradient of a tile's probabilities."""
        if self.part.value is not None:
            found = meet(upstream, self._table(tile, self.part.value))
            self.run.grads.of(tile).add_(sheared(found, tile.keys))

    def back_to_values(self, tile: Tile, probs: Tensor, upstream: Tensor) -> None:
        """From a tile's output to the values' vectors."""
        if self.part.value is not None:
            self._add_window(self.part.value, unsheared(probs), upstream, tile)

    def back(self, tile: Tile) -> None:
        """Take the gradient of a tile's logits to queries, keys and vectors."""
        run, part, logits = self.run, self.part, self.run.grads.of(tile)
        if part.query is not None:
            columns = unsheared(logits)
            found = meet_back(columns, self._table(tile, part.query)).mul_(run.scale)
            run.dq[tile.query] += found
            if part.offset is not None:
                run.add_to_offset(part.offset, found, tile)
            self._add_window(part.query, columns, self._queries(tile), tile)
        if part.key is None:
            return
        table = tile.of_heads(self.falling)
        for keys in chunks(tile):
            columns, k = to_keys(logits[:, :, keys]), run.k[tile.matrices, keys]
            vectors = falling_window(table, tile, self.highest, keys)
            run.dk[tile.matrices, keys] += meet_back(columns, vectors)
            if run.totals[part.key] is not None:
                total = falling_window(self.falling_total, tile, self.highest, keys)
                _add_products(total, columns, k, tile)

    def _add_window(self, place: int, distances: Tensor, x: Tensor, tile: Tile) -> None:
        """Add to the gradient of a table over all distances what a tile's give it."""
        if self.run.totals[place] is not None:
            total = window(self.run.totals[place], tile, self.lowest)
            _add_products(total, distances, x, tile)

    def finish_back(self) -> None:
        """Vectors in falling order back to their table."""
        place = self.part.key
        if place is not None and self.run.totals[place] is not None:
            self.run.totals[place].add_(self.falling_total.flip(1), alpha=self.run.scale)


def _add_products(total: Tensor, distances: Tensor, x: Tensor, tile: Tile) -> None:
    """Add to total (H|1, W, D) the gradient of `meet` by its vectors."""
    if total.size(0) == 1:
        pairs = [(distances.view(1, -1, distances.size(2)), x.reshape(1, -1, x.size(2)))]
    else:
        total = total[slice(*tile.heads)]
        pairs = zip(tile.apart(distances), tile.apart(x), strict=True)
    for one, other in pairs:
        total.baddbmm_(one.transpose(1, 2), other)
