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
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.attention import banded

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


def trilinear_band(q: Tensor, k: Tensor, w: Tensor, first: int) -> Tensor:
    """X[t, m] = sum_c q_tc k_jc w_mc with j = t + m - (n - 1) + first; keys that are none count 0.

    Args:
        q: (B, H, n, D).
        k: (B, H, S, D).
        w: (H|1, M, D).
        first: key slot that row 0 and column n - 1 would meet.

    Returns:
        (B, H, n, M).
    """
    if q.is_cuda and _TRITON:
        from relpos_fairseq.attention.triton import trilinear

        return trilinear.trilinear_band(q, k, w, first)
    start, count = first - q.size(2) + 1, q.size(2) + w.size(1) - 1  # the keys that rows meet
    met = k[:, :, max(start, 0) : max(start + count, 0)]
    before = min(max(-start, 0), count)
    near = F.pad(met, (0, 0, before, count - before - met.size(2)))
    w = w if w.size(0) == 1 else w.repeat(q.size(0), 1, 1)
    band = banded.trilinear_band(q.flatten(0, 1), near.flatten(0, 1), w)
    return band.unflatten(0, q.shape[:2])
