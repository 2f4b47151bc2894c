"""The forward kernel: an online softmax over tiles of keys, left tail, band, right tail."""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.tile import (
    LOG2E,
    add_positions,
    block_of,
    content_of,
    kept,
    keys_seen,
    over_distances,
    product,
    store_block,
    table_of,
    visible,
    wide_block,
)

VARYING = [
    "tgt_len", "src_len", "start", "low", "high", "vector_low", "width", "scalar_low",
    "scalar_width", "seed", "wide_low", "wide_width",
]  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, right_q_ptr, out_ptr, rest_ptr, top_ptr, mass_ptr, query_products_ptr, key_products_ptr, query_multipliers_ptr,
    key_multipliers_ptr, content_band_ptr, value_ptr, static_ptr, gate_ptr, query_factors_ptr, key_factors_ptr, reset_ptr, first_ptr,
    padding_ptr, documents_ptr, wide_q_ptr, wide_k_ptr, query_vectors_ptr, key_vectors_ptr,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, out_b, out_h, out_t,
    query_products_b, query_products_h, query_products_t, key_products_b, key_products_h, key_products_t, query_factors_b, query_factors_h, query_factors_t, key_factors_b, key_factors_h, key_factors_t,
    static_h, gate_h, reset_h, query_vectors_h, key_vectors_h, first_b,
    heads, tgt_len, src_len, start, low, high, vector_low, width, scalar_low, scalar_width, seed,
    wide_low, wide_width,
    D: tl.constexpr, DP: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ACC: tl.constexpr, SCALE: tl.constexpr,
    CAUSAL: tl.constexpr, PADDING: tl.constexpr, WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr,
    DROP: tl.constexpr, ADD_Q: tl.constexpr, ADD_K: tl.constexpr, PRODUCT: tl.constexpr,
    REPLACED: tl.constexpr, VALUES: tl.constexpr, STATIC: tl.constexpr, GATE: tl.constexpr,
    FACTORS: tl.constexpr, RESET: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
    FAR_LEFT: tl.constexpr, FAR_RIGHT: tl.constexpr, REST: tl.constexpr, PRECISION: tl.constexpr,
    WIDE_Q: tl.constexpr, WIDE_K: tl.constexpr,
):  # fmt: skip
    """One program: ROWS queries of one head against all keys that they see."""
    blocks = tl.cdiv(tgt_len, ROWS)
    n = tl.program_id(0) // blocks
    # The last rows of a causal call see most keys: they begin first.
    first_row = (blocks - 1 - tl.program_id(0) % blocks) * ROWS
    b, h, n64 = (n // heads).to(tl.int64), (n % heads).to(tl.int64), n.to(tl.int64)
    i = first_row + tl.arange(0, ROWS)
    inside = i < tgt_len
    ii, within = i[:, None], inside[:, None]
    slot = first_row + start
    channel, place = tl.arange(0, DP), tl.arange(0, RP)
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    q = block_of(q_ptr, i, q_t, channel, inside, D, DP != D)
    right, f, first, theta_row, theta_column, row = q, q, 0, 0.0, 0.0, within
    vq = q
    query_vectors_ptr += h * query_vectors_h
    key_vectors_ptr += h * key_vectors_h
    wide_k_ptr += b * k_b + h * k_h
    if WIDE_Q:
        vq = block_of(wide_q_ptr + b * q_b + h * q_h, i, q_t, channel, inside, D, DP != D)
    if REPLACED:
        right = block_of(right_q_ptr + b * q_b + h * q_h, i, q_t, channel, inside, D, DP != D)
    if FACTORS:
        query_factors_ptr += b * query_factors_b + h * query_factors_h
        key_factors_ptr += b * key_factors_b + h * key_factors_h
        f = block_of(query_factors_ptr, i, query_factors_t, place, inside, RANK, RP != RANK)
    if RESET:
        first = tl.load(first_ptr + b * first_b).to(tl.int32)
        theta_row = tl.load(reset_ptr + h * reset_h)
        theta_column = tl.load(reset_ptr + h * reset_h + 1)
        row = start + ii == first
    query_products_ptr += b * query_products_b + h * query_products_h
    key_products_ptr += b * key_products_b + h * key_products_h
    query_multipliers_ptr += b * query_products_b + h * query_products_h
    key_multipliers_ptr += b * key_products_b + h * key_products_h
    content_band_ptr += n64 * tgt_len * width
    value_ptr += n64 * tgt_len * width
    static_ptr += h * static_h
    gate_ptr += h * gate_h
    padding_ptr += b * src_len
    documents_ptr += b * src_len

    begin, middle, after, end = keys_seen(
        slot, src_len, low, high, ROWS, KEYS, CAUSAL, WINDOW, FAR_LEFT, FAR_RIGHT
    )
    top = tl.full((ROWS,), float("-inf"), ACC)
    mass = tl.zeros((ROWS,), ACC)
    left_mass, right_mass = tl.zeros((ROWS,), ACC), tl.zeros((ROWS,), ACC)
    acc = tl.zeros((ROWS, DP), ACC)
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
                k = block_of(k_ptr, j, k_t, channel, here, D, DP != D)
                content = content_of(
                    q, right, k, content_band_ptr, ii, jj, d, within, there, vector_low, width,
                    PHASE, False, REPLACED, LEFT, RIGHT, PRECISION,
                )  # fmt: skip
                s = content.to(ACC) * SCALE
                if GATE:
                    s *= over_distances(gate_ptr, d, scalar_low, scalar_width, PHASE)
                if PRODUCT:
                    s *= table_of(
                        query_multipliers_ptr,
                        ii,
                        query_products_t,
                        d,
                        vector_low,
                        width,
                        within,
                        PHASE,
                    )
                    s *= table_of(
                        key_multipliers_ptr, jj, key_products_t, d, vector_low, width, there, PHASE
                    )
                g, column = k, within
                if FACTORS:
                    g = block_of(key_factors_ptr, j, key_factors_t, place, here, RANK, RP != RANK)
                if RESET:
                    column = (jj == first) & (start + ii != first)
                wide, vk = s, k
                if WIDE_K:
                    vk = block_of(wide_k_ptr, j, k_t, channel, here, D, DP != D)
                if WIDE_Q or WIDE_K:
                    at = first_key - slot - (KEYS - 1) - wide_low
                    wide = wide_block(
                        vq, vk, query_vectors_ptr, key_vectors_ptr, at, wide_width, channel, D, DP, KEYS, False,
                        WIDE_Q, WIDE_K, ACC, PRECISION,
                    )  # fmt: skip
                s = add_positions(
                    s, wide, f, g, ii, jj, d, row, column, within, there,
                    query_products_ptr, query_products_t, key_products_ptr, key_products_t, static_ptr, theta_row, theta_column,
                    vector_low, width, scalar_low, scalar_width,
                    PHASE, False, WIDE_Q or WIDE_K, ADD_Q, ADD_K, STATIC, FACTORS, RESET, SCALE,
                    PRECISION,
                )  # fmt: skip
                if PHASE != 0 or PADDING or WINDOW or DOCUMENTS:
                    seen = visible(
                        ii, jj, d, start, there, padding_ptr, documents_ptr, src_len,
                        PHASE, CAUSAL, PADDING, WINDOW, DOCUMENTS, within,
                    )  # fmt: skip
                    s = tl.where(seen, s, float("-inf"))
                new_top = tl.maximum(top, tl.max(s, 1))
                # A row without a key so far has top -inf, and -inf - -inf is NaN.
                against = tl.where(new_top == float("-inf"), 0.0, new_top)
                p = tl.exp2((s - against[:, None]) * LOG2E)
                shrink = tl.exp2((top - against) * LOG2E)
                mass = mass * shrink + tl.sum(p, 1)
                if DROP:
                    keep = kept(seed, n, i, first_key, DROP, ROWS, KEYS, False)
                    p = tl.where(keep, p, 0.0)
                    s = tl.where(keep, s, float("-inf"))
                if VALUES:
                    left_mass *= shrink
                    right_mass *= shrink
                    if PHASE == 0:
                        left_mass += tl.sum(p, 1)
                    elif PHASE == 2:
                        right_mass += tl.sum(p, 1)
                    else:
                        left_mass += tl.sum(tl.where(d <= vector_low, p, 0.0), 1)
                        beyond = d >= vector_low + width - 1
                        right_mass += tl.sum(tl.where(beyond, p, 0.0), 1)
                        inner = (d > vector_low) & (d < vector_low + width - 1)
                        tl.store(
                            value_ptr + ii * width + (d - vector_low), s,
                            mask=inner & within & there,
                        )  # fmt: skip
                v = block_of(v_ptr, j, v_t, channel, here, D, DP != D)
                acc = acc * shrink[:, None]
                acc += product(p.to(v.dtype), v, PRECISION)
                top = new_top
    empty = mass == 0.0
    total = tl.where(empty, 1.0, mass)
    inverse = 65536.0 / (65536 - DROP)
    out = acc * (inverse / total)[:, None]
    rounded = out.to(q.dtype)
    base = b * out_b + h * out_h
    store_block(out_ptr + base, rounded, i, out_t, channel, inside, D, DP != D)
    if REST:
        rest = out - rounded.to(ACC)
        store_block(rest_ptr + base, rest, i, out_t, channel, inside, D, DP != D)
    top = tl.where(empty, 0.0, top)
    # Apart, since their sum would round large logits; infinite, so that rows without keys give 0.
    tl.store(top_ptr + n64 * tgt_len + i, top, mask=inside)
    mass = tl.where(empty, float("inf"), tl.log2(total))
    tl.store(mass_ptr + n64 * tgt_len + i, mass, mask=inside)
    if VALUES:
        # As logits, so that one formula makes probabilities of the whole table.
        ends = value_ptr + i * width
        tl.store(ends, top + tl.log2(left_mass) / LOG2E, mask=inside)
        tl.store(ends + width - 1, top + tl.log2(right_mass) / LOG2E, mask=inside)
