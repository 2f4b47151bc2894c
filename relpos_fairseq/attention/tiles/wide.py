"""Vectors over all distances of a tile: unclipped tables, Transformer-XL.

Row t of a matrix over distances holds in column m what belongs to the distance m + lowest; read
along its diagonals (`sheared`) it is a matrix over keys.  Keys meet their vectors in chunks, each
with the distances from itself to the tile's rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from relpos_fairseq.attention.tiles.geometry import Tile

CHUNK = 128  # keys that meet their vectors at once


def sheared(distances: Tensor, keys: int) -> Tensor:
    """View (N, n, S) of (N, n, S + n - 1): row t's column m is key m + t - (n - 1)."""
    count, rows, span = distances.shape
    return distances.as_strided(
        (count, rows, keys),
        (distances.stride(0), span - 1 if rows > 1 else span, 1),
        distances.storage_offset() + rows - 1,
    )


def unsheared(matrix: Tensor) -> Tensor:
    """(N, n, S) as (N, n, S + n - 1) over distances; the cells that no key has are 0."""
    count, rows, keys = matrix.shape
    distances = matrix.new_zeros(count, rows, keys + rows - 1)
    sheared(distances, keys).copy_(matrix)
    return distances


def window(table: Tensor, tile: Tile, lowest: int, keys: slice | None = None) -> Tensor:
    """The rows of a table over the distances from a tile's queries to some keys.

    Args:
        table: (1|N, L, D) over the distances lowest, lowest + 1, ...
        tile: the tile.
        lowest: the call's most negative distance.
        keys: which keys; all that the tile sees if None.

    Returns:
        (1|N, S + n - 1, D) view.
    """
    keys = keys or slice(0, tile.keys)
    first = keys.start - (tile.slot + tile.rows - 1) - lowest
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


def falling(table: Tensor) -> Tensor:
    """The window of a table with its distances in falling order."""
    return torch.flip(table, (1,))
