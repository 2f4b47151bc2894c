"""Vectors over many distances: unclipped tables and Transformer-XL, in O(length) memory.

A square tile of X queries and X keys has 2 X - 1 distances.  The products of its queries (or keys)
with those vectors are two blocks (X, X), of the lower and the upper distances.  A cell of the tile
takes its number from their diagonals.  Column p of the lower block and of the upper one are never
needed in the same row, so that one block holds both, whose rows are then rotated: one gather inside
the tile, and its inverse for gradients.  The gradient of a vector is a sum over one diagonal of
tiles: a kernel of its own forms it.
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
    to_head,
)
from relpos_fairseq.attention.triton.tile import block_of, product, store_block, wide_edge


@triton.jit(do_not_specialize=[*VARYING, "first_diagonal", "diagonals"])
def diagonals_kernel(
    # operands, as `logits` lists them
    q_ptr, right_q_ptr, wide_q_ptr, k_ptr, wide_k_ptr, v_ptr,
    query_products_ptr, query_multipliers_ptr, key_products_ptr, key_multipliers_ptr,
    content_band_ptr, query_vectors_ptr, key_vectors_ptr, static_ptr, gate_ptr,
    query_factors_ptr, key_factors_ptr, reset_ptr, first_ptr, padding_ptr, documents_ptr,
    # what the forward pass kept, and gradients of output and band's probabilities
    dout_ptr, top_ptr, mass_ptr, delta_ptr, dprobs_ptr,
    # result
    parts_ptr,
    # strides of batch, heads, rows
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t,
    qp_b, qp_h, qp_t, kp_b, kp_h, kp_t, qf_b, qf_h, qf_t, kf_b, kf_h, kf_t,
    static_h, gate_h, reset_h, qv_h, kv_h, first_b,
    # sizes, the first query's slot, and windows of distances
    heads, tgt_len, src_len, start, low, high, vector_low, width, scalar_low, scalar_width,
    wide_low, wide_width, seed, first_diagonal, diagonals,
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
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
    OF_KEYS: tl.constexpr,
):  # fmt: skip
    """Sum what one diagonal of tiles gives the vectors of its 2 X distances, for one head.

    parts (N, diagonals, 2, X, D): the lower and the upper X distances of each diagonal, for the
    vectors that queries (or, OF_KEYS, keys) are multiplied with.
    """
    n = tl.program_id(0) // diagonals
    diagonal = tl.program_id(0) % diagonals
    shift = first_diagonal + diagonal  # blocks of keys less blocks of rows
    n64 = n.to(tl.int64)
    channel = tl.arange(0, DP)
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
    lower, upper = tl.zeros((KEYS, DP), ACC), tl.zeros((KEYS, DP), ACC)
    begin = tl.maximum(0, -shift)
    end = tl.minimum(tl.cdiv(tgt_len, ROWS), tl.cdiv(src_len, KEYS) - shift)
    for block in range(begin, end):
        first_row, first_key = block * ROWS, (block + shift) * KEYS
        i, j = first_row + tl.arange(0, ROWS), first_key + tl.arange(0, KEYS)
        inside, here = i < tgt_len, j < src_len
        ii, within, jj, there = i[:, None], inside[:, None], j[None, :], here[None, :]
        # logits s, and their gradient ds (X, X)
        q, right_q, wide_q, query_factors = blocks_of(
            q_ptr, right_q_ptr, wide_q_ptr, query_factors_ptr, i, q_t, qf_t, inside,
            D, DP, RANK, RP, REPLACED, WIDE_Q, FACTORS,
        )  # fmt: skip
        k, _, wide_k, key_factors = blocks_of(
            k_ptr, k_ptr, wide_k_ptr, key_factors_ptr, j, k_t, kf_t, here,
            D, DP, RANK, RP, False, WIDE_K, FACTORS,
        )  # fmt: skip
        dout = block_of(dout_ptr, i, out_t, channel, inside, D, DP != D)
        top, mass, delta = numbers_of(top_ptr, mass_ptr, delta_ptr, i, inside)
        v = block_of(v_ptr, j, v_t, channel, here, D, DP != D)
        wide_at = first_key - first_row - start - (KEYS - 1) - wide_low
        s, _, _, _, _ = logits(
            q, right_q, wide_q, query_factors, k, wide_k, key_factors,
            query_products_ptr, query_multipliers_ptr, qp_t,
            key_products_ptr, key_multipliers_ptr, kp_t,
            content_band_ptr, query_vectors_ptr, key_vectors_ptr, static_ptr, gate_ptr,
            ii, jj, start, within, there, first, reset_row, reset_column,
            vector_low, width, scalar_low, scalar_width, wide_at, wide_width,
            1, False, D, DP, KEYS, ACC, SCALE, PRECISION, ADD_Q, ADD_K, PRODUCT,
            REPLACED, STATIC, GATE, FACTORS, RESET, LEFT, RIGHT, WIDE_Q, WIDE_K,
        )  # fmt: skip
        _, ds = gradient(
            s, v, dout, top[:, None], mass[:, None], delta[:, None], dprobs_ptr,
            ii, jj, start, within, there, seed, n, i, first_key, padding_ptr, documents_ptr,
            vector_low, width, 1, False, ROWS, KEYS, ACC, PRECISION,
            CAUSAL, PADDING, WINDOW, DOCUMENTS, DROP, VALUES,
        )  # fmt: skip
        if RESET & 1:
            row, column = reset_cells(ii, jj, start, first)
            ds = tl.where(row | column, 0.0, ds)
        ds = ds * SCALE
        # by distance: (X distances, X) (X, DP), lower and upper ones
        own = tl.arange(0, KEYS)
        rows, columns = own[:, None], own[None, :]
        if OF_KEYS:
            turned = tl.gather(ds, (columns - rows + KEYS - 1) % KEYS, 0)
            in_low = wide_edge(KEYS, True, False)
            lower += product(tl.where(in_low, turned, 0.0).to(wide_k.dtype), wide_k, PRECISION)
            upper += product(tl.where(in_low, 0.0, turned).to(wide_k.dtype), wide_k, PRECISION)
        else:
            turned = tl.gather(ds, (rows + columns + 1) % KEYS, 1)
            in_low = wide_edge(KEYS, False, True)
            low_part = tl.where(in_low, turned, 0.0).to(wide_q.dtype)
            up_part = tl.where(in_low, 0.0, turned).to(wide_q.dtype)
            lower += product(tl.trans(low_part), wide_q, PRECISION)
            upper += product(tl.trans(up_part), wide_q, PRECISION)
    parts_ptr += (n64 * diagonals + diagonal) * 2 * KEYS * D
    index = tl.arange(0, KEYS)
    every = index < KEYS
    store_block(parts_ptr, lower, index, D, channel, every, D, DP != D)
    store_block(parts_ptr + KEYS * D, upper, index, D, channel, every, D, DP != D)
