"""Vectors over clipped distances: a band of diagonals, and one constant tail at either end.

Softmax does not see what is added to a whole row, so the left tail's vector is subtracted from
every vector of a table: then only the band and the right tail are left to add (for k.b the left
tail folds into the query instead).  In a strip of STRIP rows the right tail is a triangle, added
under a mask of 0 and 1, and the columns right of it, added as one slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.attention.tiles.geometry import Tile, scratch
from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import DistanceRelation

STRIP = 256


@dataclass(frozen=True)
class Band:
    """The distances of a clipped table that differ from its left tail.

    Args:
        lowest: distance of the first column; smaller ones read the left tail.
        width: columns W.
        right: whether queries see keys beyond the last column, which read its vector.
    """

    lowest: int
    width: int
    right: bool

    @classmethod
    def of(cls, relation: DistanceRelation, causal: bool) -> Band:
        """The band of a relation."""
        lowest = relation.lowest + 1
        last = min(relation.highest, 0) if causal else relation.highest
        return cls(lowest, max(last - lowest + 1, 1), not causal)

    @property
    def highest(self) -> int:
        """Distance of the last column."""
        return self.lowest + self.width - 1

    def normalised(self, table: Tensor, relation: DistanceRelation) -> Tensor:
        """(H|1, R, D) as the band's columns less the left tail: (H|1, W, D)."""
        ids = relation.window(self.lowest, self.highest, table.device)
        return table.index_select(1, ids) - self.left(table, relation)

    def left(self, table: Tensor, relation: DistanceRelation) -> Tensor:
        """(H|1, 1, D): the left tail's vector."""
        ids = relation.window(self.lowest - 1, self.lowest - 1, table.device)
        return table.index_select(1, ids)

    def columns(self, tile: Tile) -> slice:
        """The columns whose distances occur in a tile."""
        first = max(1 - tile.slot - tile.rows - self.lowest, 0)
        return slice(first, max(min(tile.keys - tile.slot - self.lowest, self.width), first))

    def tails(self, tile: Tile) -> Iterator[tuple[slice, slice, slice]]:
        """Rows of a strip, the keys of their triangle, and those right of it."""
        if not self.right:
            return
        for top in range(0, tile.rows, STRIP):
            bottom = min(top + STRIP, tile.rows)
            first = tile.slot + top + self.highest + 1
            if first < tile.keys:
                beyond = min(first + bottom - top, tile.keys)
                yield slice(top, bottom), slice(first, beyond), slice(beyond, tile.keys)


class Columns:
    """What the rows of a call have to do with a band's distances: (N, T, W).

    Args:
        band: the band.
        cells: (N, T, W); once `clear`ed, those that no key has are 0.
        positions: of the call.
    """

    def __init__(self, band: Band, cells: Tensor, positions: Positions) -> None:
        """Keep the cells."""
        self.band, self.cells, self.positions = band, cells, positions

    def clear(self) -> None:
        """Set the cells that no key has to 0."""
        band, positions = self.band, self.positions
        column = torch.arange(band.width, device=self.cells.device) + band.lowest
        start, keys, rows = positions.query_start, positions.src_len, positions.tgt_len
        above = min(max(-start - band.lowest, 0), rows)
        below = min(max(keys - start - band.highest, 0), rows)
        for top, bottom in ((0, above), (max(above, below), rows)):
            row = torch.arange(top, bottom, device=self.cells.device)[:, None] + start
            absent = (row + column < 0) | (row + column >= keys)
            self.cells[:, top:bottom].masked_fill_(absent, 0.0)


class KeyProducts:
    """k.b for every key and column of a band: (N, S, W) with guard rows, read along diagonals.

    Row t of a tile meets in column c the key slot + t + lowest + c.  The last column, which the
    right tail reads, has storage of its own.

    Args:
        band: the band.
        k: (N, S, D) the keys.
        name: of the storage.
    """

    def __init__(self, band: Band, k: Tensor, name: str) -> None:
        """Zeros."""
        count, self.keys = k.shape[:2]
        self.band, self.guard = band, max(0, -band.lowest)
        rows = self.guard + self.keys + band.width
        self.cells = scratch(k, name, count, rows, band.width).zero_()
        self.lasts = k.new_zeros(count, 1, self.keys)

    @property
    def inner(self) -> Tensor:
        """(N, S, W): the rows of real keys."""
        return self.cells[:, self.guard : self.guard + self.keys]

    def set(self, k: Tensor, table: Tensor, scale: float) -> None:
        """Meet keys with a table (1|N, W, D)."""
        self.inner.baddbmm_(k, table.transpose(1, 2).expand(k.size(0), -1, -1), alpha=scale)
        self.lasts[:, 0] = self.inner[:, :, -1]

    def taken(self) -> Tensor:
        """(N, S, W) gradients, those of the last column's own storage added."""
        self.inner[:, :, -1] += self.lasts[:, 0]
        return self.inner

    def last(self, tile: Tile) -> Tensor:
        """(count, 1, S): the last column."""
        return self.lasts[tile.matrices]

    def diagonals(self, tile: Tile) -> Tensor:
        """View (count, n, W) for a tile's band."""
        part, width = self.cells[tile.matrices], self.band.width
        first = part.storage_offset() + (self.guard + tile.slot + self.band.lowest) * width
        shape = (tile.count, tile.rows, width)
        return part.as_strided(shape, (part.stride(0), width, width + 1), first)
