"""Vectors over clipped distances: a band of diagonals, and one constant tail at either end.

Softmax does not see what is added to a whole row, so the left tail's vector is subtracted from
every vector of a table: then only the band and the right tail are left to add (for k.b the left
tail folds into the query instead).  In a strip of STRIP rows the right tail is added as one slice
of columns; between the band and that slice the band's last vector is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.attention.tiles.geometry import STRIP, Buffer, Tile
from relpos_fairseq.relations import DistanceRelation


@dataclass(frozen=True)
class Band:
    """The distances of a clipped table that differ from its left tail.

    Args:
        lowest: distance of the first column; smaller ones read the left tail.
        width: columns W, repetitions of the last vector included.
        right: distance from which on the right tail is read, or None: no query sees it.
    """

    lowest: int
    width: int
    right: int | None

    @classmethod
    def of(cls, relation: DistanceRelation, causal: bool, rows: int) -> Band:
        """The band of a relation in tiles of at most `rows` rows."""
        lowest = relation.lowest + 1
        if causal:
            return cls(lowest, max(1 - lowest, 1), None)
        repeated = min(rows, STRIP) - 1
        return cls(lowest, relation.highest - lowest + 1 + repeated, relation.highest)

    def normalised(self, table: Tensor, relation: DistanceRelation) -> Tensor:
        """(H|1, R, D) as the band's columns less the left tail: (H|1, W, D)."""
        ids = relation.window(self.lowest, self.lowest + self.width - 1, table.device)
        return table.index_select(1, ids) - self.left(table, relation)

    def left(self, table: Tensor, relation: DistanceRelation) -> Tensor:
        """(H|1, 1, D): the left tail's vector."""
        ids = relation.window(self.lowest - 1, self.lowest - 1, table.device)
        return table.index_select(1, ids)

    def strips(self, tile: Tile) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of the tile that the right tail is added to as slices."""
        if self.right is None:
            return
        for top in range(0, tile.rows, STRIP):
            bottom = min(top + STRIP, tile.rows)
            edge = tile.slot + bottom + self.right
            if edge < tile.keys:
                yield slice(top, bottom), slice(max(edge, 0), tile.keys)

    def mask(self, tile: Tile, device: torch.device) -> Tensor:
        """(n, W) True where a cell is no key of its row, or belongs to the strip's slice."""
        row = torch.arange(tile.rows, device=device)[:, None]
        key = tile.slot + row + self.lowest + torch.arange(self.width, device=device)
        outside = (key < 0) | (key >= tile.keys)
        if self.right is not None:
            bottom = (row // STRIP * STRIP + STRIP).clamp(max=tile.rows)
            outside |= key >= tile.slot + bottom + self.right
        return outside

    def add(
        self, buffer: Buffer, tile: Tile, columns: Tensor, mask: Tensor, last: Tensor | None
    ) -> None:
        """Add to what the buffer holds.

        Args:
            buffer: logits, or gradients of them.
            tile: which tile.
            columns: (N, n, W) of the band; overwritten where the mask is True.
            mask: the band's.
            last: (N, n, 1) what each row adds in its right tail, or None.
        """
        columns.masked_fill_(mask, 0.0)
        buffer.diagonals(tile, self.lowest, self.width).add_(columns)
        if last is not None:
            logits = buffer.of(tile)
            for rows, keys in self.strips(tile):
                logits[:, rows, keys] += last[:, rows]

    def take(self, buffer: Buffer, tile: Tile, mask: Tensor) -> Tensor:
        """The adjoint of `add`: (N, n, W) new."""
        columns = self.take_band(buffer, tile, mask)
        self.take_right(buffer, tile, columns)
        return columns

    def take_band(self, buffer: Buffer, tile: Tile, mask: Tensor) -> Tensor:
        """The band's cells alone: (N, n, W) new."""
        return buffer.diagonals(tile, self.lowest, self.width).masked_fill(mask, 0.0)

    def take_right(self, buffer: Buffer, tile: Tile, columns: Tensor) -> None:
        """Add the sums of each row's right tail to the last column."""
        logits = buffer.of(tile)
        for rows, keys in self.strips(tile):
            columns[:, rows, -1] += logits[:, rows, keys].sum(-1)


class KeyProducts:
    """k.b for every key and column of a band: (N, S, W) with guard rows, read along diagonals.

    Row t of a tile meets in column c the key slot + t + lowest + c.
    """

    def __init__(self, band: Band, keys: int, count: int, like: Tensor) -> None:
        """Allocate zeros for `count` matrices."""
        self.band, self.keys = band, keys
        self.guard = max(0, -band.lowest)
        self.cells = like.new_zeros(count, self.guard + keys + band.width, band.width)

    @property
    def inner(self) -> Tensor:
        """(N, S, W): the rows of real keys."""
        return self.cells[:, self.guard : self.guard + self.keys]

    def diagonals(self, tile: Tile) -> Tensor:
        """View (count, n, W) for a tile's band."""
        part, width = self.cells[tile.matrices], self.band.width
        first = part.storage_offset() + (self.guard + tile.slot + self.band.lowest) * width
        shape = (tile.count, tile.rows, width)
        return part.as_strided(shape, (part.stride(0), width, width + 1), first)

    def add_right(self, buffer: Buffer, tile: Tile) -> None:
        """Add the right tail, one number a key, to the logits."""
        logits, last = buffer.of(tile), self.inner[tile.matrices, :, -1]
        for rows, keys in self.band.strips(tile):
            logits[:, rows, keys] += last[:, None, keys]

    def take_right(self, buffer: Buffer, tile: Tile) -> None:
        """The adjoint of `add_right`, from a buffer of gradients."""
        logits, last = buffer.of(tile), self.inner[tile.matrices, :, -1]
        for rows, keys in self.band.strips(tile):
            last[:, keys] += logits[:, rows, keys].sum(1)
