"""What the kernels do to a tile of logits.

A tile is (rows, keys) in the forward pass and where rows own gradients, (keys, rows) where keys do,
so that what stands left in a product is there without a transposition.
`records` names what the functions are handed: `at` a tile's cells, `rows` and `keys` its two sides,
F what a kernel is compiled for.  PHASE says where a tile stands: 0, all its distances are at or
below the windows' lowest; 2, at or above their highest; 1, anywhere.  In phases 0 and 2 a table is
one number a query or key, and nothing is read per cell.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.kernel_args import TileCells, TileSide
from relpos_fairseq.attention.triton.refusal import interpreted

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(interpreted())


@triton.jit
def matmul(a, b, PRECISION: tl.constexpr):
    """A matrix product, summed in fp32 at least."""
    if INTERPRETED:  # its products of bf16 are those of the bits as integers
        if a.dtype == tl.bfloat16:
            a = a.to(tl.float32)
        if b.dtype == tl.bfloat16:
            b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def load_block(ptr, index, stride, inside, D: tl.constexpr, DP: tl.constexpr):
    """Rows of (length, D), 0 where they or their channels end."""
    channel = tl.arange(0, DP)
    mask = inside[:, None]
    if DP != D:
        mask = mask & (channel < D)[None, :]
    return tl.load(ptr + index[:, None] * stride + channel[None, :], mask=mask, other=0.0)


@triton.jit
def store_block(ptr, values, index, stride, inside, D: tl.constexpr, DP: tl.constexpr):
    """The converse of `block_of`."""
    channel = tl.arange(0, DP)
    mask = inside[:, None]
    if DP != D:
        mask = mask & (channel < D)[None, :]
    tl.store(ptr + index[:, None] * stride + channel[None, :], values, mask=mask)


@triton.jit
def load_queries(first, given, strides, sizes, F: tl.constexpr):
    """Load ROWS queries of a head from `first` on."""
    i = first + tl.arange(0, F.ROWS)
    inside = i < sizes.tgt_len
    q = load_block(given.q, i, strides.q_t, inside, F.D, F.DP)
    right_q, wide_q, factors = q, q, q
    if F.REPLACED:
        right_q = load_block(given.right_q, i, strides.q_t, inside, F.D, F.DP)
    if F.WIDE_Q:
        wide_q = load_block(given.wide_q, i, strides.q_t, inside, F.D, F.DP)
    if F.FACTORS:
        factors = load_block(given.query_factors, i, strides.qf_t, inside, F.RANK, F.RP)
    return TileSide(first, i, inside, q, right_q, wide_q, factors)


@triton.jit
def load_keys(first, given, strides, sizes, F: tl.constexpr):
    """Load KEYS keys of a head from `first` on."""
    j = first + tl.arange(0, F.KEYS)
    there = j < sizes.src_len
    k = load_block(given.k, j, strides.k_t, there, F.D, F.DP)
    wide_k, factors = k, k
    if F.WIDE_K:
        wide_k = load_block(given.wide_k, j, strides.k_t, there, F.D, F.DP)
    if F.FACTORS:
        factors = load_block(given.key_factors, j, strides.kf_t, there, F.RANK, F.RP)
    return TileSide(first, j, there, k, k, wide_k, factors)


@triton.jit
def load_values(first, given, strides, sizes, F: tl.constexpr):
    """Load the values of KEYS keys of a head from `first` on: (KEYS, DP)."""
    j = first + tl.arange(0, F.KEYS)
    return load_block(given.v, j, strides.v_t, j < sizes.src_len, F.D, F.DP)


@triton.jit
def locate_cells(rows, keys, start, BY_KEY: tl.constexpr):
    """Return where the cells of a tile stand."""
    if BY_KEY:
        i, j, inside, there = (rows.index[None, :], keys.index[:, None], rows.inside[None, :], keys.inside[:, None])
    else:
        i, j, inside, there = (rows.index[:, None], keys.index[None, :], rows.inside[:, None], keys.inside[None, :])
    return TileCells(i, j, j - (start + i), inside, there)


@triton.jit
def read_scalars(ptr, d, sizes, PHASE: tl.constexpr):
    """A vector over the scalars' distances, read for every cell; a scalar in the tails."""
    if PHASE == 0:
        values = tl.load(ptr)
    elif PHASE == 2:
        values = tl.load(ptr + sizes.scalar_width - 1)
    else:
        last = sizes.scalar_width - 1
        values = tl.load(ptr + tl.minimum(tl.maximum(d - sizes.scalar_low, 0), last))
    return values


@triton.jit
def read_products(ptr, index, stride, inside, d, sizes, PHASE: tl.constexpr):
    """A (length, width) table read by query or key and distance; by query or key in the tails."""
    place = ptr + index * stride
    if PHASE == 2:
        place = place + (sizes.width - 1)
    elif PHASE == 1:
        place = place + tl.minimum(tl.maximum(d - sizes.vector_low, 0), sizes.width - 1)
    return tl.load(place, mask=inside, other=0.0)


@triton.jit
def dot_products(rows, keys, BY_KEY: tl.constexpr, PRECISION: tl.constexpr):
    """Products of queries' and keys' vectors."""
    if BY_KEY:
        values = matmul(keys, tl.trans(rows), PRECISION)
    else:
        values = matmul(rows, tl.trans(keys), PRECISION)
    return values


@triton.jit
def in_near_table(at, sizes):
    """Return which cells of a tile lie between the tails."""
    low, width = sizes.vector_low, sizes.width
    return (at.d > low) & (at.d < low + width - 1) & at.inside & at.there


@triton.jit
def content_products(rows, keys, at, given, sizes, PHASE: tl.constexpr, BY_KEY: tl.constexpr, F: tl.constexpr):
    """q.k, or a band's own products between tails that meet other queries."""
    low, width = sizes.vector_low, sizes.width
    if not F.REPLACED:
        values = dot_products(rows.content, keys.content, BY_KEY, F.PRECISION)
    elif PHASE == 0:
        values = dot_products(rows.content, keys.content, BY_KEY, F.PRECISION)
    elif PHASE == 2:
        values = dot_products(rows.right, keys.content, BY_KEY, F.PRECISION)
    else:
        place = given.content_band + at.i * width + (at.d - low)
        values = tl.load(place, mask=in_near_table(at, sizes), other=0.0)
        if F.LEFT:
            tail = dot_products(rows.content, keys.content, BY_KEY, F.PRECISION)
            values = tl.where(at.d <= low, tail, values)
        if F.RIGHT:
            tail = dot_products(rows.right, keys.content, BY_KEY, F.PRECISION)
            values = tl.where(at.d >= low + width - 1, tail, values)
    return values


@triton.jit
def mask_cells(values, fill, at, given, sizes, PHASE: tl.constexpr, F: tl.constexpr):
    """Put `fill` into the cells of a tile that masks exclude."""
    if PHASE != 0 or F.PADDING or F.WINDOW or F.DOCUMENTS:
        seen = at.there & (at.d == at.d)
        if F.CAUSAL and PHASE == 1:
            seen = seen & (at.d <= 0)
        if F.WINDOW:
            seen = seen & (at.d > -F.WINDOW)
        if F.PADDING:
            seen = seen & (tl.load(given.padding + at.j, mask=at.there, other=1) == 0)
        if F.DOCUMENTS:
            of_query = tl.load(given.documents + sizes.start + at.i, mask=at.inside, other=-1)
            of_key = tl.load(given.documents + at.j, mask=at.there, other=-2)
            seen = seen & (of_query == of_key)
        values = tl.where(seen, values, fill)
    return values


@triton.jit
def dropout_mask(seed, n, rows, keys, BY_KEY: tl.constexpr, F: tl.constexpr):
    """Cells that dropout keeps: 16 bits of Philox-4x32-7 a cell, counted by (key // 8, row, n).

    Cell t of eight keys takes the lower (t even) or upper half of word t // 4 + 2 (t // 2 % 2).
    """
    ROWS: tl.constexpr = F.ROWS
    KEYS: tl.constexpr = F.KEYS
    group = keys.first // 8 + tl.arange(0, KEYS // 8)
    c0 = group[None, :] + tl.zeros((ROWS, 1), tl.int32)
    c1 = rows.index[:, None] + tl.zeros((1, KEYS // 8), tl.int32)
    c2 = tl.zeros((ROWS, KEYS // 8), tl.int32) + n
    c3 = tl.zeros((ROWS, KEYS // 8), tl.int32)
    r0, r1, r2, r3 = tl.philox(seed, c0, c1, c2, c3, 7)
    words = tl.join(tl.join(r0, r1), tl.join(r2, r3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    keep = tl.reshape(halves, (ROWS, KEYS)) >= F.DROP
    if BY_KEY:
        keep = tl.trans(keep)
    return keep


@triton.jit
def sum_diagonals(values, X: tl.constexpr):
    """Sums along the diagonals of an (X, X) tile: distances -X..-1, and 0..X-1, each (X,)."""
    i = tl.arange(0, X)[:, None]
    c = tl.arange(0, X)[None, :]
    turned = tl.gather(values, (c + i) % X, 1)
    above = c + i < X
    lower = tl.sum(tl.where(above, 0.0, turned), 0)
    upper = tl.sum(tl.where(above, turned, 0.0), 0)
    return lower, upper


@triton.jit
def visible_keys(slot, sizes, F: tl.constexpr):
    """Keys that ROWS queries from `slot` on see: begin..middle..after..end.

    Tiles of the left tail, of the band, of the right tail.
    """
    begin, end = slot * 0, sizes.src_len
    if F.CAUSAL:
        end = tl.minimum(end, slot + F.ROWS)
    if F.WINDOW:
        begin = tl.maximum(slot - F.WINDOW + 1, 0) // F.KEYS * F.KEYS
    middle, after = begin, end
    if F.FAR_LEFT:
        middle = tl.minimum(tl.maximum((slot + sizes.low + 1) // F.KEYS * F.KEYS, begin), end)
    if F.FAR_RIGHT:
        after = tl.cdiv(tl.maximum(slot + F.ROWS - 1 + sizes.high, 0), F.KEYS) * F.KEYS
        after = tl.minimum(tl.maximum(after, middle), end)
    return begin, middle, after, end


@triton.jit
def visible_rows(first_key, sizes, F: tl.constexpr):
    """Rows that see KEYS keys from `first_key` on: begin..middle..after..end.

    Tiles of the right tail, of the band, of the left tail.
    """
    begin, end = first_key * 0, sizes.tgt_len
    last = first_key + F.KEYS - 1 - sizes.start
    if F.CAUSAL:
        begin = tl.maximum(first_key - sizes.start, 0) // F.ROWS * F.ROWS
    if F.WINDOW:
        end = tl.minimum(end, tl.maximum(last + F.WINDOW, 0))
    middle, after = begin, end
    if F.FAR_RIGHT:
        middle = tl.maximum(first_key - sizes.high - sizes.start + 1, 0) // F.ROWS * F.ROWS
        middle = tl.minimum(tl.maximum(middle, begin), end)
    if F.FAR_LEFT:
        after = tl.cdiv(tl.maximum(last - sizes.low, 0), F.ROWS) * F.ROWS
        after = tl.minimum(tl.maximum(after, middle), end)
    return begin, middle, after, end
