"""The backward kernel that owns diagonals of tiles: gradients of vectors over many distances.

The gradient of a vector is a sum over one diagonal of tiles, see `wide`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.logits import free_of, gradient, known_of, logits, saved_at, to_head
from relpos_fairseq.attention.triton.records import VARYING, Sizes
from relpos_fairseq.attention.triton.tile import cells_of, keys_of, product, rows_of, store_block, values_of
from relpos_fairseq.attention.triton.wide import wide_edge


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
    given, reset = to_head(n, given, strides, sizes, F)
    saved = saved_at(n, saved, strides, sizes)
    lower, upper = tl.zeros((X, F.DP), F.ACC), tl.zeros((X, F.DP), F.ACC)
    own = tl.arange(0, X)
    begin = tl.maximum(0, -shift)
    end = tl.minimum(tl.cdiv(tgt_len, X), tl.cdiv(src_len, X) - shift)
    for block in range(begin, end):
        # queries, dout, keys, values (X, DP); top, mass, delta (X,)
        rows = rows_of(block * X, given, strides, sizes, F)
        keys = keys_of((block + shift) * X, given, strides, sizes, F)
        known = known_of(rows, saved, strides, F)
        v = values_of(keys.first, given, strides, sizes, F)
        # logits, and their gradient ds (X, X)
        at = cells_of(rows, keys, start, False)
        tile = logits(rows, keys, at, given, reset, strides, sizes, 1, False, F)
        _, ds = gradient(n, tile.s, v, known, rows, keys, at, given, saved, sizes, 1, False, F)
        ds = free_of(ds, at, reset, sizes, 1, F) * F.SCALE
        # by distance: (X distances, X) (X, DP), lower and upper ones
        if OF_KEYS:
            wide = keys.wide
            turned = tl.gather(ds, (own[None, :] - own[:, None] + X - 1) % X, 0)
            in_low = wide_edge(X, True, False)
            low_part = tl.where(in_low, turned, 0.0).to(wide.dtype)
            up_part = tl.where(in_low, 0.0, turned).to(wide.dtype)
        else:
            wide = rows.wide
            turned = tl.gather(ds, (own[:, None] + own[None, :] + 1) % X, 1)
            in_low = wide_edge(X, False, True)
            low_part = tl.trans(tl.where(in_low, turned, 0.0).to(wide.dtype))
            up_part = tl.trans(tl.where(in_low, 0.0, turned).to(wide.dtype))
        lower += product(low_part, wide, F.PRECISION)
        upper += product(up_part, wide, F.PRECISION)
    parts_ptr += (n.to(tl.int64) * diagonals + diagonal) * 2 * X * F.D
    store_block(parts_ptr, lower, own, F.D, own < X, F.D, F.DP)
    store_block(parts_ptr + X * F.D, upper, own, F.D, own < X, F.D, F.DP)
