"""Products of queries with keys in a band of distances, without the matrix around it.

Row t of n queries meets row t + m of the keys in column m of W: q (N, n, D), k (N, n + W - 1, D),
result (N, n, W).  The band of a matrix (N, n, n + W - 1) is its diagonals.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 100_000  # elements


def diagonals(matrix: Tensor) -> Tensor:
    """View (N, n, W) of contiguous (N, n, n + W - 1): row t's columns t, t + 1, ..."""
    count, rows, span = matrix.shape
    shape, strides = (count, rows, span - rows + 1), (rows * span, span + 1, 1)
    return matrix.as_strided(shape, strides, matrix.storage_offset())


def trilinear_band(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """Sum_c q_tc k_{t + m, c} w_mc, for w (1|N, W, D)."""
    return _Trilinear.apply(q, k, w)


class _Trilinear(torch.autograd.Function):
    """One distance at a time: memory is that of q and k whatever W is."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, w)
        rows = q.size(1)
        band = q.new_empty(w.size(1), q.size(0), rows)
        for some in _blocks(q):
            queries, keys = q[some], k[some]
            product = torch.empty_like(queries, memory_format=torch.contiguous_format)
            for m in range(w.size(1)):
                torch.mul(queries, keys[:, m : m + rows], out=product)
                if w.size(0) == 1:
                    torch.mv(product.view(-1, q.size(2)), w[0, m], out=band[m, some].view(-1))
                else:
                    torch.bmm(product, w[some, m, :, None], out=band[m, some, :, None])
        return band.permute(1, 2, 0)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, w = ctx.saved_tensors
        rows = q.size(1)
        dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
        dk, dw = torch.zeros_like(k), torch.zeros_like(w)
        grad = grad.permute(2, 0, 1).contiguous()
        for some in _blocks(q):
            queries, of_queries = q[some], dq[some]
            product = torch.empty_like(of_queries)
            for m, upstream in enumerate(grad[:, some]):
                near = slice(m, m + rows)
                torch.mul(queries, k[some, near], out=product)
                if w.size(0) == 1:
                    dw[0, m].addmv_(product.view(-1, q.size(2)).t(), upstream.reshape(-1))
                else:
                    dw[some, m] = torch.bmm(upstream[:, None], product)[:, 0]
                weights = w[0, m] if w.size(0) == 1 else w[some, m, None]
                torch.mul(upstream[..., None], weights, out=product)
                of_queries.addcmul_(product, k[some, near])
                dk[some, near].addcmul_(product, queries)
        return dq, dk, dw


def _blocks(q: Tensor) -> list[slice]:
    """Matrices whose queries, keys and products stay in the cache together."""
    step = max(BLOCK // q[0].numel(), 1)
    return [slice(start, start + step) for start in range(0, q.size(0), step)]
