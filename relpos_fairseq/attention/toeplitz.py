"""Matrices that depend on the distance j - i, addressed as views: no gather, no (T, S) index.

A row block of n queries against S keys meets the distances low..low + L - 1 with L = S + n - 1 and
low = -(slot of the last query).  A matrix X (n, L) whose column m belongs to distance low + m
becomes logits (n, S) by shearing: entry (t, j) is X[t, j - t + n - 1], which on a contiguous X is
the view with strides (L - 1, 1) and offset n - 1.  Shear and its adjoint are each other's
gradient; the shear itself copies nothing.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

_TRITON = find_spec("triton") is not None


def _sheared_view(wide: Tensor, rows: int, width: int) -> Tensor:
    """View (..., rows, width) of contiguous (..., rows, width + rows - 1)."""
    span = width + rows - 1
    batch_strides = wide.stride()[:-2]
    return wide.as_strided(
        (*wide.shape[:-2], rows, width),
        (*batch_strides, max(span - 1, 1), 1),
        wide.storage_offset() + rows - 1,
    )


class _Shear(torch.autograd.Function):
    """(..., n, S + n - 1) over distances -> (..., n, S) over keys."""

    @staticmethod
    def forward(ctx, wide: Tensor) -> Tensor:
        rows = wide.size(-2)
        return _sheared_view(wide.contiguous(), rows, wide.size(-1) - rows + 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return _Unshear.apply(grad)


class _Unshear(torch.autograd.Function):
    """(..., n, S) over keys -> (..., n, S + n - 1) over distances; other cells are 0."""

    @staticmethod
    def forward(ctx, narrow: Tensor) -> Tensor:
        rows, width = narrow.shape[-2:]
        wide = narrow.new_zeros(*narrow.shape[:-1], width + rows - 1)
        _sheared_view(wide, rows, width).copy_(narrow)
        return wide

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return _Shear.apply(grad)


def shear(wide: Tensor) -> Tensor:
    """Rows over distances (..., n, S + n - 1) to rows over keys (..., n, S)."""
    return wide if wide.size(-2) == 1 else _Shear.apply(wide)


def unshear(narrow: Tensor) -> Tensor:
    """Rows over keys (..., n, S) to rows over distances (..., n, S + n - 1)."""
    return narrow if narrow.size(-2) == 1 else _Unshear.apply(narrow)


def spread(vector: Tensor, rows: int) -> Tensor:
    """A vector over distances (..., S + n - 1) to the Toeplitz matrix (..., n, S)."""
    return shear(vector[..., None, :].expand(*vector.shape[:-1], rows, vector.size(-1)))


class _TrilinearBand(torch.autograd.Function):
    """X[t, m] = sum_c q_tc k_jc w_mc with j = t + m - (n - 1) + first, one distance at a time.

    Args: q (B, H, n, D), k (B, H, S, D), w (H|1, M, D), `first`: key slot that row 0 and column
    n - 1 would meet.  Memory is that of q and k whatever M is; keys outside 0..S-1 count as 0.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, w: Tensor, first: int) -> Tensor:
        ctx.save_for_backward(q, k, w)
        ctx.first = first
        rows, span = q.size(2), w.size(1)
        out = q.new_zeros(*q.shape[:3], span)
        for m in range(span):
            begin, end, shift = _overlap(rows, k.size(2), m, first)
            if begin < end:
                part = q[:, :, begin:end] * w[:, None, m]
                out[:, :, begin:end, m] = (part * k[:, :, begin + shift : end + shift]).sum(-1)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, w = ctx.saved_tensors
        dq, dk, dw = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(w)
        heads = (0, 2) if w.size(0) > 1 else (0, 1, 2)
        for m in range(w.size(1)):
            begin, end, shift = _overlap(q.size(2), k.size(2), m, ctx.first)
            if begin >= end:
                continue
            g = grad[:, :, begin:end, m : m + 1]
            qs, ks = q[:, :, begin:end], k[:, :, begin + shift : end + shift]
            weighted = g * w[:, None, m]
            dq[:, :, begin:end].addcmul_(weighted, ks)
            dk[:, :, begin + shift : end + shift].addcmul_(weighted, qs)
            dw[:, m] += (g * qs * ks).sum(heads)
        return dq, dk, dw, None


def _overlap(rows: int, keys: int, m: int, first: int) -> tuple[int, int, int]:
    """Rows [begin, end) whose key slot row + shift exists, for column m."""
    shift = m - (rows - 1) + first
    return max(0, -shift), min(rows, keys - shift), shift


def trilinear_band(q: Tensor, k: Tensor, w: Tensor, first: int) -> Tensor:
    """Products of three over a range of distances: (B, H, n, M)."""
    if q.is_cuda and _TRITON:
        from relpos_fairseq.attention.triton import trilinear

        return trilinear.trilinear_band(q, k, w, first)
    return _TrilinearBand.apply(q, k, w, first)
