"""The forward kernel: an online softmax over tiles of keys, left tail, band, right tail."""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.kernel_args import VARYING, Sizes
from relpos_fairseq.attention.triton.logits import (
    move_to_head,
    split_head_index,
    store_near_cells,
    sum_clipped_ends,
    tile_logits,
)
from relpos_fairseq.attention.triton.tile import (
    LOG2E,
    dropout_mask,
    load_keys,
    load_queries,
    load_values,
    locate_cells,
    mask_cells,
    matmul,
    store_block,
    visible_keys,
)


@triton.jit(do_not_specialize=VARYING)
def forward_kernel(
    given,
    strides,
    # results: output, its rounding error, top, mass, and logits of the band (T, width) for `probs`
    out_ptr,
    rest_ptr,
    top_ptr,
    mass_ptr,
    value_ptr,
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
    REST: tl.constexpr,
):
    """Evaluate ROWS queries of one head against all keys that they see."""
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
    # The last rows of a causal call see most keys: they begin first.
    first_row = (blocks - 1 - tl.program_id(0) % blocks) * F.ROWS
    given, reset = move_to_head(n, given, strides, sizes, F)
    # queries (ROWS, DP)
    rows = load_queries(first_row, given, strides, sizes, F)
    b, h, n64 = split_head_index(n, heads)
    value_ptr += n64 * tgt_len * width
    bounds = visible_keys(first_row + start, sizes, F)
    top = tl.full((F.ROWS,), float("-inf"), F.ACC)  # the largest logit so far
    mass = tl.zeros((F.ROWS,), F.ACC)  # sum of exp(logit - top)
    left_mass, right_mass = mass, mass  # the tails', after dropout
    acc = tl.zeros((F.ROWS, F.DP), F.ACC)  # sum of exp(logit - top) v
    for PHASE in tl.static_range(3):
        if PHASE == 1 or (PHASE == 0 and F.FAR_LEFT) or (PHASE == 2 and F.FAR_RIGHT):
            for first_key in range(bounds[PHASE], bounds[PHASE + 1], F.KEYS):
                # keys (KEYS, DP)
                keys = load_keys(first_key, given, strides, sizes, F)
                at = locate_cells(rows, keys, start, False)
                # logits s (ROWS, KEYS)
                tile = tile_logits(rows, keys, at, given, reset, strides, sizes, PHASE, False, F)
                s = mask_cells(tile.s, float("-inf"), at, given, sizes, PHASE, F)
                # exponentials p (ROWS, KEYS) against the largest logit so far; earlier sums shrink
                new_top = tl.maximum(top, tl.max(s, 1))
                # A row without a key so far has top -inf, and -inf - -inf is NaN.
                against = tl.where(new_top == float("-inf"), 0.0, new_top)
                p = tl.exp2((s - against[:, None]) * LOG2E)
                shrink = tl.exp2((top - against) * LOG2E)
                mass = mass * shrink + tl.sum(p, 1)
                if F.DROP:
                    keep = dropout_mask(seed, n, rows, keys, False, F)
                    p = tl.where(keep, p, 0.0)
                    s = tl.where(keep, s, float("-inf"))
                if F.VALUES:
                    # the band's logits, which become probabilities at the end; the tails' sums
                    left_mass *= shrink
                    right_mass *= shrink
                    left_mass, right_mass = sum_clipped_ends(p, left_mass, right_mass, at, sizes, PHASE, True, True)
                    if PHASE == 1:
                        store_near_cells(value_ptr, s, at.i, width, at, sizes)
                # acc += p v: (ROWS, KEYS) (KEYS, DP)
                v = load_values(first_key, given, strides, sizes, F)
                acc = acc * shrink[:, None]
                acc += matmul(p.to(v.dtype), v, F.PRECISION)
                top = new_top
    # the output (ROWS, DP), and what the backward pass needs (ROWS,)
    i, inside = rows.index, rows.inside
    empty = mass == 0.0
    total = tl.where(empty, 1.0, mass)
    inverse = 65536.0 / (65536 - F.DROP)
    out = acc * (inverse / total)[:, None]
    rounded = out.to(rows.content.dtype)
    base = b * strides.out_b + h * strides.out_h
    store_block(out_ptr + base, rounded, i, strides.out_t, inside, F.D, F.DP)
    if REST:
        rest = out - rounded.to(F.ACC)
        store_block(rest_ptr + base, rest, i, strides.out_t, inside, F.D, F.DP)
    top = tl.where(empty, 0.0, top)
    # Apart, since their sum would round large logits; infinite, so that rows without keys give 0.
    tl.store(top_ptr + n64 * tgt_len + i, top, mask=inside)
    mass = tl.where(empty, float("inf"), tl.log2(total))
    tl.store(mass_ptr + n64 * tgt_len + i, mass, mask=inside)
    if F.VALUES:
        # As logits, so that one formula makes probabilities of the whole table.
        ends = value_ptr + i * width
        tl.store(ends, top + tl.log2(left_mass) / LOG2E, mask=inside)
        tl.store(ends + width - 1, top + tl.log2(right_mass) / LOG2E, mask=inside)
