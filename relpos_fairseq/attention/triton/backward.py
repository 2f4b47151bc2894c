"""The backward kernels: one owns rows of queries, one owns keys; nobody else adds to their sums.

Every cell of a band is one (query, key) pair, so that its gradient is stored, not added; tails are
sums of rows (of queries' tables) and of columns (of keys').  Gradients of scalars are sums along
diagonals of tiles, handed from tile to tile, one buffer a block of rows.  No atomics: same inputs,
same bits.
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
    diagonals,
    kept,
    keys_seen,
    over_distances,
    product,
    rows_seeing,
    store_block,
    table_of,
    visible,
    wide_back,
    wide_block,
)


@triton.jit(do_not_specialize=["tgt_len", "width"])
def delta_kernel(
    out_ptr, rest_ptr, dout_ptr, probs_ptr, dprobs_ptr, delta_ptr, out_b, out_h, out_t,
    heads, tgt_len, width,
    D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr, VALUES: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """Sum over keys of probability times its gradient, by way of the output: (N, T)."""
    blocks = tl.cdiv(tgt_len, ROWS)
    n = tl.program_id(0) // blocks
    b, h, n64 = (n // heads).to(tl.int64), (n % heads).to(tl.int64), n.to(tl.int64)
    i = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    inside = i < tgt_len
    channel = tl.arange(0, DP)
    base = b * out_b + h * out_h
    out = block_of(out_ptr + base, i, out_t, channel, inside, D, DP != D).to(ACC)
    if REST:
        out += block_of(rest_ptr + base, i, out_t, channel, inside, D, DP != D).to(ACC)
    dout = block_of(dout_ptr + base, i, out_t, channel, inside, D, DP != D).to(ACC)
    delta = tl.sum(out * dout, 1)
    if VALUES:
        place = n64 * tgt_len * width + i[:, None] * width
        for column in range(0, width, 16):
            c = column + tl.arange(0, 16)[None, :]
            mask = inside[:, None] & (c < width)
            probs = tl.load(probs_ptr + place + c, mask=mask, other=0.0).to(ACC)
            dprobs = tl.load(dprobs_ptr + place + c, mask=mask, other=0.0).to(ACC)
            delta += tl.sum(probs * dprobs, 1)
    tl.store(delta_ptr + n64 * tgt_len + i, delta, mask=inside)


@triton.jit(do_not_specialize=VARYING)
def rows_kernel(
    q_ptr, k_ptr, v_ptr, right_q_ptr, dout_ptr, top_ptr, mass_ptr, delta_ptr, query_products_ptr, key_products_ptr, query_multipliers_ptr,
    key_multipliers_ptr, content_band_ptr, dprobs_ptr, static_ptr, gate_ptr, query_factors_ptr, key_factors_ptr, reset_ptr, first_ptr,
    padding_ptr, documents_ptr, wide_q_ptr, wide_k_ptr, query_vectors_ptr, key_vectors_ptr,
    dwide_q_ptr, dq_ptr, dright_q_ptr, dquery_products_ptr, dquery_multipliers_ptr, dcontent_band_ptr, dquery_factors_ptr, dscalars_ptr, dsums_ptr,
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
    FAR_LEFT: tl.constexpr, FAR_RIGHT: tl.constexpr, STATIC_GRAD: tl.constexpr,
    GATE_GRAD: tl.constexpr, PRECISION: tl.constexpr,
    WIDE_Q: tl.constexpr, WIDE_K: tl.constexpr,
):  # fmt: skip
    """Gradients that belong to ROWS queries of one head.

    dscalars (N, blocks, 2, high - low + 1 + 4 KEYS) are sums over the rows by distance, of the
    static logits and of the gate, from distance low - 2 KEYS on; dsums (N, blocks, 8) those of
    whole tail tiles (static left, right, gate left, right) and of the reset's column.
    """
    blocks = tl.cdiv(tgt_len, ROWS)
    n = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks
    first_row = block * ROWS
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
    dout = block_of(dout_ptr + b * out_b + h * out_h, i, out_t, channel, inside, D, DP != D)
    top = tl.load(top_ptr + n64 * tgt_len + i, mask=inside, other=0.0)
    mass = tl.load(mass_ptr + n64 * tgt_len + i, mask=inside, other=float("inf"))
    delta = tl.load(delta_ptr + n64 * tgt_len + i, mask=inside, other=0.0)
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
    dquery_products_ptr += b * query_products_b + h * query_products_h
    dquery_multipliers_ptr += b * query_products_b + h * query_products_h
    content_band_ptr += n64 * tgt_len * width
    dcontent_band_ptr += n64 * tgt_len * width
    dprobs_ptr += n64 * tgt_len * width
    static_ptr += h * static_h
    gate_ptr += h * gate_h
    padding_ptr += b * src_len
    documents_ptr += b * src_len
    cells = high - low + 1 + 4 * KEYS
    dscalars_ptr += (n64 * blocks + block) * 2 * cells
    dsums_ptr += (n64 * blocks + block) * 8
    begin, middle, after, end = keys_seen(
        slot, src_len, low, high, ROWS, KEYS, CAUSAL, WINDOW, FAR_LEFT, FAR_RIGHT
    )

    dq = tl.zeros((ROWS, DP), ACC)
    dright, dvq = dq, dq
    df = dq
    if FACTORS:
        df = tl.zeros((ROWS, RP), ACC)
    none = tl.zeros((ROWS,), ACC)
    add_left, add_right, times_left, times_right = none, none, none, none
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
                k = block_of(k_ptr, j, k_t, channel, here, D, DP != D)
                v = block_of(v_ptr, j, v_t, channel, here, D, DP != D)
                content = content_of(
                    q, right, k, content_band_ptr, ii, jj, d, within, there, vector_low, width,
                    PHASE, False, REPLACED, LEFT, RIGHT, PRECISION,
                ).to(ACC) * SCALE  # fmt: skip
                s = content
                if GATE:
                    gate = over_distances(gate_ptr, d, scalar_low, scalar_width, PHASE)
                    s = s * gate
                if PRODUCT:
                    pq = table_of(
                        query_multipliers_ptr,
                        ii,
                        query_products_t,
                        d,
                        vector_low,
                        width,
                        within,
                        PHASE,
                    )
                    pk = table_of(
                        key_multipliers_ptr, jj, key_products_t, d, vector_low, width, there, PHASE
                    )
                    s = s * pq * pk
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
                p = tl.exp2((s - top[:, None]) * LOG2E - mass[:, None])
                if PHASE != 0 or PADDING or WINDOW or DOCUMENTS:
                    seen = visible(
                        ii, jj, d, start, there, padding_ptr, documents_ptr, src_len,
                        PHASE, CAUSAL, PADDING, WINDOW, DOCUMENTS, within,
                    )  # fmt: skip
                    p = tl.where(seen, p, 0.0)
                dp = product(dout, tl.trans(v), PRECISION).to(ACC)
                if VALUES:
                    part = table_of(dprobs_ptr, ii, width, d, vector_low, width, within, PHASE)
                    dp += part.to(ACC)
                if DROP:
                    keep = kept(seed, n, i, first_key, DROP, ROWS, KEYS, False)
                    dp = tl.where(keep, dp * (65536.0 / (65536 - DROP)), 0.0)
                ds = p * (dp - delta[:, None])

                inner = (d > vector_low) & (d < vector_low + width - 1) & within & there
                free = ds
                if RESET:
                    free = tl.where(row | column, 0.0, ds)
                    column_sum += tl.sum(tl.where(column, ds, 0.0), 1)
                if WIDE_Q:
                    part = ds
                    if RESET & 1:
                        part = free
                    dvq += wide_back(
                        part * SCALE, query_vectors_ptr, at, wide_width, channel, vq, D, DP, KEYS, False,
                        PRECISION,
                    )  # fmt: skip
                if ADD_Q:
                    part = ds
                    if RESET & 1:
                        part = free
                    part = part * SCALE
                    if PHASE == 0:
                        add_left += tl.sum(part, 1)
                    elif PHASE == 2:
                        add_right += tl.sum(part, 1)
                    else:
                        tl.store(
                            dquery_products_ptr + ii * query_products_t + (d - vector_low),
                            part,
                            mask=inner,
                        )
                        if LEFT:
                            add_left += tl.sum(tl.where(d <= vector_low, part, 0.0), 1)
                        if RIGHT:
                            beyond = d >= vector_low + width - 1
                            add_right += tl.sum(tl.where(beyond, part, 0.0), 1)
                if STATIC_GRAD:
                    part = ds
                    if RESET & 2:
                        part = free
                    if PHASE == 0:
                        static_left += tl.sum(part, 1)
                    elif PHASE == 2:
                        static_right += tl.sum(part, 1)
                    else:
                        lower, upper = diagonals(part, KEYS)
                        at = first_key - slot - low + KEYS + tl.arange(0, KEYS)
                        tl.store(dscalars_ptr + at, lower + static_carry)
                        static_carry = upper
                if FACTORS:
                    part = ds
                    if RESET & 4:
                        part = free
                    df += product(part.to(g.dtype), g, PRECISION)
                if PRODUCT:
                    part = ds * content * pk
                    if GATE:
                        part *= gate
                    if PHASE == 0:
                        times_left += tl.sum(part, 1)
                    elif PHASE == 2:
                        times_right += tl.sum(part, 1)
                    else:
                        tl.store(
                            dquery_multipliers_ptr + ii * query_products_t + (d - vector_low),
                            part,
                            mask=inner,
                        )
                        if LEFT:
                            times_left += tl.sum(tl.where(d <= vector_low, part, 0.0), 1)
                        if RIGHT:
                            beyond = d >= vector_low + width - 1
                            times_right += tl.sum(tl.where(beyond, part, 0.0), 1)
                if GATE_GRAD:
                    part = ds * content
                    if PRODUCT:
                        part = part * pq * pk
                    if PHASE == 0:
                        gate_left += tl.sum(part, 1)
                    elif PHASE == 2:
                        gate_right += tl.sum(part, 1)
                    else:
                        lower, upper = diagonals(part, KEYS)
                        at = cells + first_key - slot - low + KEYS + tl.arange(0, KEYS)
                        tl.store(dscalars_ptr + at, lower + gate_carry)
                        gate_carry = upper
                dc = ds * SCALE
                if GATE:
                    dc = dc * gate
                if PRODUCT:
                    dc = dc * pq * pk
                if not REPLACED or PHASE == 0:
                    dq += product(dc.to(k.dtype), k, PRECISION)
                elif PHASE == 2:
                    dright += product(dc.to(k.dtype), k, PRECISION)
                else:
                    tl.store(dcontent_band_ptr + ii * width + (d - vector_low), dc, mask=inner)
                    if LEFT:
                        part = tl.where(d <= vector_low, dc, 0.0).to(k.dtype)
                        dq += product(part, k, PRECISION)
                    if RIGHT:
                        part = tl.where(d >= vector_low + width - 1, dc, 0.0).to(k.dtype)
                        dright += product(part, k, PRECISION)
    store_block(dq_ptr + b * q_b + h * q_h, dq, i, q_t, channel, inside, D, DP != D)
    if WIDE_Q:
        store_block(dwide_q_ptr + b * q_b + h * q_h, dvq, i, q_t, channel, inside, D, DP != D)
    if REPLACED:
        store_block(dright_q_ptr + b * q_b + h * q_h, dright, i, q_t, channel, inside, D, DP != D)
    if ADD_Q:
        tl.store(dquery_products_ptr + i * query_products_t, add_left, mask=inside)
        tl.store(dquery_products_ptr + i * query_products_t + width - 1, add_right, mask=inside)
    if PRODUCT:
        tl.store(dquery_multipliers_ptr + i * query_products_t, times_left, mask=inside)
        tl.store(
            dquery_multipliers_ptr + i * query_products_t + width - 1, times_right, mask=inside
        )
    if FACTORS:
        dquery_factors_ptr += n64 * tgt_len * RANK
        store_block(dquery_factors_ptr, df, i, RANK, place, inside, RANK, RP != RANK)
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


@triton.jit(do_not_specialize=VARYING)
def keys_kernel(
    q_ptr, k_ptr, v_ptr, right_q_ptr, dout_ptr, top_ptr, mass_ptr, delta_ptr, query_products_ptr, key_products_ptr, query_multipliers_ptr,
    key_multipliers_ptr, content_band_ptr, dprobs_ptr, static_ptr, gate_ptr, query_factors_ptr, key_factors_ptr, reset_ptr, first_ptr,
    padding_ptr, documents_ptr, wide_q_ptr, wide_k_ptr, query_vectors_ptr, key_vectors_ptr,
    dwide_k_ptr, dk_ptr, dv_ptr, dkey_products_ptr, dkey_multipliers_ptr, dkey_factors_ptr,
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
    FAR_LEFT: tl.constexpr, FAR_RIGHT: tl.constexpr, PRECISION: tl.constexpr,
    WIDE_Q: tl.constexpr, WIDE_K: tl.constexpr,
):  # fmt: skip
    """Gradients that belong to KEYS keys of one head; tiles are (keys, rows)."""
    blocks = tl.cdiv(src_len, KEYS)
    n = tl.program_id(0) // blocks
    first_key = tl.program_id(0) % blocks * KEYS
    b, h, n64 = (n // heads).to(tl.int64), (n % heads).to(tl.int64), n.to(tl.int64)
    j = first_key + tl.arange(0, KEYS)
    here = j < src_len
    jj, there = j[:, None], here[:, None]
    channel, place = tl.arange(0, DP), tl.arange(0, RP)
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    right_q_ptr += b * q_b + h * q_h
    dout_ptr += b * out_b + h * out_h
    top_ptr += n64 * tgt_len
    mass_ptr += n64 * tgt_len
    delta_ptr += n64 * tgt_len
    k = block_of(k_ptr, j, k_t, channel, here, D, DP != D)
    v = block_of(v_ptr, j, v_t, channel, here, D, DP != D)
    g, first, theta_row, theta_column = k, 0, 0.0, 0.0
    vk = k
    wide_q_ptr += b * q_b + h * q_h
    query_vectors_ptr += h * query_vectors_h
    key_vectors_ptr += h * key_vectors_h
    if WIDE_K:
        vk = block_of(wide_k_ptr + b * k_b + h * k_h, j, k_t, channel, here, D, DP != D)
    if FACTORS:
        query_factors_ptr += b * query_factors_b + h * query_factors_h
        key_factors_ptr += b * key_factors_b + h * key_factors_h
        g = block_of(key_factors_ptr, j, key_factors_t, place, here, RANK, RP != RANK)
    if RESET:
        first = tl.load(first_ptr + b * first_b).to(tl.int32)
        theta_row = tl.load(reset_ptr + h * reset_h)
        theta_column = tl.load(reset_ptr + h * reset_h + 1)
    query_products_ptr += b * query_products_b + h * query_products_h
    key_products_ptr += b * key_products_b + h * key_products_h
    query_multipliers_ptr += b * query_products_b + h * query_products_h
    key_multipliers_ptr += b * key_products_b + h * key_products_h
    dkey_products_ptr += b * key_products_b + h * key_products_h
    dkey_multipliers_ptr += b * key_products_b + h * key_products_h
    content_band_ptr += n64 * tgt_len * width
    dprobs_ptr += n64 * tgt_len * width
    static_ptr += h * static_h
    gate_ptr += h * gate_h
    padding_ptr += b * src_len
    documents_ptr += b * src_len
    begin, middle, after, end = rows_seeing(
        first_key, tgt_len, start, low, high, ROWS, KEYS, CAUSAL, WINDOW, FAR_LEFT, FAR_RIGHT
    )

    dk, dv = tl.zeros((KEYS, DP), ACC), tl.zeros((KEYS, DP), ACC)
    dg, dvk = dk, dk
    if FACTORS:
        dg = tl.zeros((KEYS, RP), ACC)
    none = tl.zeros((KEYS,), ACC)
    add_left, add_right, times_left, times_right = none, none, none, none
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
                q = block_of(q_ptr, i, q_t, channel, inside, D, DP != D)
                dout = block_of(dout_ptr, i, out_t, channel, inside, D, DP != D)
                top = tl.load(top_ptr + i, mask=inside, other=0.0)
                mass = tl.load(mass_ptr + i, mask=inside, other=float("inf"))
                delta = tl.load(delta_ptr + i, mask=inside, other=0.0)
                right, f, row, column = q, q, within, within
                if REPLACED:
                    right = block_of(right_q_ptr, i, q_t, channel, inside, D, DP != D)
                if FACTORS:
                    f = block_of(
                        query_factors_ptr, i, query_factors_t, place, inside, RANK, RP != RANK
                    )
                if RESET:
                    row = start + ii == first
                    column = (jj == first) & (start + ii != first)
                content = content_of(
                    q, right, k, content_band_ptr, ii, jj, d, within, there, vector_low, width,
                    PHASE, True, REPLACED, LEFT, RIGHT, PRECISION,
                ).to(ACC) * SCALE  # fmt: skip
                s = content
                if GATE:
                    gate = over_distances(gate_ptr, d, scalar_low, scalar_width, PHASE)
                    s = s * gate
                if PRODUCT:
                    pq = table_of(
                        query_multipliers_ptr,
                        ii,
                        query_products_t,
                        d,
                        vector_low,
                        width,
                        within,
                        PHASE,
                    )
                    pk = table_of(
                        key_multipliers_ptr, jj, key_products_t, d, vector_low, width, there, PHASE
                    )
                    s = s * pq * pk
                wide, vq = s, q
                if WIDE_Q:
                    vq = block_of(wide_q_ptr, i, q_t, channel, inside, D, DP != D)
                if WIDE_Q or WIDE_K:
                    at = first_key - first_row - start - (KEYS - 1) - wide_low
                    wide = wide_block(
                        vq, vk, query_vectors_ptr, key_vectors_ptr, at, wide_width, channel, D, DP, KEYS, True,
                        WIDE_Q, WIDE_K, ACC, PRECISION,
                    )  # fmt: skip
                s = add_positions(
                    s, wide, f, g, ii, jj, d, row, column, within, there,
                    query_products_ptr, query_products_t, key_products_ptr, key_products_t, static_ptr, theta_row, theta_column,
                    vector_low, width, scalar_low, scalar_width,
                    PHASE, True, WIDE_Q or WIDE_K, ADD_Q, ADD_K, STATIC, FACTORS, RESET, SCALE,
                    PRECISION,
                )  # fmt: skip
                p = tl.exp2((s - top[None, :]) * LOG2E - mass[None, :])
                if PHASE != 0 or PADDING or WINDOW or DOCUMENTS:
                    seen = visible(
                        ii, jj, d, start, there, padding_ptr, documents_ptr, src_len,
                        PHASE, CAUSAL, PADDING, WINDOW, DOCUMENTS, within,
                    )  # fmt: skip
                    p = tl.where(seen, p, 0.0)
                dp = product(v, tl.trans(dout), PRECISION).to(ACC)
                if VALUES:
                    part = table_of(dprobs_ptr, ii, width, d, vector_low, width, within, PHASE)
                    dp += part.to(ACC)
                used = p
                if DROP:
                    keep = kept(seed, n, i, first_key, DROP, ROWS, KEYS, True)
                    inverse = 65536.0 / (65536 - DROP)
                    used = tl.where(keep, p * inverse, 0.0)
                    dp = tl.where(keep, dp * inverse, 0.0)
                dv += product(used.to(dout.dtype), dout, PRECISION)
                ds = p * (dp - delta[None, :])

                inner = (d > vector_low) & (d < vector_low + width - 1) & within & there
                free = ds
                if RESET:
                    free = tl.where(row | column, 0.0, ds)
                if WIDE_K:
                    part = ds
                    if RESET & 1:
                        part = free
                    dvk += wide_back(
                        part * SCALE, key_vectors_ptr, at, wide_width, channel, vk, D, DP, KEYS, True,
                        PRECISION,
                    )  # fmt: skip
                if ADD_K:
                    part = ds
                    if RESET & 1:
                        part = free
                    part = part * SCALE
                    if PHASE == 0:
                        add_left += tl.sum(part, 1)
                    elif PHASE == 2:
                        add_right += tl.sum(part, 1)
                    else:
                        tl.store(
                            dkey_products_ptr + jj * key_products_t + (d - vector_low),
                            part,
                            mask=inner,
                        )
                        if LEFT:
                            add_left += tl.sum(tl.where(d <= vector_low, part, 0.0), 1)
                        if RIGHT:
                            beyond = d >= vector_low + width - 1
                            add_right += tl.sum(tl.where(beyond, part, 0.0), 1)
                if FACTORS:
                    part = ds
                    if RESET & 4:
                        part = free
                    dg += product(part.to(f.dtype), f, PRECISION)
                if PRODUCT:
                    part = ds * content * pq
                    if GATE:
                        part *= gate
                    if PHASE == 0:
                        times_left += tl.sum(part, 1)
                    elif PHASE == 2:
                        times_right += tl.sum(part, 1)
                    else:
                        tl.store(
                            dkey_multipliers_ptr + jj * key_products_t + (d - vector_low),
                            part,
                            mask=inner,
                        )
                        if LEFT:
                            times_left += tl.sum(tl.where(d <= vector_low, part, 0.0), 1)
                        if RIGHT:
                            beyond = d >= vector_low + width - 1
                            times_right += tl.sum(tl.where(beyond, part, 0.0), 1)
                dc = ds * SCALE
                if GATE:
                    dc = dc * gate
                if PRODUCT:
                    dc = dc * pq * pk
                if not REPLACED or PHASE == 0:
                    dk += product(dc.to(q.dtype), q, PRECISION)
                elif PHASE == 2:
                    dk += product(dc.to(q.dtype), right, PRECISION)
                else:
                    if LEFT:
                        part = tl.where(d <= vector_low, dc, 0.0).to(q.dtype)
                        dk += product(part, q, PRECISION)
                    if RIGHT:
                        part = tl.where(d >= vector_low + width - 1, dc, 0.0).to(q.dtype)
                        dk += product(part, right, PRECISION)
    store_block(dk_ptr + b * k_b + h * k_h, dk, j, k_t, channel, here, D, DP != D)
    store_block(dv_ptr + b * v_b + h * v_h, dv, j, v_t, channel, here, D, DP != D)
    if WIDE_K:
        store_block(dwide_k_ptr + b * k_b + h * k_h, dvk, j, k_t, channel, here, D, DP != D)
    if ADD_K:
        tl.store(dkey_products_ptr + j * key_products_t, add_left, mask=here)
        tl.store(dkey_products_ptr + j * key_products_t + width - 1, add_right, mask=here)
    if PRODUCT:
        tl.store(dkey_multipliers_ptr + j * key_products_t, times_left, mask=here)
        tl.store(dkey_multipliers_ptr + j * key_products_t + width - 1, times_right, mask=here)
    if FACTORS:
        dkey_factors_ptr += n64 * src_len * RANK
        store_block(dkey_factors_ptr, dg, j, RANK, place, here, RANK, RP != RANK)
