"""What all kernels share: where a head's operands lie, the logits of a tile, and their gradient.

The kernels' arguments have the names of `operands.Operands`; an operand that a call does not have
stands as `q_ptr`, and the flag that says so leaves it unread.

    q, right_q, wide_q       (B, H, T, D)   k, wide_k, v            (B, H, S, D)
    query_products, query_multipliers, content_band, probs           (B, H, T, width)
    key_products, key_multipliers                                    (B, H, S, width)
    query_factors            (B|1, H|1, T, RANK)   key_factors      (B|1, H|1, S, RANK)
    query_vectors, key_vectors   (H|1, wide_width, D), from distance wide_low on
    static, gate             (H|1, scalar_width), from distance scalar_low on
    reset                    (H|1, 2)   first (B|1,)   padding, documents (B, S)
    top, mass, delta         (B, H, T)  largest logit, log2 of sum exp(logit - top), mean gradient

Strides end in _b, _h, _t for batch, heads, rows; those of products and multipliers begin with qp_
and kp_, those of factors with qf_ and kf_, those of wide tables with qv_ and kv_.  DP and RP are
D and RANK rounded up to a power of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.tile import (
    LOG2E,
    block_of,
    content_of,
    kept,
    meet,
    over_distances,
    table_of,
    visible,
    wide_block,
)


@triton.jit
def to_head(
    n, heads, tgt_len, src_len, width, first_b,
    q_ptr, right_q_ptr, wide_q_ptr, q_b, q_h, k_ptr, wide_k_ptr, k_b, k_h, v_ptr, v_b, v_h,
    query_products_ptr, query_multipliers_ptr, qp_b, qp_h,
    key_products_ptr, key_multipliers_ptr, kp_b, kp_h, content_band_ptr,
    query_vectors_ptr, qv_h, key_vectors_ptr, kv_h, static_ptr, static_h, gate_ptr, gate_h,
    query_factors_ptr, qf_b, qf_h, key_factors_ptr, kf_b, kf_h,
    reset_ptr, reset_h, first_ptr, padding_ptr, documents_ptr, RESET: tl.constexpr,
):  # fmt: skip
    """Return the pointers of head n = b * heads + h, and its reset: first, row, column."""
    b, h = (n // heads).to(tl.int64), (n % heads).to(tl.int64)
    of_q, of_k = b * q_b + h * q_h, b * k_b + h * k_h
    of_query_products, of_key_products = b * qp_b + h * qp_h, b * kp_b + h * kp_h
    first, reset_row, reset_column = 0, 0.0, 0.0
    if RESET:
        first = tl.load(first_ptr + b * first_b).to(tl.int32)
        reset_row = tl.load(reset_ptr + h * reset_h)
        reset_column = tl.load(reset_ptr + h * reset_h + 1)
    return (
        q_ptr + of_q, right_q_ptr + of_q, wide_q_ptr + of_q,
        k_ptr + of_k, wide_k_ptr + of_k, v_ptr + b * v_b + h * v_h,
        query_products_ptr + of_query_products, query_multipliers_ptr + of_query_products,
        key_products_ptr + of_key_products, key_multipliers_ptr + of_key_products,
        content_band_ptr + n.to(tl.int64) * tgt_len * width,
        query_vectors_ptr + h * qv_h, key_vectors_ptr + h * kv_h,
        static_ptr + h * static_h, gate_ptr + h * gate_h,
        query_factors_ptr + b * qf_b + h * qf_h, key_factors_ptr + b * kf_b + h * kf_h,
        first, reset_row, reset_column, padding_ptr + b * src_len, documents_ptr + b * src_len,
    )  # fmt: skip


@triton.jit
def saved_at(
    n, heads, tgt_len, width, out_b, out_h, dout_ptr, top_ptr, mass_ptr, delta_ptr, dprobs_ptr
):
    """Return the pointers of head n to what the backward pass begins with."""
    b, h, n64 = (n // heads).to(tl.int64), (n % heads).to(tl.int64), n.to(tl.int64)
    rows = n64 * tgt_len
    return (
        dout_ptr + b * out_b + h * out_h, top_ptr + rows, mass_ptr + rows, delta_ptr + rows,
        dprobs_ptr + rows * width,
    )  # fmt: skip


@triton.jit
def numbers_of(top_ptr, mass_ptr, delta_ptr, i, inside):
    """Load top, mass and delta of rows i: (rows,) each; rows that are none have no probability."""
    top = tl.load(top_ptr + i, mask=inside, other=0.0)
    mass = tl.load(mass_ptr + i, mask=inside, other=float("inf"))
    delta = tl.load(delta_ptr + i, mask=inside, other=0.0)
    return top, mass, delta


@triton.jit
def blocks_of(
    ptr, other_ptr, wide_ptr, factors_ptr, index, stride, factors_stride, inside,
    D: tl.constexpr, DP: tl.constexpr, RANK: tl.constexpr, RP: tl.constexpr,
    OTHER: tl.constexpr, WIDE: tl.constexpr, FACTORS: tl.constexpr,
):  # fmt: skip
    """Load a tile's queries (or keys): for content, for the other tail, for wide tables, factors.

    Returns three blocks (length, DP) and one (length, RP); one that is not given is the first.
    """
    channel, place = tl.arange(0, DP), tl.arange(0, RP)
    block = block_of(ptr, index, stride, channel, inside, D, DP != D)
    other, wide, factors = block, block, block
    if OTHER:
        other = block_of(other_ptr, index, stride, channel, inside, D, DP != D)
    if WIDE:
        wide = block_of(wide_ptr, index, stride, channel, inside, D, DP != D)
    if FACTORS:
        factors = block_of(factors_ptr, index, factors_stride, place, inside, RANK, RP != RANK)
    return block, other, wide, factors


@triton.jit
def reset_cells(ii, jj, start, first):
    """Return which cells of a tile lie in the first token's row, and which in its column."""
    row = start + ii == first
    return row, (jj == first) & (start + ii != first)


@triton.jit
def logits(
    q, right_q, wide_q, query_factors, k, wide_k, key_factors,
    query_products_ptr, query_multipliers_ptr, qp_t, key_products_ptr, key_multipliers_ptr, kp_t,
    content_band_ptr, query_vectors_ptr, key_vectors_ptr, static_ptr, gate_ptr,
    ii, jj, start, inside, there, first, reset_row, reset_column,
    vector_low, width, scalar_low, scalar_width, wide_at, wide_width,
    PHASE: tl.constexpr, BY_KEY: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    X: tl.constexpr, ACC: tl.constexpr, SCALE: tl.constexpr, PRECISION: tl.constexpr,
    ADD_Q: tl.constexpr, ADD_K: tl.constexpr, PRODUCT: tl.constexpr, REPLACED: tl.constexpr,
    STATIC: tl.constexpr, GATE: tl.constexpr, FACTORS: tl.constexpr, RESET: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, WIDE_Q: tl.constexpr, WIDE_K: tl.constexpr,
):  # fmt: skip
    """Return the logits of a tile, its content, and the three factors of the content.

    All are (rows, keys), or with BY_KEY (keys, rows); a factor that a call does not have is 1.
    Bits 1, 2, 4 of RESET: in the first token's row and column, the reset replaces what vectors,
    scalars, factors add.  wide_at is the row of the wide tables for the tile's lowest distance.
    """
    d = jj - (start + ii)
    # content = scale q.k, (rows, DP) (DP, keys)
    content = content_of(
        q, right_q, k, content_band_ptr, ii, jj, d, inside, there, vector_low, width,
        PHASE, BY_KEY, REPLACED, LEFT, RIGHT, PRECISION,
    ).to(ACC) * SCALE  # fmt: skip
    total = content
    gate, by_query, by_key = 1.0, 1.0, 1.0
    if GATE:
        gate = over_distances(gate_ptr, d, scalar_low, scalar_width, PHASE)
        total = total * gate
    if PRODUCT:
        by_query = table_of(
            query_multipliers_ptr, ii, qp_t, d, vector_low, width, inside, PHASE
        )  # fmt: skip
        by_key = table_of(key_multipliers_ptr, jj, kp_t, d, vector_low, width, there, PHASE)
        total = total * by_query * by_key
    # Each kind is added to the logits, or to what the reset replaces.
    replaced = tl.zeros_like(total)
    if WIDE_Q or WIDE_K:
        wide = wide_block(
            wide_q, wide_k, query_vectors_ptr, key_vectors_ptr, wide_at, wide_width,
            D, DP, X, BY_KEY, WIDE_Q, WIDE_K, ACC, PRECISION,
        )  # fmt: skip
        total, replaced = add_kind(total, replaced, wide * SCALE, RESET & 1)
    if ADD_Q:
        part = table_of(query_products_ptr, ii, qp_t, d, vector_low, width, inside, PHASE)
        total, replaced = add_kind(total, replaced, part.to(ACC) * SCALE, RESET & 1)
    if ADD_K:
        part = table_of(key_products_ptr, jj, kp_t, d, vector_low, width, there, PHASE)
        total, replaced = add_kind(total, replaced, part.to(ACC) * SCALE, RESET & 1)
    if STATIC:
        part = over_distances(static_ptr, d, scalar_low, scalar_width, PHASE)
        total, replaced = add_kind(total, replaced, part, RESET & 2)
    if FACTORS:
        # (rows, RP) (RP, keys)
        part = meet(query_factors, key_factors, BY_KEY, PRECISION)
        total, replaced = add_kind(total, replaced, part, RESET & 4)
    if RESET:
        row, column = reset_cells(ii, jj, start, first)
        total += tl.where(row, reset_row, tl.where(column, reset_column, replaced))
    return total, content, gate, by_query, by_key


@triton.jit
def add_kind(total, replaced, part, RESET: tl.constexpr):
    """Add a part to the logits, or to what the reset replaces in the first row and column."""
    if RESET:
        replaced += part
    else:
        total += part
    return total, replaced


@triton.jit
def gradient(
    s, v, dout, top, mass, delta, dprobs_ptr, ii, jj, start, inside, there,
    seed, n, rows, first_key, padding_ptr, documents_ptr, vector_low, width,
    PHASE: tl.constexpr, BY_KEY: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr, CAUSAL: tl.constexpr, PADDING: tl.constexpr,
    WINDOW: tl.constexpr, DOCUMENTS: tl.constexpr, DROP: tl.constexpr, VALUES: tl.constexpr,
):  # fmt: skip
    """Return a tile's probabilities as values take them, and the gradient of its logits.

    Args: s the logits; v (keys, DP), dout (rows, DP); top, mass, delta (rows, 1), or with BY_KEY
    (1, rows); dprobs (T, width) gradients of the band's probabilities, of their sums in the tails.
    """
    d = jj - (start + ii)
    p = tl.exp2((s - top) * LOG2E - mass)
    if PHASE != 0 or PADDING or WINDOW or DOCUMENTS:
        seen = visible(
            ii, jj, d, start, there, padding_ptr, documents_ptr,
            PHASE, CAUSAL, PADDING, WINDOW, DOCUMENTS, inside,
        )  # fmt: skip
        p = tl.where(seen, p, 0.0)
    # dp = dout v^T, (rows, DP) (DP, keys)
    dp = meet(dout, v, BY_KEY, PRECISION).to(ACC)
    if VALUES:
        dp += table_of(dprobs_ptr, ii, width, d, vector_low, width, inside, PHASE).to(ACC)
    used = p
    if DROP:
        keep = kept(seed, n, rows, first_key, DROP, ROWS, KEYS, BY_KEY)
        inverse = 65536.0 / (65536 - DROP)
        used = tl.where(keep, p * inverse, 0.0)
        dp = tl.where(keep, dp * inverse, 0.0)
    return used, p * (dp - delta)


@triton.jit
def sum_tails(part, left, right, d, low, width, PHASE: tl.constexpr, LEFT: tl.constexpr,
              RIGHT: tl.constexpr):  # fmt: skip
    """Add what a tile (x, y) has in the two tails to left (x,) and right (x,)."""
    if PHASE == 0:
        left += tl.sum(part, 1)
    elif PHASE == 2:
        right += tl.sum(part, 1)
    else:
        if LEFT:
            left += tl.sum(tl.where(d <= low, part, 0.0), 1)
        if RIGHT:
            right += tl.sum(tl.where(d >= low + width - 1, part, 0.0), 1)
    return left, right


@triton.jit
def in_band(d, low, width, inside, there):
    """Return which cells of a tile lie between the tails."""
    return (d > low) & (d < low + width - 1) & inside & there


@triton.jit
def store_band(
    ptr, part, left, right, index, stride, d, low, width, inside, there,
    PHASE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Store a tile's gradients of products (length, width), and return the sums of the tails.

    A cell of the band belongs to one pair of a query and a key: it is stored, not added.
    """
    if PHASE == 1:
        tl.store(
            ptr + index * stride + (d - low), part, mask=in_band(d, low, width, inside, there)
        )  # fmt: skip
    return sum_tails(part, left, right, d, low, width, PHASE, LEFT, RIGHT)


@triton.jit
def store_tails(ptr, left, right, index, stride, width, inside):
    """Store the sums of the two tails: first and last column of (length, width)."""
    tl.store(ptr + index * stride, left, mask=inside)
    tl.store(ptr + index * stride + width - 1, right, mask=inside)
