"""The forward kernel: an online softmax over tiles of keys, left tail, band, right tail."""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.logits import blocks_of, in_band, logits, sum_tails, to_head
from relpos_fairseq.attention.triton.tile import (
    LOG2E,
    block_of,
    kept,
    keys_seen,
    product,
    store_block,
    visible,
)

# Numbers that change from call to call, and for which no kernel is compiled anew.
VARYING = [
    "tgt_len", "src_len", "start", "low", "high", "vector_low", "width", "scalar_low",
    "scalar_width", "seed", "wide_low", "wide_width",
]  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    # operands, as `logits` lists them
    q_ptr, right_q_ptr, wide_q_ptr, k_ptr, wide_k_ptr, v_ptr,
    query_products_ptr, query_multipliers_ptr, key_products_ptr, key_multipliers_ptr,
    content_band_ptr, query_vectors_ptr, key_vectors_ptr, static_ptr, gate_ptr,
    query_factors_ptr, key_factors_ptr, reset_ptr, first_ptr, padding_ptr, documents_ptr,
    # results: output, its rounding error, top, mass, and logits of the band (T, width) for `probs`
    out_ptr, rest_ptr, top_ptr, mass_ptr, value_ptr,
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
    REST: tl.constexpr,
):  # fmt: skip
    """Evaluate ROWS queries of one head against all keys that they see."""
    blocks = tl.cdiv(tgt_len, ROWS)
    n = tl.program_id(0) // blocks
    # The last rows of a causal call see most keys: they begin first.
    first_row = (blocks - 1 - tl.program_id(0) % blocks) * ROWS
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
    i = first_row + tl.arange(0, ROWS)
    inside = i < tgt_len
    ii, within = i[:, None], inside[:, None]
    channel = tl.arange(0, DP)
    b, h, n64 = (n // heads).to(tl.int64), (n % heads).to(tl.int64), n.to(tl.int64)
    value_ptr += n64 * tgt_len * width
    q, right_q, wide_q, query_factors = blocks_of(
        q_ptr, right_q_ptr, wide_q_ptr, query_factors_ptr, i, q_t, qf_t, inside,
        D, DP, RANK, RP, REPLACED, WIDE_Q, FACTORS,
    )  # fmt: skip
    begin, middle, after, end = keys_seen(
        first_row + start, src_len, low, high, ROWS, KEYS, CAUSAL, WINDOW, FAR_LEFT, FAR_RIGHT
    )
    top = tl.full((ROWS,), float("-inf"), ACC)  # the largest logit so far
    mass = tl.zeros((ROWS,), ACC)  # sum of exp(logit - top)
    left_mass, right_mass = tl.zeros((ROWS,), ACC), tl.zeros((ROWS,), ACC)  # the tails', dropped
    acc = tl.zeros((ROWS, DP), ACC)  # sum of exp(logit - top) v
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
                # logits s (ROWS, KEYS)
                k, _, wide_k, key_factors = blocks_of(
                    k_ptr, k_ptr, wide_k_ptr, key_factors_ptr, j, k_t, kf_t, here,
                    D, DP, RANK, RP, False, WIDE_K, FACTORS,
                )  # fmt: skip
                wide_at = first_key - first_row - start - (KEYS - 1) - wide_low
                s, _, _, _, _ = logits(
                    q, right_q, wide_q, query_factors, k, wide_k, key_factors,
                    query_products_ptr, query_multipliers_ptr, qp_t,
                    key_products_ptr, key_multipliers_ptr, kp_t,
                    content_band_ptr, query_vectors_ptr, key_vectors_ptr, static_ptr, gate_ptr,
                    ii, jj, start, within, there, first, reset_row, reset_column,
                    vector_low, width, scalar_low, scalar_width, wide_at, wide_width,
                    PHASE, False, D, DP, KEYS, ACC, SCALE, PRECISION, ADD_Q, ADD_K, PRODUCT,
                    REPLACED, STATIC, GATE, FACTORS, RESET, LEFT, RIGHT, WIDE_Q, WIDE_K,
                )  # fmt: skip
                if PHASE != 0 or PADDING or WINDOW or DOCUMENTS:
                    seen = visible(
                        ii, jj, d, start, there, padding_ptr, documents_ptr,
                        PHASE, CAUSAL, PADDING, WINDOW, DOCUMENTS, within,
                    )  # fmt: skip
                    s = tl.where(seen, s, float("-inf"))
                # exponentials p (ROWS, KEYS) against the largest logit so far; earlier sums shrink
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
                    # the band's logits, which become probabilities at the end; the tails' sums
                    left_mass *= shrink
                    right_mass *= shrink
                    left_mass, right_mass = sum_tails(
                        p, left_mass, right_mass, d, vector_low, width, PHASE, True, True
                    )
                    if PHASE == 1:
                        band = in_band(d, vector_low, width, within, there)
                        tl.store(value_ptr + ii * width + (d - vector_low), s, mask=band)
                # acc += p v, (ROWS, KEYS) (KEYS, DP)
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
