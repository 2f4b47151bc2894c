"""Compute M3's products of three on a GPU: sum_c q_tc k_jc w_mc for every query and every distance of a window.

    X[t, m] = sum_c q[t, c] k[j, c] w[m, c],   j = t + m - (n - 1) + first;  0 where there is no key j

No two of these sums share a factor that a matrix product could use.  They are therefore computed by ordinary
multiplications, one column m at a time, on tiles of q that stay in registers; neighbouring columns find their keys in
the L1 cache.  Memory is that of q, k and X.  Every gradient is summed by the program that stores it, or in partial sums
that are added in a fixed order: no atomics, the same bits every time.
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from relpos_fairseq.attention.operation import Given, define

ROWS = 64  # of a tile of up to 64 channels
COLUMNS = 16  # of X that are stored at once
CHUNK = 1024  # queries over which one program sums the gradient of w


class Sizes(NamedTuple):
    """The sizes of q (B, H, rows, depth), k (B, H, keys, depth) and w (w_heads, span, depth)."""

    rows: int
    keys: int
    span: int
    depth: int
    shift: int  # j - t in column 0
    w_heads: int


@triton.jit
def _tile(base, index, channel, length, depth):
    """Load rows `index` (n,) of a matrix (length, depth): (n, D), 0 outside."""
    there = ((index >= 0) & (index < length))[:, None] & (channel < depth)[None, :]
    return tl.load(base + index[:, None] * depth + channel[None, :], mask=there, other=0.0)


@triton.jit
def _row(base, channel, depth, ACC: tl.constexpr):
    """Load one row (D,) of a matrix in the type of sums."""
    return tl.load(base + channel, mask=channel < depth, other=0.0).to(ACC)


@triton.jit
def band_kernel(
    q_ptr, k_ptr, w_ptr, x_ptr, sizes, ACC: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Compute X (rows, span) of one head for ROWS queries."""
    rows, span, depth = sizes.rows, sizes.span, sizes.depth
    n, top = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    t, c = top + tl.arange(0, ROWS), tl.arange(0, D)
    w_base = w_ptr + (n % sizes.w_heads) * span * depth
    # queries (ROWS, D)
    q = _tile(q_ptr + n * rows * depth, t, c, rows, depth).to(ACC)
    column = tl.arange(0, COLUMNS)
    for first in range(0, span, COLUMNS):
        # COLUMNS columns of X (ROWS, COLUMNS), one at a time
        x = tl.zeros((ROWS, COLUMNS), ACC)
        for m in range(first, tl.minimum(first + COLUMNS, span)):
            # keys at the column's distance (ROWS, D), its weights (D,), sums over channels (ROWS,)
            k = _tile(k_ptr + n * sizes.keys * depth, t + (sizes.shift + m), c, sizes.keys, depth).to(ACC)
            w = _row(w_base + m * depth, c, depth, ACC)
            found = tl.sum(q * k * w[None, :], 1)
            x = tl.where((first + column == m)[None, :], found[:, None], x)
        there = (t < rows)[:, None] & (first + column < span)[None, :]
        out = x_ptr + n * rows * span + t[:, None] * span + (first + column)[None, :]
        tl.store(out, x.to(x_ptr.dtype.element_ty), mask=there)


@triton.jit
def side_kernel(
    g_ptr,
    other_ptr,
    w_ptr,
    out_ptr,
    sizes,
    OF_KEYS: tl.constexpr,
    ACC: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Compute the gradient of ROWS queries (or, OF_KEYS, keys): sum_m g[t, m] w_m times the other of the pair.

    `g` is the gradient of X, and `other` are the keys (or queries).
    """
    rows, span, depth = sizes.rows, sizes.span, sizes.depth
    mine, others = rows, sizes.keys
    if OF_KEYS:
        mine, others = sizes.keys, rows
    n, top = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    index, c = top + tl.arange(0, ROWS), tl.arange(0, D)
    w_base = w_ptr + (n % sizes.w_heads) * span * depth
    total = tl.zeros((ROWS, D), ACC)
    for m in range(0, span):
        # the query t, and the other side's index, of each pair (ROWS,)
        if OF_KEYS:
            other = index - (sizes.shift + m)
            t = other
        else:
            other = index + (sizes.shift + m)
            t = index
        there = (index < mine) & (t >= 0) & (t < rows)
        # g (ROWS,), the other side (ROWS, D), weights (D,)
        g = tl.load(g_ptr + n * rows * span + t * span + m, mask=there, other=0.0).to(ACC)
        x = _tile(other_ptr + n * others * depth, other, c, others, depth).to(ACC)
        w = _row(w_base + m * depth, c, depth, ACC)
        total += g[:, None] * (x * w[None, :])
    there = (index < mine)[:, None] & (c < depth)[None, :]
    out = out_ptr + n * mine * depth + index[:, None] * depth + c[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def table_kernel(
    g_ptr, q_ptr, k_ptr, out_ptr, sizes, ACC: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr
):
    """Compute what CHUNK queries give the gradient (D,) of one row of w: sum_t g[t, m] q_t k_j."""
    rows, span, depth = sizes.rows, sizes.span, sizes.depth
    n, m, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    c = tl.arange(0, D)
    total = tl.zeros((ROWS, D), ACC)
    for top in range(part * CHUNK, tl.minimum((part + 1) * CHUNK, rows), ROWS):
        t = top + tl.arange(0, ROWS)
        # g (ROWS,), queries and keys at distance m (ROWS, D)
        g = tl.load(g_ptr + n * rows * span + t * span + m, mask=t < rows, other=0.0).to(ACC)
        q = _tile(q_ptr + n * rows * depth, t, c, rows, depth).to(ACC)
        k = _tile(k_ptr + n * sizes.keys * depth, t + (sizes.shift + m), c, sizes.keys, depth).to(ACC)
        total += g[:, None] * q * k
    parts = tl.num_programs(2)
    out = out_ptr + ((n * parts + part) * span + m) * depth + c
    tl.store(out, tl.sum(total, 0), mask=c < depth)


# ---------------------------------------------------------------------------------------------------------------------
# The operation of torch: `operation.Kernel`.


def results(given: Given) -> list[Tensor]:
    """Return an empty X."""
    q, _, w = given.tensors
    return [q.new_empty(*q.shape[:3], w.size(1), dtype=_sum_type(q))]


def forward(given: Given) -> list[Tensor]:
    """Return X of q, k, w; the one number is j - t in column 0."""
    q, k, w = (tensor.contiguous() for tensor in given.tensors)
    (x,) = results(given)
    constants = _constants(q)
    grid = (q.size(0) * q.size(1), triton.cdiv(q.size(2), constants["ROWS"]))
    band_kernel[grid](q, k, w, x, _sizes(q, k, w, *given.numbers), COLUMNS=COLUMNS, **constants)
    return [x]


def backward(grads: list[Tensor], results: list[Tensor], given: Given, wanted: int) -> list[Tensor]:
    """Return the gradients of those of q, k, w whose bits `wanted` has."""
    q, k, w = (tensor.contiguous() for tensor in given.tensors)
    grad, sizes = grads[0].contiguous(), _sizes(q, k, w, *given.numbers)
    parts = (
        lambda: _gradient_of_side(grad, k, w, sizes, q, of_keys=False),
        lambda: _gradient_of_side(grad, q, w, sizes, k, of_keys=True),
        lambda: _gradient_of_table(grad, q, k, sizes, w),
    )
    return [part() for number, part in enumerate(parts) if wanted >> number & 1]


def gradients(given: Given, wanted: int) -> list[Tensor]:
    """Return empty gradients, as `backward` returns them."""
    return [x.new_empty(x.shape) for number, x in enumerate(given.tensors) if wanted >> number & 1]


_band = define(
    "trilinear_band",
    sys.modules[__name__],
    ["CUDA", "CPU"],  # which interprets it
    ("a trilinear band in Triton", "use --attention-backend reference"),
)


def _gradient_of_side(grad: Tensor, other: Tensor, w: Tensor, sizes: Sizes, like: Tensor, *, of_keys: bool) -> Tensor:
    """Return the gradient of the queries, or of the keys, shaped as `like`."""
    out, constants = torch.empty_like(like), _constants(like)
    grid = (like.size(0) * like.size(1), triton.cdiv(like.size(2), constants["ROWS"]))
    side_kernel[grid](grad, other, w, out, sizes, OF_KEYS=of_keys, **constants)
    return out


def _gradient_of_table(grad: Tensor, q: Tensor, k: Tensor, sizes: Sizes, w: Tensor) -> Tensor:
    """Return the gradient of w: partial sums of heads and chunks, added in order."""
    batch, heads, rows, depth = q.shape
    span, parts = w.size(1), triton.cdiv(rows, CHUNK)
    partial = q.new_empty(batch, heads, parts, span, depth, dtype=_sum_type(q))
    table_kernel[(batch * heads, span, parts)](grad, q, k, partial, sizes, CHUNK=CHUNK, **_constants(q))
    shared = (0, 2) if w.size(0) > 1 else (0, 1, 2)
    return partial.sum(shared).view_as(w).to(w.dtype)


def _sizes(q: Tensor, k: Tensor, w: Tensor, shift: int) -> Sizes:
    return Sizes(q.size(2), k.size(2), w.size(1), q.size(3), shift, w.size(0))


def _sum_type(x: Tensor) -> torch.dtype:
    """Return the type of sums and of X: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def _constants(x: Tensor) -> dict:
    """Return the constants of every kernel: the type of sums, and sizes of tiles that fit registers."""
    exact = tl.float64 if x.dtype == torch.float64 else tl.float32
    channels = max(16, triton.next_power_of_2(x.size(-1)))
    rows = max(16, ROWS * 64 // channels) if channels > 64 else ROWS
    return {"ACC": exact, "D": channels, "ROWS": rows}


def trilinear_band(q: Tensor, k: Tensor, w: Tensor, first: int) -> Tensor:
    """Compute products of three over a window of distances.

    Args:
        q: (B, H, n, D).
        k: (B, H, S, D).
        w: (H|1, M, D) a row for each distance of the window.
        first: key of query 0 in column n - 1.

    Returns:
        X (B, H, n, M) in at least fp32; 0 where there is no such key.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    if q.dim() != 4 or k.shape[:2] != q.shape[:2] or k.size(-1) != q.size(-1):
        raise ValueError(f"q and k must be (B, H, n, D) and (B, H, S, D), got {tuple(q.shape)} and {tuple(k.shape)}")
    if w.dim() != 3 or w.size(0) not in (1, q.size(1)) or w.size(-1) != q.size(-1):
        raise ValueError(f"w must be (1 or {q.size(1)} heads, M, {q.size(-1)}), got {tuple(w.shape)}")
    return _band(1, 0b111, (first - (q.size(2) - 1),), 1.0, [q, k, w])[0]
