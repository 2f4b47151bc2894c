"""Products of queries with keys in a band of distances, without the matrix around it.

Row t of n queries meets row t + m of the keys in column m of W: q (N, n, D), k (N, n + W - 1, D),
result (N, n, W).  The band of a matrix (N, n, n + W - 1) is its diagonals.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.attention.once import differentiable_once

BLOCK = 200_000  # elements of queries that are met at once


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
        band = q.new_empty(w.size(1), q.size(0), q.size(1))
        for some in _blocks(q):
            queries = q[some]
            product = torch.empty_like(queries, memory_format=torch.contiguous_format)
            keys, outputs = _windows(k[some], q.size(1)), band[:, some].unbind(0)
            for key, weight, out in zip(keys, _weights(w, some), outputs, strict=True):
                torch.mul(queries, key, out=product)
                if w.size(0) == 1:
                    torch.mv(product.view(-1, q.size(2)), weight, out=out.view(-1))
                else:
                    torch.bmm(product, weight.transpose(1, 2), out=out[..., None])
        return band.permute(1, 2, 0)

    @staticmethod
    @differentiable_once("a trilinear term", "use --attention-backend reference")
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, w = ctx.saved_tensors
        dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
        dk, dw = torch.zeros_like(k), torch.zeros_like(w)
        grad = grad.permute(2, 0, 1).contiguous()[..., None]  # (W, N, n, 1)
        for some in _blocks(q):
            queries, of_queries = q[some], dq[some]
            product = torch.empty_like(of_queries)
            keys, of_keys = (_windows(part[some], q.size(1)) for part in (k, dk))
            weights, of_weights = _weights(w, some), _weights(dw, some)
            for m, upstream in enumerate(grad[:, some].unbind(0)):
                torch.mul(queries, keys[m], out=product)
                if w.size(0) == 1:
                    of_weights[m].addmv_(product.view(-1, q.size(2)).t(), upstream.reshape(-1))
                else:
                    of_weights[m].copy_(torch.bmm(upstream.transpose(1, 2), product))
                torch.mul(upstream, weights[m], out=product)
                of_queries.addcmul_(product, keys[m])
                of_keys[m].addcmul_(product, queries)
        return dq, dk, dw


def _windows(k: Tensor, rows: int) -> tuple[Tensor, ...]:
    """The keys (N, n, D) that queries meet at each distance."""
    span, strides = k.size(1) - rows + 1, (k.stride(1), *k.stride())
    return k.as_strided((span, k.size(0), rows, k.size(2)), strides, k.storage_offset()).unbind(0)


def _weights(w: Tensor, some: slice) -> tuple[Tensor, ...]:
    """Each distance's vector: (D,) where all matrices share it, else (N, 1, D)."""
    return w[0].unbind(0) if w.size(0) == 1 else w[some, :, None].unbind(1)


def _blocks(q: Tensor) -> list[slice]:
    """Matrices whose queries, keys and products stay in the cache together."""
    step = max(BLOCK // q[0].numel(), 1)
    return [slice(start, start + step) for start in range(0, q.size(0), step)]
