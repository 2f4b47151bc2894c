"""M3's band on a GPU: sum_c q_tc k_jc w_mc for every query and every distance of a band.

    X[t, m] = sum_c q[t, c] k[j, c] w[m, c],   j = t + m - (n - 1) + first;  0 where no key j is

No two of these sums share a factor that a matrix product could use, so they are formed by ordinary
multiplications, a band's column at a time, on tiles of q that stay in registers; neighbouring
columns find their keys in the L1 cache.  Memory is that of q, k and X.  Every gradient is summed by
the program that stores it, or in partial sums that are added in a fixed order: no atomics, the same
bits every time.
"""

from __future__ import annotations

import sys

import torch
import triton
import triton.language as tl
from torch import Tensor

from relpos_fairseq.attention.operation import define

ROWS = 64  # of a tile of up to 64 channels
COLUMNS = 16  # of the band that are stored at once
CHUNK = 1024  # rows whose part of w's gradient one program sums


@triton.jit
def _tile(base, index, channel, length, depth):
    """Rows `index` of a (length, depth) matrix, 0 outside."""
    there = ((index >= 0) & (index < length))[:, None] & (channel < depth)[None, :]
    return tl.load(base + index[:, None] * depth + channel[None, :], mask=there, other=0.0)


@triton.jit
def _row(base, channel, depth, ACC: tl.constexpr):
    """One row of a matrix in the type of sums."""
    return tl.load(base + channel, mask=channel < depth, other=0.0).to(ACC)


@triton.jit
def band_kernel(
    q_ptr,
    k_ptr,
    w_ptr,
    x_ptr,
    rows,
    keys,
    span,
    depth,
    shift,
    w_heads,
    ACC: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """X of a tile of queries; `shift` is j - t in column 0."""
    n, top = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    t, c = top + tl.arange(0, ROWS), tl.arange(0, D)
    w_base = w_ptr + (n % w_heads) * span * depth
    q = _tile(q_ptr + n * rows * depth, t, c, rows, depth).to(ACC)
    column = tl.arange(0, COLUMNS)
    for first in range(0, span, COLUMNS):
        x = tl.zeros((ROWS, COLUMNS), ACC)
        for m in range(first, tl.minimum(first + COLUMNS, span)):
            k = _tile(k_ptr + n * keys * depth, t + (shift + m), c, keys, depth).to(ACC)
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
    mine,
    others,
    rows,
    span,
    depth,
    shift,
    w_heads,
    OF_KEYS: tl.constexpr,
    ACC: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The gradient of q (or, OF_KEYS, of k): sum_m g[t, m] w_m times k (q) of the same pair."""
    n, top = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS
    index, c = top + tl.arange(0, ROWS), tl.arange(0, D)
    w_base = w_ptr + (n % w_heads) * span * depth
    total = tl.zeros((ROWS, D), ACC)
    for m in range(0, span):
        if OF_KEYS:
            other = index - (shift + m)
            t = other
        else:
            other = index + (shift + m)
            t = index
        there = (index < mine) & (t >= 0) & (t < rows)
        g = tl.load(g_ptr + n * rows * span + t * span + m, mask=there, other=0.0).to(ACC)
        x = _tile(other_ptr + n * others * depth, other, c, others, depth).to(ACC)
        w = _row(w_base + m * depth, c, depth, ACC)
        total += g[:, None] * (x * w[None, :])
    there = (index < mine)[:, None] & (c < depth)[None, :]
    out = out_ptr + n * mine * depth + index[:, None] * depth + c[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def table_kernel(
    g_ptr,
    q_ptr,
    k_ptr,
    out_ptr,
    rows,
    keys,
    span,
    depth,
    shift,
    ACC: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One column's gradient of w from a chunk of rows: sum_t g[t, m] q_t k_j."""
    n, m, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    c = tl.arange(0, D)
    total = tl.zeros((ROWS, D), ACC)
    for top in range(part * CHUNK, tl.minimum((part + 1) * CHUNK, rows), ROWS):
        t = top + tl.arange(0, ROWS)
        g = tl.load(g_ptr + n * rows * span + t * span + m, mask=t < rows, other=0.0).to(ACC)
        q = _tile(q_ptr + n * rows * depth, t, c, rows, depth).to(ACC)
        k = _tile(k_ptr + n * keys * depth, t + (shift + m), c, keys, depth).to(ACC)
        total += g[:, None] * q * k
    parts = tl.num_programs(2)
    out = out_ptr + ((n * parts + part) * span + m) * depth + c
    tl.store(out, tl.sum(total, 0), mask=c < depth)


def results(tensors: list[Tensor], kinds: int, numbers: list[int], scale: float) -> list[Tensor]:
    """Return room for the band."""
    q, _, w = tensors
    return [q.new_empty(*q.shape[:3], w.size(1), dtype=_sums(q))]


def forward(tensors: list[Tensor], kinds: int, numbers: list[int], scale: float) -> list[Tensor]:
    """Return the band of q, k, w; the one number is the key slot that row 0 and column 0 meet."""
    q, k, w = (tensor.contiguous() for tensor in tensors)
    (x,) = results([q, k, w], kinds, numbers, scale)
    batch, heads, rows, depth = q.shape
    constants = _constants(q)
    grid = (batch * heads, triton.cdiv(rows, constants["ROWS"]))
    band_kernel[grid](
        q, k, w, x, rows, k.size(2), w.size(1), depth, numbers[0], w.size(0), COLUMNS=COLUMNS, **constants
    )
    return [x]


def backward(
    grads: list[Tensor],
    results: list[Tensor],
    tensors: list[Tensor],
    kinds: int,
    numbers: list[int],
    scale: float,
    wanted: int,
) -> list[Tensor]:
    """Return the gradients of those of q, k, w whose bits `wanted` has."""
    q, k, w = (tensor.contiguous() for tensor in tensors)
    grad, shift = grads[0].contiguous(), numbers[0]
    parts = (
        lambda: _of_side(grad, k, w, shift, q, of_keys=False),
        lambda: _of_side(grad, q, w, shift, k, of_keys=True),
        lambda: _of_table(grad, q, k, shift, w),
    )
    return [part() for number, part in enumerate(parts) if wanted >> number & 1]


def gradients(tensors: list[Tensor], kinds: int, numbers: list[int], scale: float, wanted: int) -> list[Tensor]:
    """Return room for what `backward` returns."""
    return [x.new_empty(x.shape) for number, x in enumerate(tensors) if wanted >> number & 1]


_band = define(
    "trilinear_band",
    sys.modules[__name__],
    ["CUDA", "CPU"],  # which interprets it
    ("a trilinear band in Triton", "use --attention-backend reference"),
)


def _of_side(grad: Tensor, other: Tensor, w: Tensor, shift: int, like: Tensor, *, of_keys: bool) -> Tensor:
    """Gradient of the queries or of the keys, shaped as `like`."""
    out = torch.empty_like(like)
    batch, heads, mine, depth = like.shape
    constants = _constants(like)
    grid = (batch * heads, triton.cdiv(mine, constants["ROWS"]))
    side_kernel[grid](
        grad,
        other,
        w,
        out,
        mine,
        other.size(2),
        grad.size(2),
        w.size(1),
        depth,
        shift,
        w.size(0),
        OF_KEYS=of_keys,
        **constants,
    )
    return out


def _of_table(grad: Tensor, q: Tensor, k: Tensor, shift: int, w: Tensor) -> Tensor:
    """Gradient of w: partial sums of heads and chunks, added in order."""
    batch, heads, rows, depth = q.shape
    span, parts = w.size(1), triton.cdiv(rows, CHUNK)
    partial = q.new_empty(batch, heads, parts, span, depth, dtype=_sums(q))
    table_kernel[(batch * heads, span, parts)](
        grad, q, k, partial, rows, k.size(2), span, depth, shift, CHUNK=CHUNK, **_constants(q)
    )
    shared = (0, 2) if w.size(0) > 1 else (0, 1, 2)
    return partial.sum(shared).view_as(w).to(w.dtype)


def _sums(x: Tensor) -> torch.dtype:
    """The type of sums and of X."""
    return torch.promote_types(x.dtype, torch.float32)


def _constants(x: Tensor) -> dict:
    """Constants of every kernel: the type of sums, and tiles that fit registers."""
    exact = tl.float64 if x.dtype == torch.float64 else tl.float32
    channels = max(16, triton.next_power_of_2(x.size(-1)))
    rows = max(16, ROWS * 64 // channels) if channels > 64 else ROWS
    return {"ACC": exact, "D": channels, "ROWS": rows}


def trilinear_band(q: Tensor, k: Tensor, w: Tensor, first: int) -> Tensor:
    """Products of three over a range of distances.

    Args:
        q: (B, H, n, D).
        k: (B, H, S, D).
        w: (H|1, M, D) a row for each distance of the band.
        first: key slot that row 0 and column n - 1 would meet.

    Returns:
        (B, H, n, M) in at least fp32; pairs whose key does not exist give 0.

    Raises:
        ValueError: tensors that do not fit each other.
    """
    if q.dim() != 4 or k.shape[:2] != q.shape[:2] or k.size(-1) != q.size(-1):
        raise ValueError(f"q and k must be (B, H, n, D) and (B, H, S, D), got {tuple(q.shape)} and {tuple(k.shape)}")
    if w.dim() != 3 or w.size(0) not in (1, q.size(1)) or w.size(-1) != q.size(-1):
        raise ValueError(f"w must be (1 or {q.size(1)} heads, M, {q.size(-1)}), got {tuple(w.shape)}")
    return _band(1, 0b111, (first - (q.size(2) - 1),), 1.0, [q, k, w])[0]
