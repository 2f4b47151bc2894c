"""Compute all gradients of fused attention by four kernels, without atomics: same inputs, same bits.

`sum_delta` runs first.  Programs of `query_gradients` then own blocks of queries, of `key_gradients` blocks of keys, of
`diagonal_gradients` diagonals of tiles: each stores every gradient that it owns once.  The gradient of a near table's
product belongs to one query and key and is stored; its clipped ends are sums of a row (of a column, for keys).
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.logits import (
    load_saved,
    lower_distance_mask,
    move_saved_to_head,
    move_to_head,
    reset_cells,
    split_head_index,
    store_clipped_ends,
    store_near_cells,
    store_products,
    tile_gradient,
    tile_logits,
    vector_products_backward,
    zero_replaced,
)
from relpos_fairseq.attention.triton.tile import (
    load_block,
    load_keys,
    load_queries,
    load_values,
    locate_cells,
    matmul,
    store_block,
    sum_diagonals,
    visible_keys,
    visible_rows,
)


@triton.jit
def sum_delta(saved, results, strides, sizes, F: tl.constexpr):
    """Sum probability times its gradient over keys, from output times its gradient: delta (B, H, T)."""
    tgt_len, width = sizes.tgt_len, sizes.near_width
    blocks = tl.cdiv(tgt_len, F.ROWS)
    n = tl.program_id(0) // blocks
    saved = move_saved_to_head(n, saved, strides, sizes)
    i = tl.program_id(0) % blocks * F.ROWS + tl.arange(0, F.ROWS)
    inside = i < tgt_len
    # the exact output and its gradient (ROWS, DP)
    out = load_block(saved.out, i, strides.out_t, inside, F.D, F.DP).to(F.ACC)
    if F.OUT_ERROR:
        out += load_block(saved.out_error, i, strides.out_t, inside, F.D, F.DP).to(F.ACC)
    dout = load_block(saved.dout, i, strides.out_t, inside, F.D, F.DP).to(F.ACC)
    # delta (ROWS,)
    delta = tl.sum(out * dout, 1)
    if F.VALUES:
        # what vectors of values add: probabilities by distance (ROWS, near_width), 16 columns at a time
        for column in range(0, width, 16):
            c = column + tl.arange(0, 16)[None, :]
            mask = inside[:, None] & (c < width)
            probs = tl.load(saved.probs + i[:, None] * width + c, mask=mask, other=0.0).to(F.ACC)
            dprobs = tl.load(saved.dprobs + i[:, None] * width + c, mask=mask, other=0.0).to(F.ACC)
            delta += tl.sum(probs * dprobs, 1)
    tl.store(results.delta + n.to(tl.int64) * tgt_len + i, delta, mask=inside)


# ---------------------------------------------------------------------------------------------------------------------
# Queries, and scalars.


@triton.jit
def store_diagonals(ptr, part, sums, first_distance, low, KEYS: tl.constexpr, PHASE: tl.constexpr):
    """Store a tile's sums by distance, and return `sums`: left and right clipped end (ROWS,), carry (KEYS,).

    `first_distance` is that of the tile's first query and first key.  A tile's KEYS upper distances are the lower ones
    of the tile to its right, to which they are carried.
    """
    left, right, carry = sums
    if PHASE == 0:
        left += tl.sum(part, 1)
    elif PHASE == 2:
        right += tl.sum(part, 1)
    else:
        lower, upper = sum_diagonals(part, KEYS)
        at = first_distance - low + KEYS + tl.arange(0, KEYS)
        tl.store(ptr + at, lower + carry)
        carry = upper
    return left, right, carry


@triton.jit
def store_diagonal_sums(scalars_ptr, sums_ptr, sums, cell, cells):
    """Store the last tile's carried sums by distance, and the two clipped ends."""
    left, right, carry = sums
    tl.store(scalars_ptr + cell, carry, mask=cell < cells)
    tl.store(sums_ptr, tl.sum(left, 0))
    tl.store(sums_ptr + 1, tl.sum(right, 0))


@triton.jit
def query_gradients(operands, saved, results, strides, sizes, seed, F: tl.constexpr):
    """Compute the gradients that belong to ROWS queries of one head, and sums for those of scalars.

    Of `RowsResults`, dscalars are a block's sums by distance, from distance outer_low - 2 KEYS on; dsums are those of
    tiles outside the outer window and of the reset's column.
    """
    tgt_len, start, width = sizes.tgt_len, sizes.start, sizes.near_width
    blocks = tl.cdiv(tgt_len, F.ROWS)
    n = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks
    first_row = block * F.ROWS
    operands, reset = move_to_head(n, operands, strides, sizes, F)
    saved = move_saved_to_head(n, saved, strides, sizes)
    # queries and dout (ROWS, DP); row_max, log2_sum, delta (ROWS,)
    rows = load_queries(first_row, operands, strides, sizes, F)
    of_rows = load_saved(rows, saved, strides, F)
    b, h, n64 = split_head_index(n, sizes.heads)
    of_q = b * strides.q_b + h * strides.q_h
    of_products = b * strides.qp_b + h * strides.qp_h
    dquery_products = results.dquery_products + of_products
    dquery_multipliers = results.dquery_multipliers + of_products
    dnear_content = results.dnear_content + n64 * tgt_len * width
    cells = sizes.outer_high - sizes.outer_low + 1 + 4 * F.KEYS
    dscalars = results.dscalars + (n64 * blocks + block) * 2 * cells
    dsums = results.dsums + (n64 * blocks + block) * 8
    slot = first_row + start
    bounds = visible_keys(slot, sizes, F)

    dq = tl.zeros((F.ROWS, F.DP), F.ACC)
    dright_q, dlong_q, dquery_factors = dq, dq, dq
    if F.FACTORS:
        dquery_factors = tl.zeros((F.ROWS, F.RP), F.ACC)
    none, carry = tl.zeros((F.ROWS,), F.ACC), tl.zeros((F.KEYS,), F.ACC)
    product_ends, multiplier_ends = (none, none), (none, none)
    static_sums, gate_sums = (none, none, carry), (none, none, carry)
    column_sum = none
    for PHASE in tl.static_range(3):
        if PHASE == 1 or (PHASE == 0 and F.OUTER_LEFT) or (PHASE == 2 and F.OUTER_RIGHT):
            for first_key in range(bounds[PHASE], bounds[PHASE + 1], F.KEYS):
                # keys and values (KEYS, DP)
                v = load_values(first_key, operands, strides, sizes, F)
                keys = load_keys(first_key, operands, strides, sizes, F)
                # logits, and their gradient ds (ROWS, KEYS)
                at = locate_cells(rows, keys, start, False)
                tile = tile_logits(rows, keys, at, operands, reset, strides, sizes, PHASE, False, F)
                _, ds = tile_gradient(
                    n, tile.s, v, of_rows, rows, keys, at, operands, saved, sizes, seed, PHASE, False, F
                )
                of_vectors = zero_replaced(ds, at, reset, sizes, 1, F) * F.SCALE
                # the reset's column (ROWS,)
                if F.RESET:
                    _, column = reset_cells(at, start, reset.first)
                    column_sum += tl.sum(tl.where(column, ds, 0.0), 1)
                # long tables: dlong_q (ROWS, DP)
                if F.LONG_Q:
                    dlong_q += vector_products_backward(of_vectors, operands.query_vectors, rows, keys, sizes, False, F)
                # near tables: dquery_products (T, near_width)
                if F.QUERY_PRODUCTS:
                    product_ends = store_products(
                        dquery_products, of_vectors, product_ends, at.i, strides.qp_t, at, sizes, PHASE, F
                    )
                # static, by distance
                if F.STATIC_GRAD:
                    part = zero_replaced(ds, at, reset, sizes, 2, F)
                    static_sums = store_diagonals(
                        dscalars, part, static_sums, first_key - slot, sizes.outer_low, F.KEYS, PHASE
                    )
                # factors: (ROWS, KEYS) (KEYS, RP)
                if F.FACTORS:
                    part = zero_replaced(ds, at, reset, sizes, 4, F).to(keys.factors.dtype)
                    dquery_factors += matmul(part, keys.factors, F.PRECISION)
                # what is multiplied with q.k: dquery_multipliers (T, near_width), and the gate by distance
                if F.MULTIPLIERS:
                    part = ds * tile.content * tile.by_key * tile.gate
                    multiplier_ends = store_products(
                        dquery_multipliers, part, multiplier_ends, at.i, strides.qp_t, at, sizes, PHASE, F
                    )
                if F.GATE_GRAD:
                    part = ds * tile.content * tile.by_query * tile.by_key
                    gate_sums = store_diagonals(
                        dscalars + cells, part, gate_sums, first_key - slot, sizes.outer_low, F.KEYS, PHASE
                    )
                # q.k: dq += dc k, (ROWS, KEYS) (KEYS, DP); of a trilinear table the clipped ends alone
                k = keys.content
                dc = ds * F.SCALE * tile.gate * tile.by_query * tile.by_key
                if not F.TRILINEAR or PHASE == 0:
                    dq += matmul(dc.to(k.dtype), k, F.PRECISION)
                elif PHASE == 2:
                    dright_q += matmul(dc.to(k.dtype), k, F.PRECISION)
                else:
                    store_near_cells(dnear_content, dc, at.i, width, at, sizes)
                    if F.NEAR_LEFT:
                        part = tl.where(at.d <= sizes.near_low, dc, 0.0).to(k.dtype)
                        dq += matmul(part, k, F.PRECISION)
                    if F.NEAR_RIGHT:
                        part = tl.where(at.d >= sizes.near_low + width - 1, dc, 0.0).to(k.dtype)
                        dright_q += matmul(part, k, F.PRECISION)
    i, inside = rows.index, rows.inside
    store_block(results.dq + of_q, dq, i, strides.q_t, inside, F.D, F.DP)
    if F.LONG_Q:
        store_block(results.dlong_q + of_q, dlong_q, i, strides.q_t, inside, F.D, F.DP)
    if F.TRILINEAR:
        store_block(results.dright_q + of_q, dright_q, i, strides.q_t, inside, F.D, F.DP)
    if F.QUERY_PRODUCTS:
        store_clipped_ends(dquery_products, product_ends, i, strides.qp_t, width, inside)
    if F.MULTIPLIERS:
        store_clipped_ends(dquery_multipliers, multiplier_ends, i, strides.qp_t, width, inside)
    if F.FACTORS:
        of_factors = n64 * tgt_len * F.RANK
        store_block(results.dquery_factors + of_factors, dquery_factors, i, F.RANK, inside, F.RANK, F.RP)
    if F.STATIC_GRAD or F.GATE_GRAD:
        tiles = tl.cdiv(tl.maximum(bounds[2] - bounds[1], 0), F.KEYS)
        cell = bounds[1] + tiles * F.KEYS - slot - sizes.outer_low + F.KEYS + tl.arange(0, F.KEYS)
        if F.STATIC_GRAD:
            store_diagonal_sums(dscalars, dsums, static_sums, cell, cells)
        if F.GATE_GRAD:
            store_diagonal_sums(dscalars + cells, dsums + 2, gate_sums, cell, cells)
    if F.RESET:
        tl.store(dsums + 4, tl.sum(column_sum, 0))


# ---------------------------------------------------------------------------------------------------------------------
# Keys and values.


@triton.jit
def key_gradients(operands, saved, results, strides, sizes, seed, F: tl.constexpr):
    """Compute the gradients that belong to KEYS keys of one head, into `KeysResults`; tiles are (KEYS, ROWS)."""
    src_len, width = sizes.src_len, sizes.near_width
    blocks = tl.cdiv(src_len, F.KEYS)
    n = tl.program_id(0) // blocks
    first_key = tl.program_id(0) % blocks * F.KEYS
    operands, reset = move_to_head(n, operands, strides, sizes, F)
    saved = move_saved_to_head(n, saved, strides, sizes)
    # keys and values (KEYS, DP)
    keys = load_keys(first_key, operands, strides, sizes, F)
    j, there = keys.index, keys.inside
    v = load_values(first_key, operands, strides, sizes, F)
    b, h, n64 = split_head_index(n, sizes.heads)
    of_k = b * strides.k_b + h * strides.k_h
    of_products = b * strides.kp_b + h * strides.kp_h
    dkey_products = results.dkey_products + of_products
    dkey_multipliers = results.dkey_multipliers + of_products
    bounds = visible_rows(first_key, sizes, F)

    dk, dv = tl.zeros((F.KEYS, F.DP), F.ACC), tl.zeros((F.KEYS, F.DP), F.ACC)
    dkey_factors, dlong_k = dk, dk
    if F.FACTORS:
        dkey_factors = tl.zeros((F.KEYS, F.RP), F.ACC)
    none = tl.zeros((F.KEYS,), F.ACC)
    product_ends, multiplier_ends = (none, none), (none, none)
    for PHASE in tl.static_range(2, -1, -1):
        if PHASE == 1 or (PHASE == 0 and F.OUTER_LEFT) or (PHASE == 2 and F.OUTER_RIGHT):
            for first_row in range(bounds[2 - PHASE], bounds[3 - PHASE], F.ROWS):
                # queries and dout (ROWS, DP); row_max, log2_sum, delta (ROWS,)
                rows = load_queries(first_row, operands, strides, sizes, F)
                of_rows = load_saved(rows, saved, strides, F)
                # logits, probabilities p after dropout, gradient ds of logits: (KEYS, ROWS)
                at = locate_cells(rows, keys, sizes.start, True)
                tile = tile_logits(rows, keys, at, operands, reset, strides, sizes, PHASE, True, F)
                p, ds = tile_gradient(
                    n, tile.s, v, of_rows, rows, keys, at, operands, saved, sizes, seed, PHASE, True, F
                )
                # dv += p dout: (KEYS, ROWS) (ROWS, DP)
                dv += matmul(p.to(of_rows.dout.dtype), of_rows.dout, F.PRECISION)
                of_vectors = zero_replaced(ds, at, reset, sizes, 1, F) * F.SCALE
                # long tables: dlong_k (KEYS, DP)
                if F.LONG_K:
                    dlong_k += vector_products_backward(of_vectors, operands.key_vectors, rows, keys, sizes, True, F)
                # near tables: dkey_products (S, near_width)
                if F.KEY_PRODUCTS:
                    product_ends = store_products(
                        dkey_products, of_vectors, product_ends, at.j, strides.kp_t, at, sizes, PHASE, F
                    )
                # factors: (KEYS, ROWS) (ROWS, RP)
                if F.FACTORS:
                    part = zero_replaced(ds, at, reset, sizes, 4, F).to(rows.factors.dtype)
                    dkey_factors += matmul(part, rows.factors, F.PRECISION)
                # what is multiplied with q.k: dkey_multipliers (S, near_width)
                if F.MULTIPLIERS:
                    part = ds * tile.content * tile.by_query * tile.gate
                    multiplier_ends = store_products(
                        dkey_multipliers, part, multiplier_ends, at.j, strides.kp_t, at, sizes, PHASE, F
                    )
                # q.k: dk += dc q, (KEYS, ROWS) (ROWS, DP); of a trilinear table the clipped ends alone
                q = rows.content
                dc = ds * F.SCALE * tile.gate * tile.by_query * tile.by_key
                if not F.TRILINEAR or PHASE == 0:
                    dk += matmul(dc.to(q.dtype), q, F.PRECISION)
                elif PHASE == 2:
                    dk += matmul(dc.to(q.dtype), rows.right, F.PRECISION)
                else:
                    if F.NEAR_LEFT:
                        part = tl.where(at.d <= sizes.near_low, dc, 0.0).to(q.dtype)
                        dk += matmul(part, q, F.PRECISION)
                    if F.NEAR_RIGHT:
                        part = tl.where(at.d >= sizes.near_low + width - 1, dc, 0.0).to(q.dtype)
                        dk += matmul(part, rows.right, F.PRECISION)
    store_block(results.dk + of_k, dk, j, strides.k_t, there, F.D, F.DP)
    of_v = b * strides.v_b + h * strides.v_h
    store_block(results.dv + of_v, dv, j, strides.v_t, there, F.D, F.DP)
    if F.LONG_K:
        store_block(results.dlong_k + of_k, dlong_k, j, strides.k_t, there, F.D, F.DP)
    if F.KEY_PRODUCTS:
        store_clipped_ends(dkey_products, product_ends, j, strides.kp_t, width, there)
    if F.MULTIPLIERS:
        store_clipped_ends(dkey_multipliers, multiplier_ends, j, strides.kp_t, width, there)
    if F.FACTORS:
        of_factors = n64 * src_len * F.RANK
        store_block(results.dkey_factors + of_factors, dkey_factors, j, F.RANK, there, F.RANK, F.RP)


# ---------------------------------------------------------------------------------------------------------------------
# Vectors of long tables.


@triton.jit
def diagonal_gradients(operands, saved, results, strides, sizes, seed, first_diagonal, diagonals, F: tl.constexpr):
    """Sum over one diagonal of tiles the gradients of the vectors for its 2 X distances, for one head.

    The vectors are those that queries (or, F.OF_KEYS, keys) are multiplied with.  The result is parts (B, H, diagonals,
    2, X, D): the lower and the upper X distances of each diagonal.
    """
    X: tl.constexpr = F.KEYS
    n = tl.program_id(0) // diagonals
    diagonal = tl.program_id(0) % diagonals
    shift = first_diagonal + diagonal  # blocks of keys less blocks of rows
    operands, reset = move_to_head(n, operands, strides, sizes, F)
    saved = move_saved_to_head(n, saved, strides, sizes)
    lower, upper = tl.zeros((X, F.DP), F.ACC), tl.zeros((X, F.DP), F.ACC)
    own = tl.arange(0, X)
    begin = tl.maximum(0, -shift)
    end = tl.minimum(tl.cdiv(sizes.tgt_len, X), tl.cdiv(sizes.src_len, X) - shift)
    for block in range(begin, end):
        # queries, dout, keys, values (X, DP); row_max, log2_sum, delta (X,)
        rows = load_queries(block * X, operands, strides, sizes, F)
        keys = load_keys((block + shift) * X, operands, strides, sizes, F)
        of_rows = load_saved(rows, saved, strides, F)
        v = load_values(keys.first, operands, strides, sizes, F)
        # logits, and their gradient ds (X, X)
        at = locate_cells(rows, keys, sizes.start, False)
        tile = tile_logits(rows, keys, at, operands, reset, strides, sizes, 1, False, F)
        _, ds = tile_gradient(n, tile.s, v, of_rows, rows, keys, at, operands, saved, sizes, seed, 1, False, F)
        ds = zero_replaced(ds, at, reset, sizes, 1, F) * F.SCALE
        # gradients by distance (X distances, X queries or keys), the lower and the upper X
        if F.OF_KEYS:
            x = keys.long
            turned = tl.gather(ds, (own[None, :] - own[:, None] + X - 1) % X, 0)
            in_low = lower_distance_mask(X, True, False)
            low_part = tl.where(in_low, turned, 0.0).to(x.dtype)
            up_part = tl.where(in_low, 0.0, turned).to(x.dtype)
        else:
            x = rows.long
            turned = tl.gather(ds, (own[:, None] + own[None, :] + 1) % X, 1)
            in_low = lower_distance_mask(X, False, True)
            low_part = tl.trans(tl.where(in_low, turned, 0.0).to(x.dtype))
            up_part = tl.trans(tl.where(in_low, 0.0, turned).to(x.dtype))
        # (X distances, X) (X, DP)
        lower += matmul(low_part, x, F.PRECISION)
        upper += matmul(up_part, x, F.PRECISION)
    parts = results.parts + (n.to(tl.int64) * diagonals + diagonal) * 2 * X * F.D
    store_block(parts, lower, own, F.D, own < X, F.D, F.DP)
    store_block(parts + X * F.D, upper, own, F.D, own < X, F.D, F.DP)
