"""The backward kernel that owns keys: their gradients, the values', and those of keys' tables.

A cell of the band of keys' products is one pair, and is stored; tails are sums of columns.
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
    saved_at,
    store_band,
    store_tails,
    to_head,
)
from relpos_fairseq.attention.triton.records import VARYING, Sizes
from relpos_fairseq.attention.triton.tile import (
    cells_of,
    keys_of,
    product,
    rows_of,
    rows_seeing,
    store_block,
    values_of,
)
from relpos_fairseq.attention.triton.wide import wide_back


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
    given, reset = to_head(n, given, strides, sizes, F)
    saved = saved_at(n, saved, strides, sizes)
    # keys and values (KEYS, DP)
    keys = keys_of(first_key, given, strides, sizes, F)
    j, there = keys.index, keys.inside
    v = values_of(first_key, given, strides, sizes, F)
    b, h, n64 = head_of(n, heads)
    of_k = b * strides.k_b + h * strides.k_h
    of_products = b * strides.kp_b + h * strides.kp_h
    dkey_products_ptr += of_products
    dkey_multipliers_ptr += of_products
    bounds = rows_seeing(first_key, sizes, F)

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
                rows = rows_of(first_row, given, strides, sizes, F)
                known = known_of(rows, saved, strides, F)
                # logits, probabilities p after dropout, gradient ds of logits: (KEYS, ROWS)
                at = cells_of(rows, keys, start, True)
                tile = logits(rows, keys, at, given, reset, strides, sizes, PHASE, True, F)
                p, ds = gradient(n, tile.s, v, known, rows, keys, at, given, saved, sizes, PHASE, True, F)
                # dv += p dout: (KEYS, ROWS) (ROWS, DP)
                dv += product(p.to(known.dout.dtype), known.dout, F.PRECISION)
                of_vectors = free_of(ds, at, reset, sizes, 1, F)
                # vectors over many distances: dwide_k (KEYS, DP)
                if F.WIDE_K:
                    dwide_k += wide_back(of_vectors * F.SCALE, given.key_vectors, rows, keys, sizes, True, F)
                # products with a band: dkey_products (S, width)
                if F.ADD_K:
                    add_left, add_right = store_band(
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
                    part = free_of(ds, at, reset, sizes, 4, F).to(rows.factors.dtype)
                    dkey_factors += product(part, rows.factors, F.PRECISION)
                # what multiplies the content: dkey_multipliers (S, width)
                if F.PRODUCT:
                    times_left, times_right = store_band(
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
                    dk += product(dc.to(q.dtype), q, F.PRECISION)
                elif PHASE == 2:
                    dk += product(dc.to(q.dtype), rows.right, F.PRECISION)
                else:
                    if F.LEFT:
                        part = tl.where(at.d <= vector_low, dc, 0.0).to(q.dtype)
                        dk += product(part, q, F.PRECISION)
                    if F.RIGHT:
                        part = tl.where(at.d >= vector_low + width - 1, dc, 0.0).to(q.dtype)
                        dk += product(part, rows.right, F.PRECISION)
    store_block(dk_ptr + of_k, dk, j, strides.k_t, there, F.D, F.DP)
    of_v = b * strides.v_b + h * strides.v_h
    store_block(dv_ptr + of_v, dv, j, strides.v_t, there, F.D, F.DP)
    if F.WIDE_K:
        store_block(dwide_k_ptr + of_k, dwide_k, j, strides.k_t, there, F.D, F.DP)
    if F.ADD_K:
        store_tails(dkey_products_ptr, add_left, add_right, j, strides.kp_t, width, there)
    if F.PRODUCT:
        store_tails(dkey_multipliers_ptr, times_left, times_right, j, strides.kp_t, width, there)
    if F.FACTORS:
        dkey_factors_ptr += n64 * src_len * F.RANK
        store_block(dkey_factors_ptr, dkey_factors, j, F.RANK, there, F.RANK, F.RP)
