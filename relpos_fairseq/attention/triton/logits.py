"""What all kernels share: where a head's operands lie, the logits of a tile, and their gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.records import Given, Known, Logits, Reset, Saved
from relpos_fairseq.attention.triton.tile import (
    LOG2E,
    block_of,
    content_of,
    hide,
    in_band,
    kept,
    meet,
    over_distances,
    table_of,
)
from relpos_fairseq.attention.triton.wide import wide_block


@triton.jit
def head_of(n, heads):
    """Return the batch row and the head of n = b * heads + h, and n itself, in 64 bits."""
    return (n // heads).to(tl.int64), (n % heads).to(tl.int64), n.to(tl.int64)


@triton.jit
def to_head(n, given, strides, sizes, F: tl.constexpr):
    """Return the operands of head n, and its reset."""
    b, h, n64 = head_of(n, sizes.heads)
    of_q, of_k = b * strides.q_b + h * strides.q_h, b * strides.k_b + h * strides.k_h
    of_query_products = b * strides.qp_b + h * strides.qp_h
    of_key_products = b * strides.kp_b + h * strides.kp_h
    first, row, column = 0, 0.0, 0.0
    if F.RESET:
        first = tl.load(given.first + b * strides.first_b).to(tl.int32)
        row = tl.load(given.reset + h * strides.reset_h)
        column = tl.load(given.reset + h * strides.reset_h + 1)
    of_head = Given(
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
    return of_head, Reset(first, row, column)


@triton.jit
def saved_at(n, saved, strides, sizes):
    """Return head n's part of what the backward pass begins with."""
    b, h, n64 = head_of(n, sizes.heads)
    rows = n64 * sizes.tgt_len
    return Saved(
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
def logits(rows, keys, at, given, reset, strides, sizes, PHASE: tl.constexpr, BY_KEY: tl.constexpr, F: tl.constexpr):
    """Return the logits of a tile (rows, keys), or with BY_KEY (keys, rows)."""
    # content = scale q.k: (rows, DP) (DP, keys)
    content = content_of(rows, keys, at, given, sizes, PHASE, BY_KEY, F).to(F.ACC) * F.SCALE
    gate, by_query, by_key = 1.0, 1.0, 1.0
    if F.GATE:
        gate = over_distances(given.gate, at.d, sizes, PHASE)
    if F.PRODUCT:
        by_query = table_of(given.query_multipliers, at.i, strides.qp_t, at.inside, at.d, sizes, PHASE)
        by_key = table_of(given.key_multipliers, at.j, strides.kp_t, at.there, at.d, sizes, PHASE)
    s = content * gate * by_query * by_key
    # Each kind is added to the logits, or to what the reset replaces.
    replaced = tl.zeros_like(s)
    if F.WIDE_Q or F.WIDE_K:
        part = wide_block(rows, keys, given, sizes, BY_KEY, F)
        s, replaced = add_kind(s, replaced, part * F.SCALE, F.RESET & 1)
    if F.ADD_Q:
        part = table_of(given.query_products, at.i, strides.qp_t, at.inside, at.d, sizes, PHASE)
        s, replaced = add_kind(s, replaced, part.to(F.ACC) * F.SCALE, F.RESET & 1)
    if F.ADD_K:
        part = table_of(given.key_products, at.j, strides.kp_t, at.there, at.d, sizes, PHASE)
        s, replaced = add_kind(s, replaced, part.to(F.ACC) * F.SCALE, F.RESET & 1)
    if F.STATIC:
        part = over_distances(given.static, at.d, sizes, PHASE)
        s, replaced = add_kind(s, replaced, part, F.RESET & 2)
    if F.FACTORS:
        # (rows, RP) (RP, keys)
        part = meet(rows.factors, keys.factors, BY_KEY, F.PRECISION)
        s, replaced = add_kind(s, replaced, part, F.RESET & 4)
    if F.RESET:
        row, column = reset_cells(at, sizes.start, reset.first)
        s += tl.where(row, reset.row, tl.where(column, reset.column, replaced))
    return Logits(s, content, gate, by_query, by_key)


@triton.jit
def add_kind(total, replaced, part, RESET: tl.constexpr):
    """Add a part to the logits, or to what the reset replaces in the first row and column."""
    if RESET:
        replaced += part
    else:
        total += part
    return total, replaced


@triton.jit
def known_of(rows, saved, strides, F: tl.constexpr):
    """Load what the backward pass begins with of rows; rows that are none have no probability."""
    i, inside = rows.index, rows.inside
    return Known(
        dout=block_of(saved.dout, i, strides.out_t, inside, F.D, F.DP),
        top=tl.load(saved.top + i, mask=inside, other=0.0),
        mass=tl.load(saved.mass + i, mask=inside, other=float("inf")),
        delta=tl.load(saved.delta + i, mask=inside, other=0.0),
    )


@triton.jit
def gradient(
    n, s, v, known, rows, keys, at, given, saved, sizes, PHASE: tl.constexpr, BY_KEY: tl.constexpr, F: tl.constexpr
):
    """Return a tile's probabilities as values (keys, DP) take them, and its logits' gradient."""
    if BY_KEY:
        top, mass, delta = known.top[None, :], known.mass[None, :], known.delta[None, :]
    else:
        top, mass, delta = known.top[:, None], known.mass[:, None], known.delta[:, None]
    p = hide(tl.exp2((s - top) * LOG2E - mass), 0.0, at, given, sizes, PHASE, F)
    # dp = dout v^T: (rows, DP) (DP, keys)
    dp = meet(known.dout, v, BY_KEY, F.PRECISION).to(F.ACC)
    if F.VALUES:
        part = table_of(saved.dprobs, at.i, sizes.width, at.inside, at.d, sizes, PHASE)
        dp += part.to(F.ACC)
    used = p
    if F.DROP:
        keep = kept(sizes.seed, n, rows, keys, BY_KEY, F)
        inverse = 65536.0 / (65536 - F.DROP)
        used = tl.where(keep, p * inverse, 0.0)
        dp = tl.where(keep, dp * inverse, 0.0)
    return used, p * (dp - delta)


@triton.jit
def free_of(ds, at, reset, sizes, KIND: tl.constexpr, F: tl.constexpr):
    """Return the gradient of what a kind (a bit of RESET) adds: 0 where the reset replaces it."""
    if F.RESET & KIND:
        row, column = reset_cells(at, sizes.start, reset.first)
        ds = tl.where(row | column, 0.0, ds)
    return ds


@triton.jit
def sum_tails(part, left, right, at, sizes, PHASE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr):
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
def store_cells(ptr, part, index, stride, at, sizes):
    """Store a tile's cells of the band; each belongs to one pair of a query and a key."""
    place = ptr + index * stride + (at.d - sizes.vector_low)
    tl.store(place, part, mask=in_band(at, sizes))


@triton.jit
def store_band(ptr, part, left, right, index, stride, at, sizes, PHASE: tl.constexpr, F: tl.constexpr):
    """Store a tile's gradients of products (length, width), and return the sums of the tails."""
    if PHASE == 1:
        store_cells(ptr, part, index, stride, at, sizes)
    return sum_tails(part, left, right, at, sizes, PHASE, F.LEFT, F.RIGHT)


@triton.jit
def store_tails(ptr, left, right, index, stride, width, inside):
    """Store the sums of the two tails: first and last column of (length, width)."""
    tl.store(ptr + index * stride, left, mask=inside)
    tl.store(ptr + index * stride + width - 1, right, mask=inside)
