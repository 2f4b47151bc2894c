"""Products of queries with keys in a band of distances, without the matrix around it.

Row t of n queries meets row t + m of the keys in column m of W: q (N, n, D), k (N, n + W - 1, D),
result (N, n, W).  The band of a matrix (N, n, n + W - 1) is its diagonals.
"""

from __future__ import annotations

import torch
from torch import Tensor

STRIP = 32  # queries whose products with their keys are one small matrix


def diagonals(matrix: Tensor) -> Tensor:
    """View (N, n, W) of contiguous (N, n, n + W - 1): row t's columns t, t + 1, ..."""
    count, rows, span = matrix.shape
    shape, strides = (count, rows, span - rows + 1), (rows * span, span + 1, 1)
    return matrix.as_strided(shape, strides, matrix.storage_offset())


def content_band(q: Tensor, k: Tensor) -> Tensor:
    """q_t . k_{t + m}."""
    return _Content.apply(q, k)


def trilinear_band(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Sum_c q_tc k_{t + m, c} w_mc, for w (1|N, W, D)."""
    return _Trilinear.apply(q, k, w)


def key_band(products: Tensor, rows: int) -> Tensor:
    """What key t + m has in column m of its own: (N, n + W - 1, W) -> (N, n, W)."""
    return _KeyBand.apply(products, rows)


class _Content(torch.autograd.Function):
    """Strips of rows, each a small matrix of which the band is kept."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor) -> Tensor:
        ctx.save_for_backward(q, k)
        rows, keys = _strips(q, k)
        return diagonals(rows @ keys.transpose(1, 2)).reshape(*q.shape[:2], -1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        q, k = ctx.saved_tensors
        rows, keys = _strips(q, k)
        matrix = q.new_zeros(*rows.shape[:2], keys.size(1))
        band = diagonals(matrix)
        band.copy_(grad.reshape(band.shape))
        dq = (matrix @ keys).view(q.shape)
        found = (matrix.transpose(1, 2) @ rows).unflatten(0, (q.size(0), -1))
        dk = torch.zeros_like(k)
        for number, part in enumerate(found.unbind(1)):
            dk[:, number * rows.size(1) :][:, : part.size(1)] += part
        return dq, dk


def _strips(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Queries (N * c, s, D) in c strips, and each strip's keys (N * c, s + W - 1, D)."""
    rows, dim = q.shape[1:]
    strip = STRIP if rows % STRIP == 0 else rows
    windows = k.unfold(1, strip + k.size(1) - rows, strip).transpose(2, 3)
    return q.reshape(-1, strip, dim), windows.flatten(0, 1)


class _Trilinear(torch.autograd.Function):
    """One distance at a time: memory is that of q and k whatever W is."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, w)
        rows = q.size(1)
        product = torch.empty_like(q, memory_format=torch.contiguous_format)
        band = q.new_empty(w.size(1), q.size(0), rows)
        for m, out in enumerate(band):
            torch.mul(q, k[:, m : m + rows], out=product)
            if w.size(0) == 1:
                torch.mv(product.view(-1, q.size(2)), w[0, m], out=out.view(-1))
            else:
                torch.bmm(product, w[:, m, :, None], out=out[..., None])
        return band.permute(1, 2, 0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, w = ctx.saved_tensors
        rows = q.size(1)
        product = torch.empty_like(q, memory_format=torch.contiguous_format)
        dq, dk, dw = torch.zeros_like(product), torch.zeros_like(k), torch.empty_like(w)
        for m, upstream in enumerate(grad.permute(2, 0, 1).contiguous()):
            keys = k[:, m : m + rows]
            torch.mul(q, keys, out=product)
            if w.size(0) == 1:
                torch.mv(product.view(-1, q.size(2)).t(), upstream.view(-1), out=dw[0, m])
            else:
                dw[:, m] = torch.bmm(upstream[:, None], product)[:, 0]
            torch.mul(upstream[..., None], w[:, m, None], out=product)
            dq.addcmul_(product, keys)
            dk[:, m : m + rows].addcmul_(product, q)
        return dq, dk, dw


class _KeyBand(torch.autograd.Function):
    """A view along diagonals, and back."""

    @staticmethod
    def _view(products: Tensor, rows: int) -> Tensor:
        count, keys, width = products.shape
        shape, strides = (count, rows, width), (keys * width, width, width + 1)
        return products.as_strided(shape, strides, products.storage_offset())

    @staticmethod
    def forward(ctx, products: Tensor, rows: int) -> Tensor:
        ctx.shape = products.shape
        return _KeyBand._view(products.contiguous(), rows)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        products = grad.new_zeros(ctx.shape)
        _KeyBand._view(products, grad.size(1)).copy_(grad)
        return products, None
