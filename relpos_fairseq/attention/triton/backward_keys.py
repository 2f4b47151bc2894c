"""The backward kernel that owns keys: their gradients, the values', and those of keys' tables.

A cell of the band of keys' products is one pair, and is stored; tails are sums of columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.forward import VARYING
from relpos_fairseq.attention.triton.logits import (
    blocks_of,
    gradient,
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
    product,
    rows_seeing,
    store_block,
    wide_back,
)


@triton.jit(do_not_specialize=VARYING)
def keys_kernel(
    # operands, as `logits` lists them
    q_ptr, right_q_ptr, wide_q_ptr, k_ptr, wide_k_ptr, v_ptr,
    query_products_ptr, query_multipliers_ptr, key_products_ptr, key_multipliers_ptr,
    content_band_ptr, query_vectors_ptr, key_vectors_ptr, static_ptr, gate_ptr,
    query_factors_ptr, key_factors_ptr, reset_ptr, first_ptr, padding_ptr, documents_ptr,
    # what the forward pass kept, and gradients of output and band's probabilities
    dout_ptr, top_ptr, mass_ptr, delta_ptr, dprobs_ptr,
    # results
    dk_ptr, dwide_k_ptr, dv_ptr, dkey_products_ptr, dkey_multipliers_ptr, dkey_factors_ptr,
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
):  # fmt: skip
    """Evaluate the gradients that belong to KEYS keys of one head; tiles are (KEYS, ROWS)."""
    blocks = tl.cdiv(src_len, KEYS)
    n = tl.program_id(0) // blocks
    first_key = tl.program_id(0) % blocks * KEYS
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
    j = first_key + tl.arange(0, KEYS)
    here = j < src_len
    jj, there = j[:, None], here[:, None]
    channel, place = tl.arange(0, DP), tl.arange(0, RP)
    k, _, wide_k, key_factors = blocks_of(
        k_ptr, k_ptr, wide_k_ptr, key_factors_ptr, j, k_t, kf_t, here,
        D, DP, RANK, RP, False, WIDE_K, FACTORS,
    )  # fmt: skip
    v = block_of(v_ptr, j, v_t, channel, here, D, DP != D)
    of_k = b * k_b + h * k_h
    dkey_products_ptr += b * kp_b + h * kp_h
    dkey_multipliers_ptr += b * kp_b + h * kp_h
    begin, middle, after, end = rows_seeing(
        first_key, tgt_len, start, low, high, ROWS, KEYS, CAUSAL, WINDOW, FAR_LEFT, FAR_RIGHT
    )

    dk, dv = tl.zeros((KEYS, DP), ACC), tl.zeros((KEYS, DP), ACC)
    dkey_factors, dwide_k = dk, dk
    if FACTORS:
        dkey_factors = tl.zeros((KEYS, RP), ACC)
    none = tl.zeros((KEYS,), ACC)
    add_left, add_right, times_left, times_right = none, none, none, none  # tails of products
    for PHASE in tl.static_range(2, -1, -1):
        if (PHASE == 0 and FAR_LEFT) or PHASE == 1 or (PHASE == 2 and FAR_RIGHT):
            if PHASE == 2:
                from_row, to_row = begin, middle
            elif PHASE == 1:
                from_row, to_row = middle, after
            else:
                from_row, to_row = after, end
            for first_row in range(from_row, to_row, ROWS):
                i = first_row + tl.arange(0, ROWS)
                inside = i < tgt_len
                ii, within = i[None, :], inside[None, :]
                d = jj - (start + ii)
                # logits s, probabilities p after dropout, gradient ds of logits: (KEYS, ROWS)
                q, right_q, wide_q, query_factors = blocks_of(
                    q_ptr, right_q_ptr, wide_q_ptr, query_factors_ptr, i, q_t, qf_t, inside,
                    D, DP, RANK, RP, REPLACED, WIDE_Q, FACTORS,
                )  # fmt: skip
                dout = block_of(dout_ptr, i, out_t, channel, inside, D, DP != D)
                top, mass, delta = numbers_of(top_ptr, mass_ptr, delta_ptr, i, inside)
                wide_at = first_key - first_row - start - (KEYS - 1) - wide_low
                s, content, gate, by_query, by_key = logits(
                    q, right_q, wide_q, query_factors, k, wide_k, key_factors,
                    query_products_ptr, query_multipliers_ptr, qp_t,
                    key_products_ptr, key_multipliers_ptr, kp_t,
                    content_band_ptr, query_vectors_ptr, key_vectors_ptr, static_ptr, gate_ptr,
                    ii, jj, start, within, there, first, reset_row, reset_column,
                    vector_low, width, scalar_low, scalar_width, wide_at, wide_width,
                    PHASE, True, D, DP, KEYS, ACC, SCALE, PRECISION, ADD_Q, ADD_K, PRODUCT,
                    REPLACED, STATIC, GATE, FACTORS, RESET, LEFT, RIGHT, WIDE_Q, WIDE_K,
                )  # fmt: skip
                p, ds = gradient(
                    s, v, dout, top[None, :], mass[None, :], delta[None, :], dprobs_ptr,
                    ii, jj, start, within, there, seed, n, i, first_key, padding_ptr, documents_ptr,
                    vector_low, width, PHASE, True, ROWS, KEYS, ACC, PRECISION,
                    CAUSAL, PADDING, WINDOW, DOCUMENTS, DROP, VALUES,
                )  # fmt: skip
                # dv += p dout, (KEYS, ROWS) (ROWS, DP)
                dv += product(p.to(dout.dtype), dout, PRECISION)
                # `free`: the gradient of what the reset did not replace
                free = ds
                if RESET:
                    row, column = reset_cells(ii, jj, start, first)
                    free = tl.where(row | column, 0.0, ds)
                of_vectors, of_factors = ds, ds
                if RESET & 1:
                    of_vectors = free
                if RESET & 4:
                    of_factors = free
                # vectors over many distances: dwide_k (KEYS, DP)
                if WIDE_K:
                    dwide_k += wide_back(
                        of_vectors * SCALE, key_vectors_ptr, wide_at, wide_width, wide_k,
                        D, DP, KEYS, True, PRECISION,
                    )  # fmt: skip
                # products with a band: dkey_products (S, width)
                if ADD_K:
                    add_left, add_right = store_band(
                        dkey_products_ptr, of_vectors * SCALE, add_left, add_right, jj, kp_t,
                        d, vector_low, width, within, there, PHASE, LEFT, RIGHT,
                    )  # fmt: skip
                # factors: (KEYS, ROWS) (ROWS, RP)
                if FACTORS:
                    dkey_factors += product(
                        of_factors.to(query_factors.dtype), query_factors, PRECISION
                    )  # fmt: skip
                # what multiplies the content: dkey_multipliers (S, width)
                if PRODUCT:
                    part = ds * content * by_query
                    if GATE:
                        part *= gate
                    times_left, times_right = store_band(
                        dkey_multipliers_ptr, part, times_left, times_right, jj, kp_t,
                        d, vector_low, width, within, there, PHASE, LEFT, RIGHT,
                    )  # fmt: skip
                # content: dk += dc q, (KEYS, ROWS) (ROWS, DP); trilinear: the tails alone
                dc = ds * SCALE
                if GATE:
                    dc = dc * gate
                if PRODUCT:
                    dc = dc * by_query * by_key
                if not REPLACED or PHASE == 0:
                    dk += product(dc.to(q.dtype), q, PRECISION)
                elif PHASE == 2:
                    dk += product(dc.to(q.dtype), right_q, PRECISION)
                else:
                    if LEFT:
                        part = tl.where(d <= vector_low, dc, 0.0).to(q.dtype)
                        dk += product(part, q, PRECISION)
                    if RIGHT:
                        part = tl.where(d >= vector_low + width - 1, dc, 0.0).to(q.dtype)
                        dk += product(part, right_q, PRECISION)
    store_block(dk_ptr + of_k, dk, j, k_t, channel, here, D, DP != D)
    store_block(dv_ptr + b * v_b + h * v_h, dv, j, v_t, channel, here, D, DP != D)
    if WIDE_K:
        store_block(dwide_k_ptr + of_k, dwide_k, j, k_t, channel, here, D, DP != D)
    if ADD_K:
        store_tails(dkey_products_ptr, add_left, add_right, j, kp_t, width, here)
    if PRODUCT:
        store_tails(dkey_multipliers_ptr, times_left, times_right, j, kp_t, width, here)
    if FACTORS:
        dkey_factors_ptr += n64 * src_len * RANK
        store_block(dkey_factors_ptr, dkey_factors, j, RANK, place, here, RANK, RP != RANK)
