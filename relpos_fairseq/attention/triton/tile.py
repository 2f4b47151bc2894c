"""What the kernels do to a tile of logits.

A tile is (rows, keys) in the forward pass and where rows own gradients, (keys, rows) where keys do,
so that what stands left in a product is there without a transposition.
`ii` and `jj` are query and key numbers as a column and a row of a tile (or a row and a column),
`d` the distances of its cells.  PHASE says where a tile stands: 0, all its distances are at or
below the windows' lowest; 2, at or above their highest; 1, anywhere.  In phases 0 and 2 a table is
one number a query or key, and nothing is read per cell.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.refusal import interpreted

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def product(a, b, PRECISION: tl.constexpr):
    """A matrix product, summed in fp32 at least."""
    if INTERPRETED:  # its products of bf16 are those of the bits as integers
        if a.dtype == tl.bfloat16:
            a = a.to(tl.float32)
        if b.dtype == tl.bfloat16:
            b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def block_of(ptr, index, stride, channel, inside, D: tl.constexpr, PADDED: tl.constexpr):
    """Rows of (length, D), 0 where they or their channels end."""
    mask = inside[:, None]
    if PADDED:
        mask = mask & (channel < D)[None, :]
    return tl.load(ptr + index[:, None] * stride + channel[None, :], mask=mask, other=0.0)


@triton.jit
def store_block(ptr, values, index, stride, channel, inside, D: tl.constexpr, PADDED: tl.constexpr):
    """The converse of `block_of`."""
    mask = inside[:, None]
    if PADDED:
        mask = mask & (channel < D)[None, :]
    tl.store(ptr + index[:, None] * stride + channel[None, :], values, mask=mask)


@triton.jit
def over_distances(ptr, d, low, width, PHASE: tl.constexpr):
    """A vector over distances, read for every cell; a scalar in the tails."""
    if PHASE == 0:
        values = tl.load(ptr)
    elif PHASE == 2:
        values = tl.load(ptr + width - 1)
    else:
        values = tl.load(ptr + tl.minimum(tl.maximum(d - low, 0), width - 1))
    return values


@triton.jit
def table_of(ptr, index, stride, d, low, width, inside, PHASE: tl.constexpr):
    """A (length, width) table read by query or key and distance; by query or key in the tails."""
    if PHASE == 0:
        place = ptr + index * stride
    elif PHASE == 2:
        place = ptr + index * stride + (width - 1)
    else:
        place = ptr + index * stride + tl.minimum(tl.maximum(d - low, 0), width - 1)
    return tl.load(place, mask=inside, other=0.0)


@triton.jit
def meet(rows, keys, BY_KEY: tl.constexpr, PRECISION: tl.constexpr):
    """Products of queries' and keys' vectors."""
    if BY_KEY:
        values = product(keys, tl.trans(rows), PRECISION)
    else:
        values = product(rows, tl.trans(keys), PRECISION)
    return values


@triton.jit
def content_of(
    q, right, k, content_band_ptr, ii, jj, d, inside, there, low, width,
    PHASE: tl.constexpr, BY_KEY: tl.constexpr, REPLACED: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q.k, or a band's own products between tails that meet other queries."""
    if not REPLACED:
        values = meet(q, k, BY_KEY, PRECISION)
    elif PHASE == 0:
        values = meet(q, k, BY_KEY, PRECISION)
    elif PHASE == 2:
        values = meet(right, k, BY_KEY, PRECISION)
    else:
        inner = (d > low) & (d < low + width - 1) & inside & there
        values = tl.load(content_band_ptr + ii * width + (d - low), mask=inner, other=0.0)
        if LEFT:
            values = tl.where(d <= low, meet(q, k, BY_KEY, PRECISION), values)
        if RIGHT:
            values = tl.where(d >= low + width - 1, meet(right, k, BY_KEY, PRECISION), values)
    return values


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
def wide_vectors(table_ptr, at, width, D: tl.constexpr, DP: tl.constexpr, X: tl.constexpr):
    """Load a tile's lower and upper X distances of a (width, D) table: (X, DP) each.

    `at`: row of the table for the tile's lowest distance.
    """
    channel, own = tl.arange(0, DP), tl.arange(0, X)
    first, second = at + own, at + X + own
    lower = block_of(table_ptr, first, D, channel, (first >= 0) & (first < width), D, DP != D)
    upper = block_of(table_ptr, second, D, channel, (second >= 0) & (second < width), D, DP != D)
    return lower, upper


@triton.jit
def wide_values(
    x, table_ptr, at, width,
    D: tl.constexpr, DP: tl.constexpr, X: tl.constexpr, OF_KEYS: tl.constexpr,
    BY_KEY: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of a tile's queries or keys x (X, DP) with the vectors of its cells' distances.

    `at`: row of the (width, D) table of the tile's lowest distance.
    """
    own = tl.arange(0, X)
    lower, upper = wide_vectors(table_ptr, at, width, D, DP, X)
    place = own[None, :] - own[:, None]
    if BY_KEY:
        place = own[:, None] - own[None, :]
    place = (place + X - 1) % X
    in_low = wide_edge(X, OF_KEYS, OF_KEYS == BY_KEY)
    if OF_KEYS == BY_KEY:
        one, other = product(x, tl.trans(lower), PRECISION), product(x, tl.trans(upper), PRECISION)
        values = tl.gather(tl.where(in_low, one, other), place, 1)
    else:
        one, other = product(lower, tl.trans(x), PRECISION), product(upper, tl.trans(x), PRECISION)
        values = tl.gather(tl.where(in_low, one, other), place, 0)
    return values


@triton.jit
def wide_block(
    wide_q, wide_k, query_vectors_ptr, key_vectors_ptr, at, width,
    D: tl.constexpr, DP: tl.constexpr, X: tl.constexpr, BY_KEY: tl.constexpr,
    WIDE_Q: tl.constexpr, WIDE_K: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What vectors over many distances add to a tile: q.a + k.b."""
    values = tl.zeros((X, X), ACC)
    if WIDE_Q:
        values += wide_values(
            wide_q, query_vectors_ptr, at, width, D, DP, X, False, BY_KEY, PRECISION
        )
    if WIDE_K:
        values += wide_values(wide_k, key_vectors_ptr, at, width, D, DP, X, True, BY_KEY, PRECISION)
    return values


@triton.jit
def wide_back(
    part, table_ptr, at, width, like,
    D: tl.constexpr, DP: tl.constexpr, X: tl.constexpr, OF_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of x, whose rows are the tile's: (X, DP)."""
    own = tl.arange(0, X)
    lower, upper = wide_vectors(table_ptr, at, width, D, DP, X)
    place = own[None, :] + own[:, None] + 1
    if OF_KEYS:
        place = own[:, None] - own[None, :] + X - 1
    turned = tl.gather(part, place % X, 1)
    in_low = wide_edge(X, OF_KEYS, True)
    back = product(tl.where(in_low, turned, 0.0).to(like.dtype), lower, PRECISION)
    back += product(tl.where(in_low, 0.0, turned).to(like.dtype), upper, PRECISION)
    return back


@triton.jit
def visible(
    ii, jj, d, start, there, padding_ptr, documents_ptr,
    PHASE: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr, WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr, inside,
):  # fmt: skip
    """Which cells of a tile are not excluded; `*_ptr` are the batch row's."""
    seen = there & (d == d)
    if CAUSAL and PHASE == 1:
        seen = seen & (d <= 0)
    if WINDOW:
        seen = seen & (d > -WINDOW)
    if PADDING:
        seen = seen & (tl.load(padding_ptr + jj, mask=there, other=1) == 0)
    if DOCUMENTS:
        of_query = tl.load(documents_ptr + start + ii, mask=inside, other=-1)
        seen = seen & (of_query == tl.load(documents_ptr + jj, mask=there, other=-2))
    return seen


@triton.jit
def kept(
    seed, n, rows, first_key, THRESHOLD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BY_KEY: tl.constexpr,
):  # fmt: skip
    """Cells that dropout keeps: 16 bits of Philox-4x32-7 a cell, counted by (key // 8, row, n).

    Cell t of eight keys takes the lower (t even) or upper half of word t // 4 + 2 (t // 2 % 2).
    """
    group = first_key // 8 + tl.arange(0, KEYS // 8)
    c0 = group[None, :] + tl.zeros((ROWS, 1), tl.int32)
    c1 = rows[:, None] + tl.zeros((1, KEYS // 8), tl.int32)
    c2 = tl.zeros((ROWS, KEYS // 8), tl.int32) + n
    c3 = tl.zeros((ROWS, KEYS // 8), tl.int32)
    r0, r1, r2, r3 = tl.philox(seed, c0, c1, c2, c3, 7)
    words = tl.join(tl.join(r0, r1), tl.join(r2, r3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    keep = tl.reshape(halves, (ROWS, KEYS)) >= THRESHOLD
    if BY_KEY:
        keep = tl.trans(keep)
    return keep


@triton.jit
def diagonals(values, X: tl.constexpr):
    """Sums along the diagonals of an (X, X) tile: distances -X..-1, and 0..X-1, each (X,)."""
    i = tl.arange(0, X)[:, None]
    c = tl.arange(0, X)[None, :]
    turned = tl.gather(values, (c + i) % X, 1)
    above = c + i < X
    lower = tl.sum(tl.where(above, 0.0, turned), 0)
    upper = tl.sum(tl.where(above, turned, 0.0), 0)
    return lower, upper


@triton.jit
def keys_seen(
    slot, src_len, low, high,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    FAR_LEFT: tl.constexpr, FAR_RIGHT: tl.constexpr,
):  # fmt: skip
    """Keys that ROWS queries from `slot` on see: begin..middle..after..end.

    Tiles of the left tail, of the band, of the right tail.
    """
    begin, end = slot * 0, src_len
    if CAUSAL:
        end = tl.minimum(src_len, slot + ROWS)
    if WINDOW:
        begin = tl.maximum(slot - WINDOW + 1, 0) // KEYS * KEYS
    middle, after = begin, end
    if FAR_LEFT:
        middle = tl.minimum(tl.maximum((slot + low + 1) // KEYS * KEYS, begin), end)
    if FAR_RIGHT:
        after = tl.cdiv(tl.maximum(slot + ROWS - 1 + high, 0), KEYS) * KEYS
        after = tl.minimum(tl.maximum(after, middle), end)
    return begin, middle, after, end


@triton.jit
def rows_seeing(
    first_key, tgt_len, start, low, high,
    ROWS: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    FAR_LEFT: tl.constexpr, FAR_RIGHT: tl.constexpr,
):  # fmt: skip
    """Rows that see KEYS keys from `first_key` on: begin..middle..after..end.

    Tiles of the right tail, of the band, of the left tail.
    """
    begin, end = first_key * 0, tgt_len
    if CAUSAL:
        begin = tl.maximum(first_key - start, 0) // ROWS * ROWS
    if WINDOW:
        end = tl.minimum(tgt_len, tl.maximum(first_key + KEYS - 1 + WINDOW - start, 0))
    middle, after = begin, end
    if FAR_RIGHT:
        middle = tl.maximum(first_key - high - start + 1, 0) // ROWS * ROWS
        middle = tl.minimum(tl.maximum(middle, begin), end)
    if FAR_LEFT:
        after = tl.cdiv(tl.maximum(first_key + KEYS - 1 - low - start, 0), ROWS) * ROWS
        after = tl.minimum(tl.maximum(after, middle), end)
    return begin, middle, after, end
