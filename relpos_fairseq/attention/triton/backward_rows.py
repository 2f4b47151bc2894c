"""The backward kernel that owns rows of queries: their gradients, those of tables and of scalars.

Every cell of a band is one (query, key) pair, so that its gradient is stored, not added; tails are
sums of rows.  Gradients of scalars are sums along diagonals of tiles, handed from tile to tile, one
buffer a block of rows.  No atomics, here or in `backward_keys.py`: same inputs, same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.logits import (
    free_of,
    gradient,
    head_of,
    known_of,
    logits,
    reset_cells,
    saved_at,
    store_band,
    store_cells,
    store_tails,
    to_head,
)
from relpos_fairseq.attention.triton.records import VARYING, Sizes
from relpos_fairseq.attention.triton.tile import (
    cells_of,
    diagonals,
    keys_of,
    keys_seen,
    product,
    rows_of,
    store_block,
    values_of,
)
from relpos_fairseq.attention.triton.wide import wide_back


@triton.jit
def store_diagonals(ptr, part, left, right, carry, first_distance, low, KEYS: tl.constexpr, PHASE: tl.constexpr):
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
    given,
    saved,
    strides,
    # results
    dq_ptr,
    dright_q_ptr,
    dwide_q_ptr,
    dquery_products_ptr,
    dquery_multipliers_ptr,
    dcontent_band_ptr,
    dquery_factors_ptr,
    dscalars_ptr,
    dsums_ptr,
    heads,
    tgt_len,
    src_len,
    start,
    low,
    high,
    vector_low,
    width,
    scalar_low,
    scalar_width,
    wide_low,
    wide_width,
    seed,
    F: tl.constexpr,
    STATIC_GRAD: tl.constexpr,
    GATE_GRAD: tl.constexpr,
):
    """Evaluate the gradients that belong to ROWS queries of one head.

    dscalars (N, blocks, 2, high - low + 1 + 4 KEYS) are sums over the rows by distance, of the
    static logits and of the gate, from distance low - 2 KEYS on; dsums (N, blocks, 8) those of
    whole tail tiles (static left, right, gate left, right) and of the reset's column.
    """
    sizes = Sizes(
        heads,
        tgt_len,
        src_len,
        start,
        low,
        high,
        vector_low,
        width,
        scalar_low,
        scalar_width,
        wide_low,
        wide_width,
        seed,
    )
    blocks = tl.cdiv(tgt_len, F.ROWS)
    n = tl.program_id(0) // blocks
    block = blocks - 1 - tl.program_id(0) % blocks
    first_row = block * F.ROWS
    given, reset = to_head(n, given, strides, sizes, F)
    saved = saved_at(n, saved, strides, sizes)
    # queries and dout (ROWS, DP); top, mass, delta (ROWS,)
    rows = rows_of(first_row, given, strides, sizes, F)
    known = known_of(rows, saved, strides, F)
    b, h, n64 = head_of(n, heads)
    of_q = b * strides.q_b + h * strides.q_h
    of_products = b * strides.qp_b + h * strides.qp_h
    dquery_products_ptr += of_products
    dquery_multipliers_ptr += of_products
    dcontent_band_ptr += n64 * tgt_len * width
    cells = high - low + 1 + 4 * F.KEYS
    dscalars_ptr += (n64 * blocks + block) * 2 * cells
    dsums_ptr += (n64 * blocks + block) * 8
    slot = first_row + start
    bounds = keys_seen(slot, sizes, F)

    dq = tl.zeros((F.ROWS, F.DP), F.ACC)
    dright_q, dwide_q, dquery_factors = dq, dq, dq
    if F.FACTORS:
        dquery_factors = tl.zeros((F.ROWS, F.RP), F.ACC)
    none = tl.zeros((F.ROWS,), F.ACC)
    add_left, add_right, times_left, times_right = none, none, none, none  # tails of products
    static_left, static_right, gate_left, gate_right = none, none, none, none
    column_sum = none
    carry = tl.zeros((F.KEYS,), F.ACC)
    static_carry, gate_carry = carry, carry
    for PHASE in tl.static_range(3):
        if PHASE == 1 or (PHASE == 0 and F.FAR_LEFT) or (PHASE == 2 and F.FAR_RIGHT):
            for first_key in range(bounds[PHASE], bounds[PHASE + 1], F.KEYS):
                # keys and values (KEYS, DP)
                v = values_of(first_key, given, strides, sizes, F)
                keys = keys_of(first_key, given, strides, sizes, F)
                # logits, and their gradient ds (ROWS, KEYS)
                at = cells_of(rows, keys, start, False)
                tile = logits(rows, keys, at, given, reset, strides, sizes, PHASE, False, F)
                _, ds = gradient(n, tile.s, v, known, rows, keys, at, given, saved, sizes, PHASE, False, F)
                of_vectors = free_of(ds, at, reset, sizes, 1, F)
                # the reset's column (ROWS,)
                if F.RESET:
                    _, column = reset_cells(at, start, reset.first)
                    column_sum += tl.sum(tl.where(column, ds, 0.0), 1)
                # vectors over many distances: dwide_q (ROWS, DP)
                if F.WIDE_Q:
                    dwide_q += wide_back(of_vectors * F.SCALE, given.query_vectors, rows, keys, sizes, False, F)
                # products with a band: dquery_products (T, width)
                if F.ADD_Q:
                    add_left, add_right = store_band(
                        dquery_products_ptr,
                        of_vectors * F.SCALE,
                        add_left,
                        add_right,
                        at.i,
                        strides.qp_t,
                        at,
                        sizes,
                        PHASE,
                        F,
                    )
                # static, by distance
                if STATIC_GRAD:
                    static_left, static_right, static_carry = store_diagonals(
                        dscalars_ptr,
                        free_of(ds, at, reset, sizes, 2, F),
                        static_left,
                        static_right,
                        static_carry,
                        first_key - slot,
                        low,
                        F.KEYS,
                        PHASE,
                    )
                # factors: (ROWS, KEYS) (KEYS, RP)
                if F.FACTORS:
                    part = free_of(ds, at, reset, sizes, 4, F).to(keys.factors.dtype)
                    dquery_factors += product(part, keys.factors, F.PRECISION)
                # what multiplies the content: dquery_multipliers (T, width), and the gate
                if F.PRODUCT:
                    times_left, times_right = store_band(
                        dquery_multipliers_ptr,
                        ds * tile.content * tile.by_key * tile.gate,
                        times_left,
                        times_right,
                        at.i,
                        strides.qp_t,
                        at,
                        sizes,
                        PHASE,
                        F,
                    )
                if GATE_GRAD:
                    gate_left, gate_right, gate_carry = store_diagonals(
                        dscalars_ptr + cells,
                        ds * tile.content * tile.by_query * tile.by_key,
                        gate_left,
                        gate_right,
                        gate_carry,
                        first_key - slot,
                        low,
                        F.KEYS,
                        PHASE,
                    )
                # content: dq += dc k, (ROWS, KEYS) (KEYS, DP)
                k = keys.content
                dc = ds * F.SCALE * tile.gate * tile.by_query * tile.by_key
                if not F.REPLACED or PHASE == 0:
                    dq += product(dc.to(k.dtype), k, F.PRECISION)
                elif PHASE == 2:
                    dright_q += product(dc.to(k.dtype), k, F.PRECISION)
                else:
                    store_cells(dcontent_band_ptr, dc, at.i, width, at, sizes)
                    if F.LEFT:
                        part = tl.where(at.d <= vector_low, dc, 0.0).to(k.dtype)
                        dq += product(part, k, F.PRECISION)
                    if F.RIGHT:
                        part = tl.where(at.d >= vector_low + width - 1, dc, 0.0).to(k.dtype)
                        dright_q += product(part, k, F.PRECISION)
    i, inside = rows.index, rows.inside
    store_block(dq_ptr + of_q, dq, i, strides.q_t, inside, F.D, F.DP)
    if F.WIDE_Q:
        store_block(dwide_q_ptr + of_q, dwide_q, i, strides.q_t, inside, F.D, F.DP)
    if F.REPLACED:
        store_block(dright_q_ptr + of_q, dright_q, i, strides.q_t, inside, F.D, F.DP)
    if F.ADD_Q:
        store_tails(dquery_products_ptr, add_left, add_right, i, strides.qp_t, width, inside)
    if F.PRODUCT:
        store_tails(dquery_multipliers_ptr, times_left, times_right, i, strides.qp_t, width, inside)
    if F.FACTORS:
        dquery_factors_ptr += n64 * tgt_len * F.RANK
        store_block(dquery_factors_ptr, dquery_factors, i, F.RANK, inside, F.RANK, F.RP)
    if STATIC_GRAD or GATE_GRAD:
        tiles = tl.cdiv(tl.maximum(bounds[2] - bounds[1], 0), F.KEYS)
        cell = bounds[1] + tiles * F.KEYS - slot - low + F.KEYS + tl.arange(0, F.KEYS)
        if STATIC_GRAD:
            tl.store(dscalars_ptr + cell, static_carry, mask=cell < cells)
            tl.store(dsums_ptr, tl.sum(static_left, 0))
            tl.store(dsums_ptr + 1, tl.sum(static_right, 0))
        if GATE_GRAD:
            tl.store(dscalars_ptr + cells + cell, gate_carry, mask=cell < cells)
            tl.store(dsums_ptr + 2, tl.sum(gate_left, 0))
            tl.store(dsums_ptr + 3, tl.sum(gate_right, 0))
    if F.RESET:
        tl.store(dsums_ptr + 4, tl.sum(column_sum, 0))
