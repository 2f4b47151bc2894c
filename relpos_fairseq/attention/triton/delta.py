"""What both backward kernels begin with: each row's sum of probabilities times their gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from relpos_fairseq.attention.triton.tile import block_of


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
    out = block_of(out_ptr + base, i, out_t, inside, D, DP).to(ACC)
    if REST:
        out += block_of(rest_ptr + base, i, out_t, inside, D, DP).to(ACC)
    dout = block_of(dout_ptr + base, i, out_t, inside, D, DP).to(ACC)
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
