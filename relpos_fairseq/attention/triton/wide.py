"""Vectors over many distances: unclipped tables and Transformer-XL, in O(length) memory.

A square tile of X queries and X keys meets 2 X - 1 distances.  Products of its queries (or keys)
with those vectors are two blocks of X distances; read along its diagonals they are what the tile's
cells get.  Column p of the lower block and of the upper one are never read in the same row, so that
both blocks are one, whose rows are then rotated: one gather inside the tile, and its inverse for
gradients.  Gradients of vectors belong to diagonals of tiles: a kernel of its own sums them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.forward import VARYING
from relpos_fairseq.attention.triton.tile import (
    LOG2E,
    add_positions,
    block_of,
    content_of,
    kept,
    over_distances,
    product,
    store_block,
    table_of,
    visible,
    wide_block,
    wide_edge,
)


@triton.jit(do_not_specialize=[*VARYING, "wide_low", "wide_width", "first_diagonal", "diagonals"])
def diagonals_kernel(
    q_ptr, k_ptr, v_ptr, right_q_ptr, dout_ptr, top_ptr, mass_ptr, delta_ptr, query_products_ptr, key_products_ptr, query_multipliers_ptr,
    key_multipliers_ptr, content_band_ptr, dprobs_ptr, static_ptr, gate_ptr, query_factors_ptr, key_factors_ptr, reset_ptr, first_ptr,
    padding_ptr, documents_ptr, wide_q_ptr, wide_k_ptr, query_vectors_ptr, key_vectors_ptr, parts_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t,
    query_products_b, query_products_h, query_products_t, key_products_b, key_products_h, key_products_t, query_factors_b, query_factors_h, query_factors_t, key_factors_b, key_factors_h, key_factors_t,
    static_h, gate_h, reset_h, query_vectors_h, key_vectors_h, first_b,
    heads, tgt_len, src_len, start, low, high, vector_low, width, scalar_low, scalar_width, seed,
    wide_low, wide_width, first_diagonal, diagonals,
    D: tl.constexpr, DP: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ACC: tl.constexpr, SCALE: tl.constexpr,
    CAUSAL: tl.constexpr, PADDING: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    DROP: tl.constexpr, ADD_Q: tl.constexpr, ADD_K: tl.constexpr, PRODUCT: tl.constexpr,
    REPLACED: tl.constexpr, VALUES: tl.constexpr, STATIC: tl.constexpr, GATE: tl.constexpr,
    FACTORS: tl.constexpr, RESET: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    WIDE_Q: tl.constexpr, WIDE_K: tl.constexpr, OF_KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What one diagonal of tiles gives the vectors of its 2 X distances, for one head.

    parts (N, diagonals, 2, X, D): the lower and the upper X distances of each diagonal, for the
    vectors that queries meet or (OF_KEYS) keys.
    """
    n = tl.program_id(0) // diagonals
    diagonal = tl.program_id(0) % diagonals
    shift = first_diagonal + diagonal  # blocks of keys less blocks of rows
    b, h, n64 = (n // heads).to(tl.int64), (n % heads).to(tl.int64), n.to(tl.int64)
    channel, place = tl.arange(0, DP), tl.arange(0, RP)
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    right_q_ptr += b * q_b + h * q_h
    wide_q_ptr += b * q_b + h * q_h
    wide_k_ptr += b * k_b + h * k_h
    query_vectors_ptr += h * query_vectors_h
    key_vectors_ptr += h * key_vectors_h
    dout_ptr += b * out_b + h * out_h
    top_ptr += n64 * tgt_len
    mass_ptr += n64 * tgt_len
    delta_ptr += n64 * tgt_len
    first, theta_row, theta_column = 0, 0.0, 0.0
    if FACTORS:
        query_factors_ptr += b * query_factors_b + h * query_factors_h
        key_factors_ptr += b * key_factors_b + h * key_factors_h
    if RESET:
        first = tl.load(first_ptr + b * first_b).to(tl.int32)
        theta_row = tl.load(reset_ptr + h * reset_h)
        theta_column = tl.load(reset_ptr + h * reset_h + 1)
    query_products_ptr += b * query_products_b + h * query_products_h
    key_products_ptr += b * key_products_b + h * key_products_h
    query_multipliers_ptr += b * query_products_b + h * query_products_h
    key_multipliers_ptr += b * key_products_b + h * key_products_h
    content_band_ptr += n64 * tgt_len * width
    dprobs_ptr += n64 * tgt_len * width
    static_ptr += h * static_h
    gate_ptr += h * gate_h
    padding_ptr += b * src_len
    documents_ptr += b * src_len

    lower, upper = tl.zeros((KEYS, DP), ACC), tl.zeros((KEYS, DP), ACC)
    begin = tl.maximum(0, -shift)
    end = tl.minimum(tl.cdiv(tgt_len, ROWS), tl.cdiv(src_len, KEYS) - shift)
    for block in range(begin, end):
        first_row, first_key = block * ROWS, (block + shift) * KEYS
        i, j = first_row + tl.arange(0, ROWS), first_key + tl.arange(0, KEYS)
        inside, here = i < tgt_len, j < src_len
        ii, within, jj, there = i[:, None], inside[:, None], j[None, :], here[None, :]
        d = jj - (start + ii)
        q = block_of(q_ptr, i, q_t, channel, inside, D, DP != D)
        k = block_of(k_ptr, j, k_t, channel, here, D, DP != D)
        v = block_of(v_ptr, j, v_t, channel, here, D, DP != D)
        dout = block_of(dout_ptr, i, out_t, channel, inside, D, DP != D)
        top = tl.load(top_ptr + i, mask=inside, other=0.0)
        mass = tl.load(mass_ptr + i, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + i, mask=inside, other=0.0)
        right, f, g, row, column = q, q, k, within, within
        if REPLACED:
            right = block_of(right_q_ptr, i, q_t, channel, inside, D, DP != D)
        if FACTORS:
            f = block_of(query_factors_ptr, i, query_factors_t, place, inside, RANK, RP != RANK)
            g = block_of(key_factors_ptr, j, key_factors_t, place, here, RANK, RP != RANK)
        if RESET:
            row = start + ii == first
            column = (jj == first) & (start + ii != first)
        s = content_of(
            q, right, k, content_band_ptr, ii, jj, d, within, there, vector_low, width,
            1, False, REPLACED, LEFT, RIGHT, PRECISION,
        ).to(ACC) * SCALE  # fmt: skip
        if GATE:
            s = s * over_distances(gate_ptr, d, scalar_low, scalar_width, 1)
        if PRODUCT:
            s = s * table_of(
                query_multipliers_ptr, ii, query_products_t, d, vector_low, width, within, 1
            )
            s = s * table_of(
                key_multipliers_ptr, jj, key_products_t, d, vector_low, width, there, 1
            )
        at = first_key - first_row - start - (KEYS - 1) - wide_low
        vq, vk = q, k
        if WIDE_Q:
            vq = block_of(wide_q_ptr, i, q_t, channel, inside, D, DP != D)
        if WIDE_K:
            vk = block_of(wide_k_ptr, j, k_t, channel, here, D, DP != D)
        wide = wide_block(
            vq, vk, query_vectors_ptr, key_vectors_ptr, at, wide_width, channel, D, DP, KEYS, False, WIDE_Q, WIDE_K,
            ACC, PRECISION,
        )  # fmt: skip
        s = add_positions(
            s, wide, f, g, ii, jj, d, row, column, within, there,
            query_products_ptr, query_products_t, key_products_ptr, key_products_t, static_ptr, theta_row, theta_column,
            vector_low, width, scalar_low, scalar_width,
            1, False, True, ADD_Q, ADD_K, STATIC, FACTORS, RESET, SCALE, PRECISION,
        )  # fmt: skip
        seen = visible(
            ii, jj, d, start, there, padding_ptr, documents_ptr, src_len,
            1, CAUSAL, PADDING, WINDOW, DOCUMENTS, within,
        )  # fmt: skip
        p = tl.where(seen, tl.exp2((s - top[:, None]) * LOG2E - mass[:, None]), 0.0)
        dp = product(dout, tl.trans(v), PRECISION).to(ACC)
        if VALUES:
            dp += table_of(dprobs_ptr, ii, width, d, vector_low, width, within, 1).to(ACC)
        if DROP:
            keep = kept(seed, n, i, first_key, DROP, ROWS, KEYS, False)
            dp = tl.where(keep, dp * (65536.0 / (65536 - DROP)), 0.0)
        part = p * (dp - delta[:, None])
        if RESET & 1:
            part = tl.where(row | column, 0.0, part)
        part = part * SCALE
        own = tl.arange(0, KEYS)
        rows, columns = own[:, None], own[None, :]
        if OF_KEYS:
            turned = tl.gather(part, (columns - rows + KEYS - 1) % KEYS, 0)
            in_low = wide_edge(KEYS, True, False)
            lower += product(tl.where(in_low, turned, 0.0).to(vk.dtype), vk, PRECISION)
            upper += product(tl.where(in_low, 0.0, turned).to(vk.dtype), vk, PRECISION)
        else:
            turned = tl.gather(part, (rows + columns + 1) % KEYS, 1)
            in_low = wide_edge(KEYS, False, True)
            low_part = tl.where(in_low, turned, 0.0).to(vq.dtype)
            up_part = tl.where(in_low, 0.0, turned).to(vq.dtype)
            lower += product(tl.trans(low_part), vq, PRECISION)
            upper += product(tl.trans(up_part), vq, PRECISION)
    parts_ptr += (n64 * diagonals + diagonal) * 2 * KEYS * D
    index = tl.arange(0, KEYS)
    every = index < KEYS
    store_block(parts_ptr, lower, index, D, channel, every, D, DP != D)
    store_block(parts_ptr + KEYS * D, upper, index, D, channel, every, D, DP != D)
