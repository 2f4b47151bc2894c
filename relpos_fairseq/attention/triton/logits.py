"""Compute the logits of one tile, and their gradient: what the forward and the backward kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.kernel_args import HeadReset, OperandPointers, SavedPointers, SavedRows, TileLogits
from relpos_fairseq.attention.triton.tile import (
    LOG2E,
    content_products,
    dot_products,
    dropout_mask,
    in_near_table,
    load_block,
    mask_cells,
    matmul,
    read_products,
    read_scalars,
)

# ---- Vectors over many distances: unclipped tables and Transformer-XL, in O(length) memory.
# A square tile of X queries and X keys has 2 X - 1 distances.  The products of its queries (or keys)
# with those vectors are two blocks (X, X), of the lower and the upper distances.  A cell of the tile
# takes its number from their diagonals.  Column p of the lower block and of the upper one are never
# needed in the same row, so that one block holds both, whose rows are then rotated: one gather inside
# the tile, and its inverse for gradients.  The gradient of a vector is a sum over one diagonal of
# tiles: a kernel of its own (`backward_vectors`) forms it.


@triton.jit
def lower_distance_mask(X: tl.constexpr, OF_KEYS: tl.constexpr, BY_ROW: tl.constexpr):
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
def load_tile_vectors(table_ptr, rows, keys, sizes, F: tl.constexpr):
    """Load a tile's lower and upper X distances of a (width, D) table: (X, DP) each."""
    X: tl.constexpr = F.KEYS
    # row of the table for the tile's lowest distance
    lowest = keys.first - rows.first - sizes.start - (X - 1) - sizes.wide_low
    first = lowest + tl.arange(0, X)
    second, width = first + X, sizes.wide_width
    lower = load_block(table_ptr, first, F.D, (first >= 0) & (first < width), F.D, F.DP)
    upper = load_block(table_ptr, second, F.D, (second >= 0) & (second < width), F.D, F.DP)
    return lower, upper


@triton.jit
def vector_products(table_ptr, rows, keys, sizes, OF_KEYS: tl.constexpr, BY_KEY: tl.constexpr, F: tl.constexpr):
    """Products of a tile's queries or keys (X, DP) with the vectors of its cells' distances."""
    X: tl.constexpr = F.KEYS
    own = tl.arange(0, X)
    lower, upper = load_tile_vectors(table_ptr, rows, keys, sizes, F)
    if OF_KEYS:
        x = keys.wide
    else:
        x = rows.wide
    place = own[None, :] - own[:, None]
    if BY_KEY:
        place = own[:, None] - own[None, :]
    place = (place + X - 1) % X
    in_low = lower_distance_mask(X, OF_KEYS, OF_KEYS == BY_KEY)
    if OF_KEYS == BY_KEY:
        one = matmul(x, tl.trans(lower), F.PRECISION)
        other = matmul(x, tl.trans(upper), F.PRECISION)
        values = tl.gather(tl.where(in_low, one, other), place, 1)
    else:
        one = matmul(lower, tl.trans(x), F.PRECISION)
        other = matmul(upper, tl.trans(x), F.PRECISION)
        values = tl.gather(tl.where(in_low, one, other), place, 0)
    return values


@triton.jit
def relative_logits(rows, keys, given, sizes, BY_KEY: tl.constexpr, F: tl.constexpr):
    """What vectors over many distances add to a tile: q.a + k.b."""
    values = tl.zeros((F.KEYS, F.KEYS), F.ACC)
    if F.WIDE_Q:
        values += vector_products(given.query_vectors, rows, keys, sizes, False, BY_KEY, F)
    if F.WIDE_K:
        values += vector_products(given.key_vectors, rows, keys, sizes, True, BY_KEY, F)
    return values


@triton.jit
def vector_products_backward(part, table_ptr, rows, keys, sizes, OF_KEYS: tl.constexpr, F: tl.constexpr):
    """The gradient of queries or keys, whose rows are the tile's: (X, DP)."""
    X: tl.constexpr = F.KEYS
    own = tl.arange(0, X)
    lower, upper = load_tile_vectors(table_ptr, rows, keys, sizes, F)
    place = own[None, :] + own[:, None] + 1
    if OF_KEYS:
        place = own[:, None] - own[None, :] + X - 1
    turned = tl.gather(part, place % X, 1)
    in_low = lower_distance_mask(X, OF_KEYS, True)
    back = matmul(tl.where(in_low, turned, 0.0).to(lower.dtype), lower, F.PRECISION)
    back += matmul(tl.where(in_low, 0.0, turned).to(lower.dtype), upper, F.PRECISION)
    return back


# ---- What all kernels share: where a head's operands lie, the logits of a tile, and their gradient.


@triton.jit
def split_head_index(n, heads):
    """Return the batch row and the head of n = b * heads + h, and n itself, in 64 bits."""
    return (n // heads).to(tl.int64), (n % heads).to(tl.int64), n.to(tl.int64)


@triton.jit
def move_to_head(n, given, strides, sizes, F: tl.constexpr):
    """Return the operands of head n, and its reset."""
    b, h, n64 = split_head_index(n, sizes.heads)
    of_q, of_k = b * strides.q_b + h * strides.q_h, b * strides.k_b + h * strides.k_h
    of_query_products = b * strides.qp_b + h * strides.qp_h
    of_key_products = b * strides.kp_b + h * strides.kp_h
    first, row, column = 0, 0.0, 0.0
    if F.RESET:
        first = tl.load(given.first + b * strides.first_b).to(tl.int32)
        row = tl.load(given.reset + h * strides.reset_h)
        column = tl.load(given.reset + h * strides.reset_h + 1)
    of_head = OperandPointers(
        q=given.q + of_q,
        right_q=given.right_q + of_q,
        wide_q=given.wide_q + of_q,
        k=given.k + of_k,
        wide_k=given.wide_k + of_k,
        v=given.v + b * strides.v_b + h * strides.v_h,
        query_products=given.query_products + of_query_products,
        query_multipliers=given.query_multipliers + of_query_products,
        content_band=given.content_band + n64 * sizes.tgt_len * sizes.width,
        key_products=given.key_products + of_key_products,
        key_multipliers=given.key_multipliers + of_key_products,
        query_vectors=given.query_vectors + h * strides.qv_h,
        key_vectors=given.key_vectors + h * strides.kv_h,
        static=given.static + h * strides.static_h,
        gate=given.gate + h * strides.gate_h,
        query_factors=given.query_factors + b * strides.qf_b + h * strides.qf_h,
        key_factors=given.key_factors + b * strides.kf_b + h * strides.kf_h,
        reset=given.reset,
        first=given.first,
        padding=given.padding + b * sizes.src_len,
        documents=given.documents + b * sizes.src_len,
    )
    return of_head, HeadReset(first, row, column)


@triton.jit
def move_saved_to_head(n, saved, strides, sizes):
    """Return head n's part of what the backward pass begins with."""
    b, h, n64 = split_head_index(n, sizes.heads)
    rows = n64 * sizes.tgt_len
    return SavedPointers(
        dout=saved.dout + b * strides.out_b + h * strides.out_h,
        top=saved.top + rows,
        mass=saved.mass + rows,
        delta=saved.delta + rows,
        dprobs=saved.dprobs + rows * sizes.width,
    )


@triton.jit
def reset_cells(at, start, first):
    """Return which cells of a tile lie in the first token's row, and which in its column."""
    row = start + at.i == first
    return row, (at.j == first) & (start + at.i != first)


@triton.jit
def tile_logits(
    rows, keys, at, given, reset, strides, sizes, PHASE: tl.constexpr, BY_KEY: tl.constexpr, F: tl.constexpr
):
    """Return the logits of a tile (rows, keys), or with BY_KEY (keys, rows)."""
    # content = scale q.k: (rows, DP) (DP, keys)
    content = content_products(rows, keys, at, given, sizes, PHASE, BY_KEY, F).to(F.ACC) * F.SCALE
    gate, by_query, by_key = 1.0, 1.0, 1.0
    if F.GATE:
        gate = read_scalars(given.gate, at.d, sizes, PHASE)
    if F.PRODUCT:
        by_query = read_products(given.query_multipliers, at.i, strides.qp_t, at.inside, at.d, sizes, PHASE)
        by_key = read_products(given.key_multipliers, at.j, strides.kp_t, at.there, at.d, sizes, PHASE)
    s = content * gate * by_query * by_key
    # Each kind is added to the logits, or to what the reset replaces.
    replaced = tl.zeros_like(s)
    if F.WIDE_Q or F.WIDE_K:
        part = relative_logits(rows, keys, given, sizes, BY_KEY, F)
        s, replaced = add_kind(s, replaced, part * F.SCALE, F.RESET & 1)
    if F.ADD_Q:
        part = read_products(given.query_products, at.i, strides.qp_t, at.inside, at.d, sizes, PHASE)
        s, replaced = add_kind(s, replaced, part.to(F.ACC) * F.SCALE, F.RESET & 1)
    if F.ADD_K:
        part = read_products(given.key_products, at.j, strides.kp_t, at.there, at.d, sizes, PHASE)
        s, replaced = add_kind(s, replaced, part.to(F.ACC) * F.SCALE, F.RESET & 1)
    if F.STATIC:
        part = read_scalars(given.static, at.d, sizes, PHASE)
        s, replaced = add_kind(s, replaced, part, F.RESET & 2)
    if F.FACTORS:
        # (rows, RP) (RP, keys)
        part = dot_products(rows.factors, keys.factors, BY_KEY, F.PRECISION)
        s, replaced = add_kind(s, replaced, part, F.RESET & 4)
    if F.RESET:
        row, column = reset_cells(at, sizes.start, reset.first)
        s += tl.where(row, reset.row, tl.where(column, reset.column, replaced))
    return TileLogits(s, content, gate, by_query, by_key)


@triton.jit
def add_kind(total, replaced, part, RESET: tl.constexpr):
    """Add a part to the logits, or to what the reset replaces in the first row and column."""
    if RESET:
        replaced += part
    else:
        total += part
    return total, replaced


@triton.jit
def load_saved(rows, saved, strides, F: tl.constexpr):
    """Load what the backward pass begins with of rows; rows that are none have no probability."""
    i, inside = rows.index, rows.inside
    return SavedRows(
        dout=load_block(saved.dout, i, strides.out_t, inside, F.D, F.DP),
        top=tl.load(saved.top + i, mask=inside, other=0.0),
        mass=tl.load(saved.mass + i, mask=inside, other=float("inf")),
        delta=tl.load(saved.delta + i, mask=inside, other=0.0),
    )


@triton.jit
def tile_gradient(
    n, s, v, known, rows, keys, at, given, saved, sizes, PHASE: tl.constexpr, BY_KEY: tl.constexpr, F: tl.constexpr
):
    """Return a tile's probabilities as values (keys, DP) take them, and its logits' gradient."""
    if BY_KEY:
        top, mass, delta = known.top[None, :], known.mass[None, :], known.delta[None, :]
    else:
        top, mass, delta = known.top[:, None], known.mass[:, None], known.delta[:, None]
    p = mask_cells(tl.exp2((s - top) * LOG2E - mass), 0.0, at, given, sizes, PHASE, F)
    # dp = dout v^T: (rows, DP) (DP, keys)
    dp = dot_products(known.dout, v, BY_KEY, F.PRECISION).to(F.ACC)
    if F.VALUES:
        part = read_products(saved.dprobs, at.i, sizes.width, at.inside, at.d, sizes, PHASE)
        dp += part.to(F.ACC)
    used = p
    if F.DROP:
        keep = dropout_mask(sizes.seed, n, rows, keys, BY_KEY, F)
        inverse = 65536.0 / (65536 - F.DROP)
        used = tl.where(keep, p * inverse, 0.0)
        dp = tl.where(keep, dp * inverse, 0.0)
    return used, p * (dp - delta)


@triton.jit
def zero_replaced(ds, at, reset, sizes, KIND: tl.constexpr, F: tl.constexpr):
    """Return the gradient of what a kind (a bit of RESET) adds: 0 where the reset replaces it."""
    if F.RESET & KIND:
        row, column = reset_cells(at, sizes.start, reset.first)
        ds = tl.where(row | column, 0.0, ds)
    return ds


@triton.jit
def sum_clipped_ends(part, left, right, at, sizes, PHASE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Add what a tile (x, y) has in the two tails to left (x,) and right (x,)."""
    if PHASE == 0:
        left += tl.sum(part, 1)
    elif PHASE == 2:
        right += tl.sum(part, 1)
    else:
        low, width = sizes.vector_low, sizes.width
        if LEFT:
            left += tl.sum(tl.where(at.d <= low, part, 0.0), 1)
        if RIGHT:
            right += tl.sum(tl.where(at.d >= low + width - 1, part, 0.0), 1)
    return left, right


@triton.jit
def store_near_cells(ptr, part, index, stride, at, sizes):
    """Store a tile's cells of the band; each belongs to one pair of a query and a key."""
    place = ptr + index * stride + (at.d - sizes.vector_low)
    tl.store(place, part, mask=in_near_table(at, sizes))


@triton.jit
def store_products(ptr, part, left, right, index, stride, at, sizes, PHASE: tl.constexpr, F: tl.constexpr):
    """Store a tile's gradients of products (length, width), and return the sums of the tails."""
    if PHASE == 1:
        store_near_cells(ptr, part, index, stride, at, sizes)
    return sum_clipped_ends(part, left, right, at, sizes, PHASE, F.LEFT, F.RIGHT)


@triton.jit
def store_clipped_ends(ptr, left, right, index, stride, width, inside):
    """Store the sums of the two tails: first and last column of (length, width)."""
    tl.store(ptr + index * stride, left, mask=inside)
    tl.store(ptr + index * stride + width - 1, right, mask=inside)
