"""The forward pass: an online softmax over tiles of keys, from the left of the outer window to its right."""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.logits import (
    move_to_head,
    split_head_index,
    store_clipped_ends,
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


@triton.jit
def attend_queries(operands, results, strides, sizes, seed, F: tl.constexpr):
    """Evaluate ROWS queries of one head against all keys that they see, into `ForwardResults`."""
    tgt_len = sizes.tgt_len
    blocks = tl.cdiv(tgt_len, F.ROWS)
    n = tl.program_id(0) // blocks
    # The last rows of a causal call see most keys: they begin first.
    first_row = (blocks - 1 - tl.program_id(0) % blocks) * F.ROWS
    operands, reset = move_to_head(n, operands, strides, sizes, F)
    # queries (ROWS, DP)
    rows = load_queries(first_row, operands, strides, sizes, F)
    b, h, n64 = split_head_index(n, sizes.heads)
    near_logits = results.near_logits + n64 * tgt_len * sizes.near_width
    bounds = visible_keys(first_row + sizes.start, sizes, F)
    row_max = tl.full((F.ROWS,), float("-inf"), F.ACC)  # the largest logit so far
    row_sum = tl.zeros((F.ROWS,), F.ACC)  # sum of exp(logit - row_max)
    left_sum, right_sum = row_sum, row_sum  # the same of the near window's clipped ends, after dropout
    acc = tl.zeros((F.ROWS, F.DP), F.ACC)  # sum of exp(logit - row_max) v
    for PHASE in tl.static_range(3):
        if PHASE == 1 or (PHASE == 0 and F.OUTER_LEFT) or (PHASE == 2 and F.OUTER_RIGHT):
            for first_key in range(bounds[PHASE], bounds[PHASE + 1], F.KEYS):
                # keys (KEYS, DP)
                keys = load_keys(first_key, operands, strides, sizes, F)
                at = locate_cells(rows, keys, sizes.start, False)
                # logits s (ROWS, KEYS)
                tile = tile_logits(rows, keys, at, operands, reset, strides, sizes, PHASE, False, F)
                s = mask_cells(tile.s, float("-inf"), at, operands, sizes, PHASE, F)
                # exponentials p (ROWS, KEYS) against the largest logit so far; earlier sums shrink
                new_max = tl.maximum(row_max, tl.max(s, 1))
                # A row without a key so far has a maximum of -inf, and -inf - -inf is NaN.
                against = tl.where(new_max == float("-inf"), 0.0, new_max)
                p = tl.exp2((s - against[:, None]) * LOG2E)
                shrink = tl.exp2((row_max - against) * LOG2E)
                row_sum = row_sum * shrink + tl.sum(p, 1)
                if F.DROPOUT:
                    keep = dropout_mask(seed, n, rows, keys, False, F)
                    p = tl.where(keep, p, 0.0)
                    s = tl.where(keep, s, float("-inf"))
                if F.VALUES:
                    # near logits (T, near_width), which become probabilities in the end; the clipped ends' sums
                    left_sum *= shrink
                    right_sum *= shrink
                    left_sum, right_sum = sum_clipped_ends(p, left_sum, right_sum, at, sizes, PHASE, True, True)
                    if PHASE == 1:
                        store_near_cells(near_logits, s, at.i, sizes.near_width, at, sizes)
                # acc += p v: (ROWS, KEYS) (KEYS, DP)
                v = load_values(first_key, operands, strides, sizes, F)
                acc = acc * shrink[:, None]
                acc += matmul(p.to(v.dtype), v, F.PRECISION)
                row_max = new_max
    # the output (ROWS, DP): 0 for a query without a key
    i, inside = rows.index, rows.inside
    empty = row_sum == 0.0
    total = tl.where(empty, 1.0, row_sum)
    dropout_scale = 65536.0 / (65536 - F.DROPOUT)
    out = acc * (dropout_scale / total)[:, None]
    rounded = out.to(rows.content.dtype)
    base = b * strides.out_b + h * strides.out_h
    store_block(results.out + base, rounded, i, strides.out_t, inside, F.D, F.DP)
    if F.OUT_ERROR:
        store_block(results.out_error + base, out - rounded.to(F.ACC), i, strides.out_t, inside, F.D, F.DP)
    # largest logit and sum (ROWS,) apart, since their sum would round large logits; a query without a key gets an
    # infinite sum, so that its probabilities are 0
    row_max = tl.where(empty, 0.0, row_max)
    tl.store(results.row_max + n64 * tgt_len + i, row_max, mask=inside)
    tl.store(results.log2_sum + n64 * tgt_len + i, tl.where(empty, float("inf"), tl.log2(total)), mask=inside)
    if F.VALUES:
        # the clipped ends' sums (ROWS,) as logits, so that one formula makes probabilities of the whole table
        ends = row_max + tl.log2(left_sum) / LOG2E, row_max + tl.log2(right_sum) / LOG2E
        store_clipped_ends(near_logits, ends, i, sizes.near_width, sizes.near_width, inside)
