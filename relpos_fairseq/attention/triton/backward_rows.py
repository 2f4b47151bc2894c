"""The backward kernel that owns rows of queries: their gradients, those of tables and of scalars.

Every cell of a band is one (query, key) pair, so that its gradient is stored, not added; tails are
sums of rows.  Gradients of scalars are sums along diagonals of tiles, handed from tile to tile, one
buffer a block of rows.  No atomics, here or in `backward_keys.py`: same inputs, same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.forward import VARYING
from relpos_fairseq.attention.triton.logits import (
    blocks_of,
    gradient,
    in_band,
    logits,
    numbers_of,
    reset_cells,
    saved_at,
    store_band,
    store_tails,
    to_head,
)
from relpos_fairseq.attention.triton.tile import (
    block_of,
    diagonals,
    keys_seen,
    product,
    store_block,
    wide_back,
)


@triton.jit
def store_diagonals(
    ptr, part, left, right, carry, first_distance, low,
    KEYS: tl.constexpr, PHASE: tl.constexpr,
):  # fmt: skip
    """Store a tile's sums by distance: (KEYS,) of its lower distances, the upper ones are carried.

    `first_distance`: of the tile's first row and first key.  The tile to the right has this tile's
    upper distances for its lower ones, and adds what was carried to them.
    """
    if PHASE == 0:
        left += tl.sum(part, 1)
    elif PHASE == 2:
        right += tl.sum(part, 1)
    else:
        lower, upper = diagonals(part, KEYS)
        at = first_distance - low + KEYS + tl.arange(0, KEYS)
        tl.store(ptr + at, lower + carry)
        carry = upper
    return left, right, carry


@triton.jit(do_not_specialize=VARYING)
def rows_kernel(
    # operands, as `logits` lists them
    q_ptr, right_q_ptr, wide_q_ptr, k_ptr, wide_k_ptr, v_ptr,
    query_products_ptr, query_multipliers_ptr, key_products_ptr, key_multipliers_ptr,
    content_band_ptr, query_vectors_ptr, key_vectors_ptr, static_ptr, gate_ptr,
    query_factors_ptr, key_factors_ptr, reset_ptr, first_ptr, padding_ptr, documents_ptr,
    # what the forward pass kept, and gradients of output and band's probabilities
    dout_ptr, top_ptr, mass_ptr, delta_ptr, dprobs_ptr,
    # results
    dq_ptr, dright_q_ptr, dwide_q_ptr, dquery_products_ptr, dquery_multipliers_ptr,
    dcontent_band_ptr, dquery_factors_ptr, dscalars_ptr, dsums_ptr,
    # strides of batch, heads, rows
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t,
    qp_b, qp_h, qp_t, kp_b, kp_h, kp_t, qf_b, qf_h, qf_t, kf_b, kf_h, kf_t,
    static_h, gate_h, reset_h, qv_h, kv_h, first_b,
    # sizes, the first query's slot, and windows of distances
    heads, tgt_len, src_len, start, low, high, vector_low, width, scalar_low, scalar_width,
    wide_low, wide_width, seed,
    # channels and factors, as they are and padded to a power of two; a tile; types
    D: tl.constexpr, DP: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    # masks, dropout of DROP in 65536
    CAUSAL: tl.constexpr, PADDING: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    DROP: tl.constexpr,
    # which operands there are
    SCALE: tl.constexpr, ADD_Q: tl.constexpr, ADD_K: tl.constexpr, PRODUCT: tl.constexpr,
    REPLACED: tl.constexpr, VALUES: tl.constexpr, STATIC: tl.constexpr, GATE: tl.constexpr,
    FACTORS: tl.constexpr, RESET: tl.constexpr, WIDE_Q: tl.constexpr, WIDE_K: tl.constexpr,
    # which tails are among visible distances: of vectors, of all tables
    LEFT: tl.constexpr, RIGHT: tl.constexpr, FAR_LEFT: tl.constexpr, FAR_RIGHT: tl.constexpr,
    STATIC_GRAD: tl.constexpr, GATE_GRAD: tl.constexpr,
):  # fmt: skip
    """Evaluate the gradients that belong to ROWS queries of one head.

    dscalars (N, blocks, 2, high - low + 1 + 4 KEYS) are sums over the rows by distance, of the
    static logits and of the gate, from distance low - 2 KEYS on; dsums (N, blocks, 8) those of
    whole tail tiles (static left, right, gate left, right) and of the reset's column.
    """
    blocks = tl.cdiv(tgt_len, ROWS)
    n = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks
    first_row = block * ROWS
    (
        q_ptr, right_q_ptr, wide_q_ptr, k_ptr, wide_k_ptr, v_ptr,
        query_products_ptr, query_multipliers_ptr, key_products_ptr, key_multipliers_ptr,
        content_band_ptr, query_vectors_ptr, key_vectors_ptr, static_ptr, gate_ptr,
        query_factors_ptr, key_factors_ptr, first, reset_row, reset_column,
        padding_ptr, documents_ptr,
    ) = to_head(
        n, heads, tgt_len, src_len, width, first_b,
        q_ptr, right_q_ptr, wide_q_ptr, q_b, q_h, k_ptr, wide_k_ptr, k_b, k_h, v_ptr, v_b, v_h,
        query_products_ptr, query_multipliers_ptr, qp_b, qp_h,
        key_products_ptr, key_multipliers_ptr, kp_b, kp_h, content_band_ptr,
        query_vectors_ptr, qv_h, key_vectors_ptr, kv_h, static_ptr, static_h, gate_ptr, gate_h,
        query_factors_ptr, qf_b, qf_h, key_factors_ptr, kf_b, kf_h,
        reset_ptr, reset_h, first_ptr, padding_ptr, documents_ptr, RESET,
    )  # fmt: skip
    dout_ptr, top_ptr, mass_ptr, delta_ptr, dprobs_ptr = saved_at(
        n, heads, tgt_len, width, out_b, out_h, dout_ptr, top_ptr, mass_ptr, delta_ptr, dprobs_ptr
    )
    b, h, n64 = (n // heads).to(tl.int64), (n % heads).to(tl.int64), n.to(tl.int64)
    i = first_row + tl.arange(0, ROWS)
    inside = i < tgt_len
    ii, within = i[:, None], inside[:, None]
    channel, place = tl.arange(0, DP), tl.arange(0, RP)
    q, right_q, wide_q, query_factors = blocks_of(
        q_ptr, right_q_ptr, wide_q_ptr, query_factors_ptr, i, q_t, qf_t, inside,
        D, DP, RANK, RP, REPLACED, WIDE_Q, FACTORS,
    )  # fmt: skip
    dout = block_of(dout_ptr, i, out_t, channel, inside, D, DP != D)
    top, mass, delta = numbers_of(top_ptr, mass_ptr, delta_ptr, i, inside)
    of_q = b * q_b + h * q_h
    dquery_products_ptr += b * qp_b + h * qp_h
    dquery_multipliers_ptr += b * qp_b + h * qp_h
    dcontent_band_ptr += n64 * tgt_len * width
    cells = high - low + 1 + 4 * KEYS
    dscalars_ptr += (n64 * blocks + block) * 2 * cells
    dsums_ptr += (n64 * blocks + block) * 8
    slot = first_row + start
    begin, middle, after, end = keys_seen(
        slot, src_len, low, high, ROWS, KEYS, CAUSAL, WINDOW, FAR_LEFT, FAR_RIGHT
    )

    dq = tl.zeros((ROWS, DP), ACC)
    dright_q, dwide_q, dquery_factors = dq, dq, dq
    if FACTORS:
        dquery_factors = tl.zeros((ROWS, RP), ACC)
    none = tl.zeros((ROWS,), ACC)
    add_left, add_right, times_left, times_right = none, none, none, none  # tails of products
    static_left, static_right, gate_left, gate_right = none, none, none, none
    column_sum = none
    carry = tl.zeros((KEYS,), ACC)
    static_carry, gate_carry = carry, carry
    for PHASE in tl.static_range(3):
        if (PHASE == 0 and FAR_LEFT) or PHASE == 1 or (PHASE == 2 and FAR_RIGHT):
            if PHASE == 0:
                from_key, to_key = begin, middle
            elif PHASE == 1:
                from_key, to_key = middle, after
            else:
                from_key, to_key = after, end
            for first_key in range(from_key, to_key, KEYS):
                j = first_key + tl.arange(0, KEYS)
                here = j < src_len
                jj, there = j[None, :], here[None, :]
                d = jj - (start + ii)
                # logits s, and their gradient ds (ROWS, KEYS)
                v = block_of(v_ptr, j, v_t, channel, here, D, DP != D)
                k, _, wide_k, key_factors = blocks_of(
                    k_ptr, k_ptr, wide_k_ptr, key_factors_ptr, j, k_t, kf_t, here,
                    D, DP, RANK, RP, False, WIDE_K, FACTORS,
                )  # fmt: skip
                wide_at = first_key - first_row - start - (KEYS - 1) - wide_low
                s, content, gate, by_query, by_key = logits(
                    q, right_q, wide_q, query_factors, k, wide_k, key_factors,
                    query_products_ptr, query_multipliers_ptr, qp_t,
                    key_products_ptr, key_multipliers_ptr, kp_t,
                    content_band_ptr, query_vectors_ptr, key_vectors_ptr, static_ptr, gate_ptr,
                    ii, jj, start, within, there, first, reset_row, reset_column,
                    vector_low, width, scalar_low, scalar_width, wide_at, wide_width,
                    PHASE, False, D, DP, KEYS, ACC, SCALE, PRECISION, ADD_Q, ADD_K, PRODUCT,
                    REPLACED, STATIC, GATE, FACTORS, RESET, LEFT, RIGHT, WIDE_Q, WIDE_K,
                )  # fmt: skip
                _, ds = gradient(
                    s, v, dout, top[:, None], mass[:, None], delta[:, None], dprobs_ptr,
                    ii, jj, start, within, there, seed, n, i, first_key, padding_ptr, documents_ptr,
                    vector_low, width, PHASE, False, ROWS, KEYS, ACC, PRECISION,
                    CAUSAL, PADDING, WINDOW, DOCUMENTS, DROP, VALUES,
                )  # fmt: skip
                # `free`: the gradient of what the reset did not replace
                free = ds
                if RESET:
                    row, column = reset_cells(ii, jj, start, first)
                    free = tl.where(row | column, 0.0, ds)
                    column_sum += tl.sum(tl.where(column, ds, 0.0), 1)
                of_vectors, of_scalars, of_factors = ds, ds, ds
                if RESET & 1:
                    of_vectors = free
                if RESET & 2:
                    of_scalars = free
                if RESET & 4:
                    of_factors = free
                # vectors over many distances: dwide_q (ROWS, DP)
                if WIDE_Q:
                    dwide_q += wide_back(
                        of_vectors * SCALE, query_vectors_ptr, wide_at, wide_width, wide_q,
                        D, DP, KEYS, False, PRECISION,
                    )  # fmt: skip
                # products with a band: dquery_products (T, width)
                if ADD_Q:
                    add_left, add_right = store_band(
                        dquery_products_ptr, of_vectors * SCALE, add_left, add_right, ii, qp_t,
                        d, vector_low, width, within, there, PHASE, LEFT, RIGHT,
                    )  # fmt: skip
                # static, by distance
                if STATIC_GRAD:
                    static_left, static_right, static_carry = store_diagonals(
                        dscalars_ptr, of_scalars, static_left, static_right, static_carry,
                        first_key - slot, low, KEYS, PHASE,
                    )  # fmt: skip
                # factors: (ROWS, KEYS) (KEYS, RP)
                if FACTORS:
                    dquery_factors += product(
                        of_factors.to(key_factors.dtype), key_factors, PRECISION
                    )  # fmt: skip
                # what multiplies the content: dquery_multipliers (T, width), and the gate
                if PRODUCT:
                    part = ds * content * by_key
                    if GATE:
                        part *= gate
                    times_left, times_right = store_band(
                        dquery_multipliers_ptr, part, times_left, times_right, ii, qp_t,
                        d, vector_low, width, within, there, PHASE, LEFT, RIGHT,
                    )  # fmt: skip
                if GATE_GRAD:
                    part = ds * content
                    if PRODUCT:
                        part = part * by_query * by_key
                    gate_left, gate_right, gate_carry = store_diagonals(
                        dscalars_ptr + cells, part, gate_left, gate_right, gate_carry,
                        first_key - slot, low, KEYS, PHASE,
                    )  # fmt: skip
                # content: dq += dc k, (ROWS, KEYS) (KEYS, DP)
                dc = ds * SCALE
                if GATE:
                    dc = dc * gate
                if PRODUCT:
                    dc = dc * by_query * by_key
                if not REPLACED or PHASE == 0:
                    dq += product(dc.to(k.dtype), k, PRECISION)
                elif PHASE == 2:
                    dright_q += product(dc.to(k.dtype), k, PRECISION)
                else:
                    band = in_band(d, vector_low, width, within, there)
                    tl.store(dcontent_band_ptr + ii * width + (d - vector_low), dc, mask=band)
                    if LEFT:
                        part = tl.where(d <= vector_low, dc, 0.0).to(k.dtype)
                        dq += product(part, k, PRECISION)
                    if RIGHT:
                        part = tl.where(d >= vector_low + width - 1, dc, 0.0).to(k.dtype)
                        dright_q += product(part, k, PRECISION)
    store_block(dq_ptr + of_q, dq, i, q_t, channel, inside, D, DP != D)
    if WIDE_Q:
        store_block(dwide_q_ptr + of_q, dwide_q, i, q_t, channel, inside, D, DP != D)
    if REPLACED:
        store_block(dright_q_ptr + of_q, dright_q, i, q_t, channel, inside, D, DP != D)
    if ADD_Q:
        store_tails(dquery_products_ptr, add_left, add_right, i, qp_t, width, inside)
    if PRODUCT:
        store_tails(dquery_multipliers_ptr, times_left, times_right, i, qp_t, width, inside)
    if FACTORS:
        dquery_factors_ptr += n64 * tgt_len * RANK
        store_block(dquery_factors_ptr, dquery_factors, i, RANK, place, inside, RANK, RP != RANK)
    if STATIC_GRAD or GATE_GRAD:
        tiles = tl.cdiv(tl.maximum(after - middle, 0), KEYS)
        at = middle + tiles * KEYS - slot - low + KEYS + tl.arange(0, KEYS)
        if STATIC_GRAD:
            tl.store(dscalars_ptr + at, static_carry, mask=at < cells)
            tl.store(dsums_ptr, tl.sum(static_left, 0))
            tl.store(dsums_ptr + 1, tl.sum(static_right, 0))
        if GATE_GRAD:
            tl.store(dscalars_ptr + cells + at, gate_carry, mask=at < cells)
            tl.store(dsums_ptr + 2, tl.sum(gate_left, 0))
            tl.store(dsums_ptr + 3, tl.sum(gate_right, 0))
    if RESET:
        tl.store(dsums_ptr + 4, tl.sum(column_sum, 0))
