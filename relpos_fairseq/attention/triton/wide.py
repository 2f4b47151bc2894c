"""Vectors over many distances: unclipped tables and Transformer-XL, in O(length) memory.

A square tile of X queries and X keys has 2 X - 1 distances.  The products of its queries (or keys)
with those vectors are two blocks (X, X), of the lower and the upper distances.  A cell of the tile
takes its number from their diagonals.  Column p of the lower block and of the upper one are never
needed in the same row, so that one block holds both, whose rows are then rotated: one gather inside
the tile, and its inverse for gradients.  The gradient of a vector is a sum over one diagonal of
tiles: a kernel of its own (`backward_vectors`) forms it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.tile import block_of, product


@triton.jit
def wide_edge(X: tl.constexpr, OF_KEYS: tl.constexpr, BY_ROW: tl.constexpr):
    """Which cells of (x, distance) products are the lower distances', whose vectors come first."""
    own = tl.arange(0, X)
    edge = own
    if not OF_KEYS:
        edge = X - 1 - own
    if BY_ROW:
        cells = own[None, :] >= edge[:, None]
    else:
        cells = own[:, None] >= edge[None, :]
    return cells


@triton.jit
def wide_vectors(table_ptr, rows, keys, sizes, F: tl.constexpr):
    """Load a tile's lower and upper X distances of a (width, D) table: (X, DP) each."""
    X: tl.constexpr = F.KEYS
    # row of the table for the tile's lowest distance
    lowest = keys.first - rows.first - sizes.start - (X - 1) - sizes.wide_low
    first = lowest + tl.arange(0, X)
    second, width = first + X, sizes.wide_width
    lower = block_of(table_ptr, first, F.D, (first >= 0) & (first < width), F.D, F.DP)
    upper = block_of(table_ptr, second, F.D, (second >= 0) & (second < width), F.D, F.DP)
    return lower, upper


@triton.jit
def wide_values(table_ptr, rows, keys, sizes, OF_KEYS: tl.constexpr, BY_KEY: tl.constexpr, F: tl.constexpr):
    """Products of a tile's queries or keys (X, DP) with the vectors of its cells' distances."""
    X: tl.constexpr = F.KEYS
    own = tl.arange(0, X)
    lower, upper = wide_vectors(table_ptr, rows, keys, sizes, F)
    if OF_KEYS:
        x = keys.wide
    else:
        x = rows.wide
    place = own[None, :] - own[:, None]
    if BY_KEY:
        place = own[:, None] - own[None, :]
    place = (place + X - 1) % X
    in_low = wide_edge(X, OF_KEYS, OF_KEYS == BY_KEY)
    if OF_KEYS == BY_KEY:
        one = product(x, tl.trans(lower), F.PRECISION)
        other = product(x, tl.trans(upper), F.PRECISION)
        values = tl.gather(tl.where(in_low, one, other), place, 1)
    else:
        one = product(lower, tl.trans(x), F.PRECISION)
        other = product(upper, tl.trans(x), F.PRECISION)
        values = tl.gather(tl.where(in_low, one, other), place, 0)
    return values


@triton.jit
def wide_block(rows, keys, given, sizes, BY_KEY: tl.constexpr, F: tl.constexpr):
    """What vectors over many distances add to a tile: q.a + k.b."""
    values = tl.zeros((F.KEYS, F.KEYS), F.ACC)
    if F.WIDE_Q:
        values += wide_values(given.query_vectors, rows, keys, sizes, False, BY_KEY, F)
    if F.WIDE_K:
        values += wide_values(given.key_vectors, rows, keys, sizes, True, BY_KEY, F)
    return values


@triton.jit
def wide_back(part, table_ptr, rows, keys, sizes, OF_KEYS: tl.constexpr, F: tl.constexpr):
    """The gradient of queries or keys, whose rows are the tile's: (X, DP)."""
    X: tl.constexpr = F.KEYS
    own = tl.arange(0, X)
    lower, upper = wide_vectors(table_ptr, rows, keys, sizes, F)
    place = own[None, :] + own[:, None] + 1
    if OF_KEYS:
        place = own[:, None] - own[None, :] + X - 1
    turned = tl.gather(part, place % X, 1)
    in_low = wide_edge(X, OF_KEYS, True)
    back = product(tl.where(in_low, turned, 0.0).to(lower.dtype), lower, F.PRECISION)
    back += product(tl.where(in_low, 0.0, turned).to(lower.dtype), upper, F.PRECISION)
    return back
