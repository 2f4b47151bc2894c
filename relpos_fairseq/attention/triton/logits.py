"""Compute the logits of one tile, and their gradient: what the forward and the backward kernels share.

    logits = scale * content * gate_d * query_multipliers[i, d] * key_multipliers[j, d]
             + scale * (query_products[i, d] + key_products[j, d])          tables in the near window
             + scale * (long_q_i.query_vectors_d + long_k_j.key_vectors_d)  long tables
             + static_d + query_factors_i.key_factors_j

A square tile of X queries and X keys has 2 X - 1 distances.  The products of its queries (or keys) with a long table's
vectors are two blocks (X, X), of the X lower and the X upper distances, and a cell's product lies on a diagonal of
theirs.  No row needs the same column of both blocks, so that one block holds both; rotating its rows (one gather inside
the tile) puts every product into its cell.  Gradients take the inverse gather.
"""

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

# ---------------------------------------------------------------------------------------------------------------------
# One head's part of every tensor.


@triton.jit
def split_head_index(n, heads):
    """Return the batch row and the head of n = b * heads + h, and n itself, in 64 bits."""
    return (n // heads).to(tl.int64), (n % heads).to(tl.int64), n.to(tl.int64)


@triton.jit
def move_to_head(n, operands, strides, sizes, F: tl.constexpr):
    """Return the operands' pointers moved to head n, and its reset."""
    b, h, n64 = split_head_index(n, sizes.heads)
    of_q, of_k = b * strides.q_b + h * strides.q_h, b * strides.k_b + h * strides.k_h
    of_query_products = b * strides.qp_b + h * strides.qp_h
    of_key_products = b * strides.kp_b + h * strides.kp_h
    first, row, column = 0, 0.0, 0.0
    if F.RESET:
        first = tl.load(operands.first + b * strides.first_b).to(tl.int32)
        row = tl.load(operands.reset + h * strides.reset_h)
        column = tl.load(operands.reset + h * strides.reset_h + 1)
    of_head = OperandPointers(
        q=operands.q + of_q,
        right_q=operands.right_q + of_q,
        long_q=operands.long_q + of_q,
        k=operands.k + of_k,
        long_k=operands.long_k + of_k,
        v=operands.v + b * strides.v_b + h * strides.v_h,
        query_products=operands.query_products + of_query_products,
        query_multipliers=operands.query_multipliers + of_query_products,
        near_content=operands.near_content + n64 * sizes.tgt_len * sizes.near_width,
        key_products=operands.key_products + of_key_products,
        key_multipliers=operands.key_multipliers + of_key_products,
        query_vectors=operands.query_vectors + h * strides.qv_h,
        key_vectors=operands.key_vectors + h * strides.kv_h,
        static=operands.static + h * strides.static_h,
        gate=operands.gate + h * strides.gate_h,
        query_factors=operands.query_factors + b * strides.qf_b + h * strides.qf_h,
        key_factors=operands.key_factors + b * strides.kf_b + h * strides.kf_h,
        reset=operands.reset,
        first=operands.first,
        padding=operands.padding + b * sizes.src_len,
        documents=operands.documents + b * sizes.src_len,
    )
    return of_head, HeadReset(first, row, column)


@triton.jit
def move_saved_to_head(n, saved, strides, sizes):
    """Return the pointers to what the forward pass saved, moved to head n."""
    b, h, n64 = split_head_index(n, sizes.heads)
    of_out, rows = b * strides.out_b + h * strides.out_h, n64 * sizes.tgt_len
    return SavedPointers(
        out=saved.out + of_out,
        out_error=saved.out_error + of_out,
        dout=saved.dout + of_out,
        row_max=saved.row_max + rows,
        log2_sum=saved.log2_sum + rows,
        delta=saved.delta + rows,
        probs=saved.probs + rows * sizes.near_width,
        dprobs=saved.dprobs + rows * sizes.near_width,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Long tables.


@triton.jit
def lower_distance_mask(X: tl.constexpr, OF_KEYS: tl.constexpr, OWN_ROWS: tl.constexpr):
    """Return which cells of the block (queries or keys, column) hold products with the X lower distances' vectors.

    With OWN_ROWS queries (or keys, OF_KEYS) are the block's rows, otherwise its columns.
    """
    own = tl.arange(0, X)
    edge = own
    if not OF_KEYS:
        edge = X - 1 - own
    if OWN_ROWS:
        cells = own[None, :] >= edge[:, None]
    else:
        cells = own[:, None] >= edge[None, :]
    return cells


@triton.jit
def load_tile_vectors(table_ptr, rows, keys, sizes, F: tl.constexpr):
    """Load a long table's vectors (long_width, D) for a tile's X lower and X upper distances: (X, DP) each."""
    X: tl.constexpr = F.KEYS
    # row of the table that the tile's lowest distance reads
    lowest = keys.first - rows.first - sizes.start - (X - 1) - sizes.long_low
    first = lowest + tl.arange(0, X)
    second, width = first + X, sizes.long_width
    lower = load_block(table_ptr, first, F.D, (first >= 0) & (first < width), F.D, F.DP)
    upper = load_block(table_ptr, second, F.D, (second >= 0) & (second < width), F.D, F.DP)
    return lower, upper


@triton.jit
def vector_products(table_ptr, rows, keys, sizes, OF_KEYS: tl.constexpr, BY_KEY: tl.constexpr, F: tl.constexpr):
    """Multiply a tile's queries (or keys, OF_KEYS) with the vector of each cell's distance: (rows, keys).

    With BY_KEY: (keys, rows).
    """
    X: tl.constexpr = F.KEYS
    own = tl.arange(0, X)
    lower, upper = load_tile_vectors(table_ptr, rows, keys, sizes, F)
    if OF_KEYS:
        x = keys.long
    else:
        x = rows.long
    # column of the products that the cell of query i and key j reads: (j - i + X - 1) % X
    place = own[None, :] - own[:, None]
    if BY_KEY:
        place = own[:, None] - own[None, :]
    place = (place + X - 1) % X
    in_low = lower_distance_mask(X, OF_KEYS, OF_KEYS == BY_KEY)
    if OF_KEYS == BY_KEY:
        # x (X, DP) times vectors (DP, X)
        low_products = matmul(x, tl.trans(lower), F.PRECISION)
        up_products = matmul(x, tl.trans(upper), F.PRECISION)
        values = tl.gather(tl.where(in_low, low_products, up_products), place, 1)
    else:
        # vectors (X, DP) times x (DP, X)
        low_products = matmul(lower, tl.trans(x), F.PRECISION)
        up_products = matmul(upper, tl.trans(x), F.PRECISION)
        values = tl.gather(tl.where(in_low, low_products, up_products), place, 0)
    return values


@triton.jit
def long_table_products(rows, keys, operands, sizes, BY_KEY: tl.constexpr, F: tl.constexpr):
    """Return what long tables add to a tile: q.a_d + k.b_d, without the scale."""
    values = tl.zeros((F.KEYS, F.KEYS), F.ACC)
    if F.LONG_Q:
        values += vector_products(operands.query_vectors, rows, keys, sizes, False, BY_KEY, F)
    if F.LONG_K:
        values += vector_products(operands.key_vectors, rows, keys, sizes, True, BY_KEY, F)
    return values


@triton.jit
def vector_products_backward(part, table_ptr, rows, keys, sizes, OF_KEYS: tl.constexpr, F: tl.constexpr):
    """Return the gradient (X, DP) of the queries (or keys) that are the rows of `part` (X, X).

    `part` is the gradient of the tile's products.
    """
    X: tl.constexpr = F.KEYS
    own = tl.arange(0, X)
    lower, upper = load_tile_vectors(table_ptr, rows, keys, sizes, F)
    # rotate every row: the gradient of each distance's product (X, X)
    place = own[None, :] + own[:, None] + 1
    if OF_KEYS:
        place = own[:, None] - own[None, :] + X - 1
    turned = tl.gather(part, place % X, 1)
    # (X, X distances) (X distances, DP), lower and upper ones
    in_low = lower_distance_mask(X, OF_KEYS, True)
    back = matmul(tl.where(in_low, turned, 0.0).to(lower.dtype), lower, F.PRECISION)
    back += matmul(tl.where(in_low, 0.0, turned).to(lower.dtype), upper, F.PRECISION)
    return back


# ---------------------------------------------------------------------------------------------------------------------
# Logits.


@triton.jit
def reset_cells(at, start, first):
    """Return which cells of a tile lie in the first token's row, and which in its column."""
    row = start + at.i == first
    return row, (at.j == first) & (start + at.i != first)


@triton.jit
def add_kind(total, replaced, part, RESET: tl.constexpr):
    """Add `part` to `total`, or with RESET to `replaced`, which the first token's row and column leave out."""
    if RESET:
        replaced += part
    else:
        total += part
    return total, replaced


@triton.jit
def tile_logits(
    rows, keys, at, operands, reset, strides, sizes, PHASE: tl.constexpr, BY_KEY: tl.constexpr, F: tl.constexpr
):
    """Compute the logits of a tile: (rows, keys), or with BY_KEY (keys, rows)."""
    # content = scale q.k: (rows, DP) (DP, keys)
    content = content_products(rows, keys, at, operands, sizes, PHASE, BY_KEY, F).to(F.ACC) * F.SCALE
    gate, by_query, by_key = 1.0, 1.0, 1.0
    if F.GATE:
        gate = read_scalars(operands.gate, at.d, sizes, PHASE)
    if F.MULTIPLIERS:
        by_query = read_products(operands.query_multipliers, at.i, strides.qp_t, at.inside, at.d, sizes, PHASE)
        by_key = read_products(operands.key_multipliers, at.j, strides.kp_t, at.there, at.d, sizes, PHASE)
    s = content * gate * by_query * by_key
    # what the reset replaces is summed apart
    replaced = tl.zeros_like(s)
    if F.LONG_Q or F.LONG_K:
        part = long_table_products(rows, keys, operands, sizes, BY_KEY, F)
        s, replaced = add_kind(s, replaced, part * F.SCALE, F.RESET & 1)
    if F.QUERY_PRODUCTS:
        part = read_products(operands.query_products, at.i, strides.qp_t, at.inside, at.d, sizes, PHASE)
        s, replaced = add_kind(s, replaced, part.to(F.ACC) * F.SCALE, F.RESET & 1)
    if F.KEY_PRODUCTS:
        part = read_products(operands.key_products, at.j, strides.kp_t, at.there, at.d, sizes, PHASE)
        s, replaced = add_kind(s, replaced, part.to(F.ACC) * F.SCALE, F.RESET & 1)
    if F.STATIC:
        part = read_scalars(operands.static, at.d, sizes, PHASE)
        s, replaced = add_kind(s, replaced, part, F.RESET & 2)
    if F.FACTORS:
        # (rows, RP) (RP, keys)
        part = dot_products(rows.factors, keys.factors, BY_KEY, F.PRECISION)
        s, replaced = add_kind(s, replaced, part, F.RESET & 4)
    if F.RESET:
        row, column = reset_cells(at, sizes.start, reset.first)
        s += tl.where(row, reset.row, tl.where(column, reset.column, replaced))
    return TileLogits(s, content, gate, by_query, by_key)


# ---------------------------------------------------------------------------------------------------------------------
# Their gradient.


@triton.jit
def load_saved(rows, saved, strides, F: tl.constexpr):
    """Load what the backward pass reads of a tile's queries; a query that does not exist gets probabilities of 0."""
    i, inside = rows.index, rows.inside
    return SavedRows(
        dout=load_block(saved.dout, i, strides.out_t, inside, F.D, F.DP),
        row_max=tl.load(saved.row_max + i, mask=inside, other=0.0),
        log2_sum=tl.load(saved.log2_sum + i, mask=inside, other=float("inf")),
        delta=tl.load(saved.delta + i, mask=inside, other=0.0),
    )


@triton.jit
def tile_gradient(
    n,
    s,
    v,
    of_rows,
    rows,
    keys,
    at,
    operands,
    saved,
    sizes,
    seed,
    PHASE: tl.constexpr,
    BY_KEY: tl.constexpr,
    F: tl.constexpr,
):
    """Return a tile's probabilities after dropout, and the gradient of its logits `s`.

    `v` (keys, DP) are the values, and `of_rows` what `load_saved` returned.
    """
    if BY_KEY:
        row_max, log2_sum, delta = of_rows.row_max[None, :], of_rows.log2_sum[None, :], of_rows.delta[None, :]
    else:
        row_max, log2_sum, delta = of_rows.row_max[:, None], of_rows.log2_sum[:, None], of_rows.delta[:, None]
    # probabilities p = exp(s - row_max) / sum
    p = mask_cells(tl.exp2((s - row_max) * LOG2E - log2_sum), 0.0, at, operands, sizes, PHASE, F)
    # dp = dout v^T: (rows, DP) (DP, keys)
    dp = dot_products(of_rows.dout, v, BY_KEY, F.PRECISION).to(F.ACC)
    if F.VALUES:
        part = read_products(saved.dprobs, at.i, sizes.near_width, at.inside, at.d, sizes, PHASE)
        dp += part.to(F.ACC)
    used = p
    if F.DROPOUT:
        keep = dropout_mask(seed, n, rows, keys, BY_KEY, F)
        scale = 65536.0 / (65536 - F.DROPOUT)
        used = tl.where(keep, p * scale, 0.0)
        dp = tl.where(keep, dp * scale, 0.0)
    # ds = p (dp - sum over keys of p dp)
    return used, p * (dp - delta)


@triton.jit
def zero_replaced(ds, at, reset, sizes, KIND: tl.constexpr, F: tl.constexpr):
    """Return the gradient of what a kind (a bit of RESET) adds to logits: 0 where the reset replaces it."""
    if F.RESET & KIND:
        row, column = reset_cells(at, sizes.start, reset.first)
        ds = tl.where(row | column, 0.0, ds)
    return ds


@triton.jit
def sum_clipped_ends(part, left, right, at, sizes, PHASE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    """Add what a tile (x, y) has in the near window's clipped ends to `left` (x,) and `right` (x,)."""
    if PHASE == 0:
        left += tl.sum(part, 1)
    elif PHASE == 2:
        right += tl.sum(part, 1)
    else:
        low, width = sizes.near_low, sizes.near_width
        if LEFT:
            left += tl.sum(tl.where(at.d <= low, part, 0.0), 1)
        if RIGHT:
            right += tl.sum(tl.where(at.d >= low + width - 1, part, 0.0), 1)
    return left, right


@triton.jit
def store_near_cells(ptr, part, index, stride, at, sizes):
    """Store a tile's cells between the clipped ends into (length, near_width); each belongs to one query and key."""
    place = ptr + index * stride + (at.d - sizes.near_low)
    tl.store(place, part, mask=in_near_table(at, sizes))


@triton.jit
def store_products(ptr, part, ends, index, stride, at, sizes, PHASE: tl.constexpr, F: tl.constexpr):
    """Store a tile's gradients of products (length, near_width), and add the clipped ends' to `ends`, a pair (x,)."""
    if PHASE == 1:
        store_near_cells(ptr, part, index, stride, at, sizes)
    left, right = ends
    return sum_clipped_ends(part, left, right, at, sizes, PHASE, F.NEAR_LEFT, F.NEAR_RIGHT)


@triton.jit
def store_clipped_ends(ptr, ends, index, stride, width, inside):
    """Store the sums of the clipped ends, a pair, as first and last column of (length, width)."""
    left, right = ends
    tl.store(ptr + index * stride, left, mask=inside)
    tl.store(ptr + index * stride + width - 1, right, mask=inside)
