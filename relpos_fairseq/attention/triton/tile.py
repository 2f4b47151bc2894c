"""Load, mask and multiply one tile: the device functions that all kernels are made of.

A tile is ROWS queries by KEYS keys of one head.  Its cells are (rows, keys) where a program owns queries, and (keys,
rows) where it owns keys (BY_KEY), so that the left operand of each product needs no transposition.

PHASE tells where the tile's distances lie: 0, all at or below the lowest of the outer window; 2, all at or above the
highest; 1, anywhere.  In phases 0 and 2 every table has one number for a query or key (its clipped end), and nothing is
read cell by cell.  `kernel_args` explains the windows and names the fields of `rows`, `keys`, `at` and F.
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
    """Multiply matrices (m, c) and (c, n), summed in at least fp32: (m, n)."""
    if INTERPRETED:  # the interpreter multiplies the bits of bf16 as integers
        if a.dtype == tl.bfloat16:
            a = a.to(tl.float32)
        if b.dtype == tl.bfloat16:
            b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def dot_products(rows, keys, BY_KEY: tl.constexpr, PRECISION: tl.constexpr):
    """Multiply queries (rows, c) with keys (keys, c): (rows, keys), or with BY_KEY (keys, rows)."""
    if BY_KEY:
        values = matmul(keys, tl.trans(rows), PRECISION)
    else:
        values = matmul(rows, tl.trans(keys), PRECISION)
    return values


# ---------------------------------------------------------------------------------------------------------------------
# Loading and storing.


@triton.jit
def load_block(ptr, index, stride, inside, D: tl.constexpr, DP: tl.constexpr):
    """Load rows `index` (n,) of a matrix (length, D): (n, DP), 0 in rows outside and in padded channels."""
    channel = tl.arange(0, DP)
    mask = inside[:, None]
    if DP != D:
        mask = mask & (channel < D)[None, :]
    return tl.load(ptr + index[:, None] * stride + channel[None, :], mask=mask, other=0.0)


@triton.jit
def store_block(ptr, values, index, stride, inside, D: tl.constexpr, DP: tl.constexpr):
    """Store values (n, DP) as rows `index` (n,) of a matrix (length, D)."""
    channel = tl.arange(0, DP)
    mask = inside[:, None]
    if DP != D:
        mask = mask & (channel < D)[None, :]
    tl.store(ptr + index[:, None] * stride + channel[None, :], values, mask=mask)


@triton.jit
def load_queries(first, operands, strides, sizes, F: tl.constexpr):
    """Load ROWS queries of a head from index `first` on."""
    i = first + tl.arange(0, F.ROWS)
    inside = i < sizes.tgt_len
    q = load_block(operands.q, i, strides.q_t, inside, F.D, F.DP)  # (ROWS, DP)
    right_q, long_q, factors = q, q, q
    if F.TRILINEAR:
        right_q = load_block(operands.right_q, i, strides.q_t, inside, F.D, F.DP)
    if F.LONG_Q:
        long_q = load_block(operands.long_q, i, strides.q_t, inside, F.D, F.DP)
    if F.FACTORS:
        factors = load_block(operands.query_factors, i, strides.qf_t, inside, F.RANK, F.RP)  # (ROWS, RP)
    return TileSide(first, i, inside, q, right_q, long_q, factors)


@triton.jit
def load_keys(first, operands, strides, sizes, F: tl.constexpr):
    """Load KEYS keys of a head from index `first` on."""
    j = first + tl.arange(0, F.KEYS)
    there = j < sizes.src_len
    k = load_block(operands.k, j, strides.k_t, there, F.D, F.DP)  # (KEYS, DP)
    long_k, factors = k, k
    if F.LONG_K:
        long_k = load_block(operands.long_k, j, strides.k_t, there, F.D, F.DP)
    if F.FACTORS:
        factors = load_block(operands.key_factors, j, strides.kf_t, there, F.RANK, F.RP)  # (KEYS, RP)
    return TileSide(first, j, there, k, k, long_k, factors)


@triton.jit
def load_values(first, operands, strides, sizes, F: tl.constexpr):
    """Load the values of KEYS keys of a head from index `first` on: (KEYS, DP)."""
    j = first + tl.arange(0, F.KEYS)
    return load_block(operands.v, j, strides.v_t, j < sizes.src_len, F.D, F.DP)


@triton.jit
def locate_cells(rows, keys, start, BY_KEY: tl.constexpr):
    """Return the indices and distances of a tile's cells."""
    if BY_KEY:
        i, j, inside, there = (rows.index[None, :], keys.index[:, None], rows.inside[None, :], keys.inside[:, None])
    else:
        i, j, inside, there = (rows.index[:, None], keys.index[None, :], rows.inside[:, None], keys.inside[None, :])
    return TileCells(i, j, j - (start + i), inside, there)


@triton.jit
def read_scalars(ptr, d, sizes, PHASE: tl.constexpr):
    """Read a table of scalars (scalar_width,) at every cell's distance; one scalar in phases 0 and 2."""
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
    """Read products (length, near_width) at every cell's query or key and distance.

    In phases 0 and 2 the first or last column is read: one number for a query or key.
    """
    place = ptr + index * stride
    if PHASE == 2:
        place = place + (sizes.near_width - 1)
    elif PHASE == 1:
        place = place + tl.minimum(tl.maximum(d - sizes.near_low, 0), sizes.near_width - 1)
    return tl.load(place, mask=inside, other=0.0)


@triton.jit
def in_near_table(at, sizes):
    """Return which cells have distances between the near window's clipped ends."""
    low, width = sizes.near_low, sizes.near_width
    return (at.d > low) & (at.d < low + width - 1) & at.inside & at.there


@triton.jit
def content_products(rows, keys, at, operands, sizes, PHASE: tl.constexpr, BY_KEY: tl.constexpr, F: tl.constexpr):
    """Return q.k of a tile, or what replaces q.k under a trilinear table: sum_c q_c k_c w_c of the cell's distance.

    In a trilinear table's clipped ends w is one row, which is multiplied into the queries.
    """
    low, width = sizes.near_low, sizes.near_width
    if not F.TRILINEAR:
        values = dot_products(rows.content, keys.content, BY_KEY, F.PRECISION)
    elif PHASE == 0:
        values = dot_products(rows.content, keys.content, BY_KEY, F.PRECISION)
    elif PHASE == 2:
        values = dot_products(rows.right, keys.content, BY_KEY, F.PRECISION)
    else:
        # between the clipped ends: near_content (T, near_width)
        place = operands.near_content + at.i * width + (at.d - low)
        values = tl.load(place, mask=in_near_table(at, sizes), other=0.0)
        if F.NEAR_LEFT:
            end = dot_products(rows.content, keys.content, BY_KEY, F.PRECISION)
            values = tl.where(at.d <= low, end, values)
        if F.NEAR_RIGHT:
            end = dot_products(rows.right, keys.content, BY_KEY, F.PRECISION)
            values = tl.where(at.d >= low + width - 1, end, values)
    return values


# ---------------------------------------------------------------------------------------------------------------------
# Masks and dropout.


@triton.jit
def mask_cells(values, fill, at, operands, sizes, PHASE: tl.constexpr, F: tl.constexpr):
    """Put `fill` into the cells of a tile that a mask excludes or that have no key."""
    if PHASE != 0 or F.PADDING or F.WINDOW or F.DOCUMENTS:
        seen = at.there & (at.d == at.d)
        if F.CAUSAL and PHASE == 1:
            seen = seen & (at.d <= 0)
        if F.WINDOW:
            seen = seen & (at.d > -F.WINDOW)
        if F.PADDING:
            seen = seen & (tl.load(operands.padding + at.j, mask=at.there, other=1) == 0)
        if F.DOCUMENTS:
            of_query = tl.load(operands.documents + sizes.start + at.i, mask=at.inside, other=-1)
            of_key = tl.load(operands.documents + at.j, mask=at.there, other=-2)
            seen = seen & (of_query == of_key)
        values = tl.where(seen, values, fill)
    return values


@triton.jit
def dropout_mask(seed, n, rows, keys, BY_KEY: tl.constexpr, F: tl.constexpr):
    """Return which cells of a tile dropout keeps: each cell's 16 random bits are at least DROPOUT.

    Philox-4x32 of 7 rounds gives eight keys of a query their bits; its counter is (key // 8, query, n).  Of its four
    words, key t of eight takes word t // 4 + 2 (t // 2 % 2), the lower half where t is even.
    """
    ROWS: tl.constexpr = F.ROWS
    KEYS: tl.constexpr = F.KEYS
    # counters (ROWS, KEYS / 8)
    group = keys.first // 8 + tl.arange(0, KEYS // 8)
    c0 = group[None, :] + tl.zeros((ROWS, 1), tl.int32)
    c1 = rows.index[:, None] + tl.zeros((1, KEYS // 8), tl.int32)
    c2 = tl.zeros((ROWS, KEYS // 8), tl.int32) + n
    c3 = tl.zeros((ROWS, KEYS // 8), tl.int32)
    # four words of 32 bits for eight keys: (ROWS, KEYS / 8, 2, 2), then halves (ROWS, KEYS / 8, 2, 2, 2)
    r0, r1, r2, r3 = tl.philox(seed, c0, c1, c2, c3, 7)
    words = tl.join(tl.join(r0, r1), tl.join(r2, r3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    keep = tl.reshape(halves, (ROWS, KEYS)) >= F.DROPOUT
    if BY_KEY:
        keep = tl.trans(keep)
    return keep


# ---------------------------------------------------------------------------------------------------------------------
# Which tiles there are, and sums along their diagonals.


@triton.jit
def sum_diagonals(values, X: tl.constexpr):
    """Sum a tile (X, X) along its diagonals: of distances -X..-1, and of distances 0..X-1, each (X,).

    Distances are those of a tile whose first query and first key have distance 0.
    """
    i = tl.arange(0, X)[:, None]
    c = tl.arange(0, X)[None, :]
    # column c of row i becomes the cell of distance c or c - X
    turned = tl.gather(values, (c + i) % X, 1)
    above = c + i < X
    lower = tl.sum(tl.where(above, 0.0, turned), 0)
    upper = tl.sum(tl.where(above, turned, 0.0), 0)
    return lower, upper


@triton.jit
def visible_keys(slot, sizes, F: tl.constexpr):
    """Return the ranges of keys that ROWS queries from slot `slot` on see, phase by phase.

    begin..middle are tiles of phase 0 (left of the outer window), middle..after of phase 1, after..end of phase 2.
    """
    begin, end = slot * 0, sizes.src_len
    if F.CAUSAL:
        end = tl.minimum(end, slot + F.ROWS)
    if F.WINDOW:
        begin = tl.maximum(slot - F.WINDOW + 1, 0) // F.KEYS * F.KEYS
    middle, after = begin, end
    if F.OUTER_LEFT:
        middle = tl.minimum(tl.maximum((slot + sizes.outer_low + 1) // F.KEYS * F.KEYS, begin), end)
    if F.OUTER_RIGHT:
        after = tl.cdiv(tl.maximum(slot + F.ROWS - 1 + sizes.outer_high, 0), F.KEYS) * F.KEYS
        after = tl.minimum(tl.maximum(after, middle), end)
    return begin, middle, after, end


@triton.jit
def visible_rows(first_key, sizes, F: tl.constexpr):
    """Return the ranges of queries that see KEYS keys from `first_key` on, phase by phase.

    begin..middle are tiles of phase 2 (right of the outer window), middle..after of phase 1, after..end of phase 0.
    """
    begin, end = first_key * 0, sizes.tgt_len
    last = first_key + F.KEYS - 1 - sizes.start
    if F.CAUSAL:
        begin = tl.maximum(first_key - sizes.start, 0) // F.ROWS * F.ROWS
    if F.WINDOW:
        end = tl.minimum(end, tl.maximum(last + F.WINDOW, 0))
    middle, after = begin, end
    if F.OUTER_RIGHT:
        middle = tl.maximum(first_key - sizes.outer_high - sizes.start + 1, 0) // F.ROWS * F.ROWS
        middle = tl.minimum(tl.maximum(middle, begin), end)
    if F.OUTER_LEFT:
        after = tl.cdiv(tl.maximum(last - sizes.outer_low, 0), F.ROWS) * F.ROWS
        after = tl.minimum(tl.maximum(after, middle), end)
    return begin, middle, after, end
