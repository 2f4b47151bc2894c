"""Compute all gradients of fused attention by four kernels, without atomics."""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.kernel_args import VARYING, Sizes
from relpos_fairseq.attention.triton.logits import (
    load_saved,
    lower_distance_mask,
    move_saved_to_head,
    move_to_head,
    reset_cells,
    split_head_index,
    store_clipped_ends,
    store_near_cells,
    store_products,
    tile_gradient,
    tile_logits,
    vector_products_backward,
    zero_replaced,
)
from relpos_fairseq.attention.triton.tile import (
    load_block,
    load_keys,
    load_queries,
    load_values,
    locate_cells,
    matmul,
    store_block,
    sum_diagonals,
    visible_keys,
    visible_rows,
)

# ---- What both backward kernels begin with: each row's sum of probabilities times their gradients.


@triton.jit(do_not_specialize=["tgt_len", "width"])
def delta_kernel(
    out_ptr,
    rest_ptr,
    dout_ptr,
    probs_ptr,
    dprobs_ptr,
    delta_ptr,
    out_b,
    out_h,
    out_t,
    heads,
    tgt_len,
    width,
    D: tl.constexpr,
    DP: tl.constexpr,
    ROWS: tl.constexpr,
    ACC: tl.constexpr,
    VALUES: tl.constexpr,
    REST: tl.constexpr,
):
    """Sum probability times its gradient over keys, by way of the output: delta (N, T)."""
    blocks = tl.cdiv(tgt_len, ROWS)
    n = tl.program_id(0) // blocks
    b, h, n64 = (n // heads).to(tl.int64), (n % heads).to(tl.int64), n.to(tl.int64)
    i = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS)
    inside = i < tgt_len
    base = b * out_b + h * out_h
    out = load_block(out_ptr + base, i, out_t, inside, D, DP).to(ACC)
    if REST:
        out += load_block(rest_ptr + base, i, out_t, inside, D, DP).to(ACC)
    dout = load_block(dout_ptr + base, i, out_t, inside, D, DP).to(ACC)
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


# ---- The backward kernel that owns rows of queries: their gradients, those of tables and of scalars.
# Every cell of a band is one (query, key) pair, so that its gradient is stored, not added; tails are
# sums of rows.  Gradients of scalars are sums along diagonals of tiles, handed from tile to tile, one
# buffer a block of rows.  No atomics, here or in `backward_keys.py`: same inputs, same bits.


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
        lower, upper = sum_diagonals(part, KEYS)
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
    given, reset = move_to_head(n, given, strides, sizes, F)
    saved = move_saved_to_head(n, saved, strides, sizes)
    # queries and dout (ROWS, DP); top, mass, delta (ROWS,)
    rows = load_queries(first_row, given, strides, sizes, F)
    known = load_saved(rows, saved, strides, F)
    b, h, n64 = split_head_index(n, heads)
    of_q = b * strides.q_b + h * strides.q_h
    of_products = b * strides.qp_b + h * strides.qp_h
    dquery_products_ptr += of_products
    dquery_multipliers_ptr += of_products
    dcontent_band_ptr += n64 * tgt_len * width
    cells = high - low + 1 + 4 * F.KEYS
    dscalars_ptr += (n64 * blocks + block) * 2 * cells
    dsums_ptr += (n64 * blocks + block) * 8
    slot = first_row + start
    bounds = visible_keys(slot, sizes, F)

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
                v = load_values(first_key, given, strides, sizes, F)
                keys = load_keys(first_key, given, strides, sizes, F)
                # logits, and their gradient ds (ROWS, KEYS)
                at = locate_cells(rows, keys, start, False)
                tile = tile_logits(rows, keys, at, given, reset, strides, sizes, PHASE, False, F)
                _, ds = tile_gradient(n, tile.s, v, known, rows, keys, at, given, saved, sizes, PHASE, False, F)
                of_vectors = zero_replaced(ds, at, reset, sizes, 1, F)
                # the reset's column (ROWS,)
                if F.RESET:
                    _, column = reset_cells(at, start, reset.first)
                    column_sum += tl.sum(tl.where(column, ds, 0.0), 1)
                # vectors over many distances: dwide_q (ROWS, DP)
                if F.WIDE_Q:
                    dwide_q += vector_products_backward(
                        of_vectors * F.SCALE, given.query_vectors, rows, keys, sizes, False, F
                    )
                # products with a band: dquery_products (T, width)
                if F.ADD_Q:
                    add_left, add_right = store_products(
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
                        zero_replaced(ds, at, reset, sizes, 2, F),
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
                    part = zero_replaced(ds, at, reset, sizes, 4, F).to(keys.factors.dtype)
                    dquery_factors += matmul(part, keys.factors, F.PRECISION)
                # what multiplies the content: dquery_multipliers (T, width), and the gate
                if F.PRODUCT:
                    times_left, times_right = store_products(
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
                    dq += matmul(dc.to(k.dtype), k, F.PRECISION)
                elif PHASE == 2:
                    dright_q += matmul(dc.to(k.dtype), k, F.PRECISION)
                else:
                    store_near_cells(dcontent_band_ptr, dc, at.i, width, at, sizes)
                    if F.LEFT:
                        part = tl.where(at.d <= vector_low, dc, 0.0).to(k.dtype)
                        dq += matmul(part, k, F.PRECISION)
                    if F.RIGHT:
                        part = tl.where(at.d >= vector_low + width - 1, dc, 0.0).to(k.dtype)
                        dright_q += matmul(part, k, F.PRECISION)
    i, inside = rows.index, rows.inside
    store_block(dq_ptr + of_q, dq, i, strides.q_t, inside, F.D, F.DP)
    if F.WIDE_Q:
        store_block(dwide_q_ptr + of_q, dwide_q, i, strides.q_t, inside, F.D, F.DP)
    if F.REPLACED:
        store_block(dright_q_ptr + of_q, dright_q, i, strides.q_t, inside, F.D, F.DP)
    if F.ADD_Q:
        store_clipped_ends(dquery_products_ptr, add_left, add_right, i, strides.qp_t, width, inside)
    if F.PRODUCT:
        store_clipped_ends(dquery_multipliers_ptr, times_left, times_right, i, strides.qp_t, width, inside)
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


# ---- The backward kernel that owns keys: their gradients, the values', and those of keys' tables.
# A cell of the band of keys' products is one pair, and is stored; tails are sums of columns.


@triton.jit(do_not_specialize=VARYING)
def keys_kernel(
    given,
    saved,
    strides,
    # results
    dk_ptr,
    dwide_k_ptr,
    dv_ptr,
    dkey_products_ptr,
    dkey_multipliers_ptr,
    dkey_factors_ptr,
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
):
    """Evaluate the gradients that belong to KEYS keys of one head; tiles are (KEYS, ROWS)."""
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
    blocks = tl.cdiv(src_len, F.KEYS)
    n = tl.program_id(0) // blocks
    first_key = tl.program_id(0) % blocks * F.KEYS
    given, reset = move_to_head(n, given, strides, sizes, F)
    saved = move_saved_to_head(n, saved, strides, sizes)
    # keys and values (KEYS, DP)
    keys = load_keys(first_key, given, strides, sizes, F)
    j, there = keys.index, keys.inside
    v = load_values(first_key, given, strides, sizes, F)
    b, h, n64 = split_head_index(n, heads)
    of_k = b * strides.k_b + h * strides.k_h
    of_products = b * strides.kp_b + h * strides.kp_h
    dkey_products_ptr += of_products
    dkey_multipliers_ptr += of_products
    bounds = visible_rows(first_key, sizes, F)

    dk, dv = tl.zeros((F.KEYS, F.DP), F.ACC), tl.zeros((F.KEYS, F.DP), F.ACC)
    dkey_factors, dwide_k = dk, dk
    if F.FACTORS:
        dkey_factors = tl.zeros((F.KEYS, F.RP), F.ACC)
    none = tl.zeros((F.KEYS,), F.ACC)
    add_left, add_right, times_left, times_right = none, none, none, none  # tails of products
    for PHASE in tl.static_range(2, -1, -1):
        if PHASE == 1 or (PHASE == 0 and F.FAR_LEFT) or (PHASE == 2 and F.FAR_RIGHT):
            for first_row in range(bounds[2 - PHASE], bounds[3 - PHASE], F.ROWS):
                # queries and dout (ROWS, DP); top, mass, delta (ROWS,)
                rows = load_queries(first_row, given, strides, sizes, F)
                known = load_saved(rows, saved, strides, F)
                # logits, probabilities p after dropout, gradient ds of logits: (KEYS, ROWS)
                at = locate_cells(rows, keys, start, True)
                tile = tile_logits(rows, keys, at, given, reset, strides, sizes, PHASE, True, F)
                p, ds = tile_gradient(n, tile.s, v, known, rows, keys, at, given, saved, sizes, PHASE, True, F)
                # dv += p dout: (KEYS, ROWS) (ROWS, DP)
                dv += matmul(p.to(known.dout.dtype), known.dout, F.PRECISION)
                of_vectors = zero_replaced(ds, at, reset, sizes, 1, F)
                # vectors over many distances: dwide_k (KEYS, DP)
                if F.WIDE_K:
                    dwide_k += vector_products_backward(
                        of_vectors * F.SCALE, given.key_vectors, rows, keys, sizes, True, F
                    )
                # products with a band: dkey_products (S, width)
                if F.ADD_K:
                    add_left, add_right = store_products(
                        dkey_products_ptr,
                        of_vectors * F.SCALE,
                        add_left,
                        add_right,
                        at.j,
                        strides.kp_t,
                        at,
                        sizes,
                        PHASE,
                        F,
                    )
                # factors: (KEYS, ROWS) (ROWS, RP)
                if F.FACTORS:
                    part = zero_replaced(ds, at, reset, sizes, 4, F).to(rows.factors.dtype)
                    dkey_factors += matmul(part, rows.factors, F.PRECISION)
                # what multiplies the content: dkey_multipliers (S, width)
                if F.PRODUCT:
                    times_left, times_right = store_products(
                        dkey_multipliers_ptr,
                        ds * tile.content * tile.by_query * tile.gate,
                        times_left,
                        times_right,
                        at.j,
                        strides.kp_t,
                        at,
                        sizes,
                        PHASE,
                        F,
                    )
                # content: dk += dc q, (KEYS, ROWS) (ROWS, DP); trilinear: the tails alone
                q = rows.content
                dc = ds * F.SCALE * tile.gate * tile.by_query * tile.by_key
                if not F.REPLACED or PHASE == 0:
                    dk += matmul(dc.to(q.dtype), q, F.PRECISION)
                elif PHASE == 2:
                    dk += matmul(dc.to(q.dtype), rows.right, F.PRECISION)
                else:
                    if F.LEFT:
                        part = tl.where(at.d <= vector_low, dc, 0.0).to(q.dtype)
                        dk += matmul(part, q, F.PRECISION)
                    if F.RIGHT:
                        part = tl.where(at.d >= vector_low + width - 1, dc, 0.0).to(q.dtype)
                        dk += matmul(part, rows.right, F.PRECISION)
    store_block(dk_ptr + of_k, dk, j, strides.k_t, there, F.D, F.DP)
    of_v = b * strides.v_b + h * strides.v_h
    store_block(dv_ptr + of_v, dv, j, strides.v_t, there, F.D, F.DP)
    if F.WIDE_K:
        store_block(dwide_k_ptr + of_k, dwide_k, j, strides.k_t, there, F.D, F.DP)
    if F.ADD_K:
        store_clipped_ends(dkey_products_ptr, add_left, add_right, j, strides.kp_t, width, there)
    if F.PRODUCT:
        store_clipped_ends(dkey_multipliers_ptr, times_left, times_right, j, strides.kp_t, width, there)
    if F.FACTORS:
        dkey_factors_ptr += n64 * src_len * F.RANK
        store_block(dkey_factors_ptr, dkey_factors, j, F.RANK, there, F.RANK, F.RP)


# ---- The backward kernel that owns diagonals of tiles: gradients of vectors over many distances.
# The gradient of a vector is a sum over one diagonal of tiles, see `wide`.


@triton.jit(do_not_specialize=[*VARYING, "first_diagonal", "diagonals"])
def diagonals_kernel(
    given,
    saved,
    strides,
    parts_ptr,  # the result
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
    first_diagonal,
    diagonals,
    F: tl.constexpr,
    OF_KEYS: tl.constexpr,
):
    """Sum what one diagonal of tiles gives the vectors of its 2 X distances, for one head.

    parts (N, diagonals, 2, X, D): the lower and the upper X distances of each diagonal, for the
    vectors that queries (or, OF_KEYS, keys) are multiplied with.
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
    X: tl.constexpr = F.KEYS
    n = tl.program_id(0) // diagonals
    diagonal = tl.program_id(0) % diagonals
    shift = first_diagonal + diagonal  # blocks of keys less blocks of rows
    given, reset = move_to_head(n, given, strides, sizes, F)
    saved = move_saved_to_head(n, saved, strides, sizes)
    lower, upper = tl.zeros((X, F.DP), F.ACC), tl.zeros((X, F.DP), F.ACC)
    own = tl.arange(0, X)
    begin = tl.maximum(0, -shift)
    end = tl.minimum(tl.cdiv(tgt_len, X), tl.cdiv(src_len, X) - shift)
    for block in range(begin, end):
        # queries, dout, keys, values (X, DP); top, mass, delta (X,)
        rows = load_queries(block * X, given, strides, sizes, F)
        keys = load_keys((block + shift) * X, given, strides, sizes, F)
        known = load_saved(rows, saved, strides, F)
        v = load_values(keys.first, given, strides, sizes, F)
        # logits, and their gradient ds (X, X)
        at = locate_cells(rows, keys, start, False)
        tile = tile_logits(rows, keys, at, given, reset, strides, sizes, 1, False, F)
        _, ds = tile_gradient(n, tile.s, v, known, rows, keys, at, given, saved, sizes, 1, False, F)
        ds = zero_replaced(ds, at, reset, sizes, 1, F) * F.SCALE
        # by distance: (X distances, X) (X, DP), lower and upper ones
        if OF_KEYS:
            wide = keys.wide
            turned = tl.gather(ds, (own[None, :] - own[:, None] + X - 1) % X, 0)
            in_low = lower_distance_mask(X, True, False)
            low_part = tl.where(in_low, turned, 0.0).to(wide.dtype)
            up_part = tl.where(in_low, 0.0, turned).to(wide.dtype)
        else:
            wide = rows.wide
            turned = tl.gather(ds, (own[:, None] + own[None, :] + 1) % X, 1)
            in_low = lower_distance_mask(X, False, True)
            low_part = tl.trans(tl.where(in_low, turned, 0.0).to(wide.dtype))
            up_part = tl.trans(tl.where(in_low, 0.0, turned).to(wide.dtype))
        lower += matmul(low_part, wide, F.PRECISION)
        upper += matmul(up_part, wide, F.PRECISION)
    parts_ptr += (n.to(tl.int64) * diagonals + diagonal) * 2 * X * F.D
    store_block(parts_ptr, lower, own, F.D, own < X, F.D, F.DP)
    store_block(parts_ptr + X * F.D, upper, own, F.D, own < X, F.D, F.DP)
