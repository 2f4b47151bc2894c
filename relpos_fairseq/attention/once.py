"""Hand-written backward passes that have no derivative of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def differentiable_once(what: str, remedy: str) -> Callable[[Callable], Callable]:
    """Decorate the backward pass of an autograd function.

    It runs without autograd, and without autocast, which would round its products.  Where the
    caller keeps a graph of gradients (create_graph=True), differentiating them fails.  Torch's
    once_differentiable takes what was saved for constants there, without a word.

    Args:
        what: what has no second derivative, for the error.
        remedy: what to do instead.
    """

    def decorate(backward: Callable) -> Callable:
        @functools.wraps(backward)
        def wrapped(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
            device = grads[0].device.type
            # A compiled graph refuses second derivatives itself.
            graph = torch.is_grad_enabled() and not torch.compiler.is_compiling()
            if not graph and not torch.is_autocast_enabled(device):
                return backward(ctx, *grads)
            with torch.no_grad(), torch.autocast(device, enabled=False):
                found = backward(ctx, *grads)
            if graph:
                message = f"{what} has no second derivative: {remedy}"
                return _tied(message, found, (*grads, *ctx.saved_tensors))
            return found

        return wrapped

    return decorate


def _tied(message: str, found: Sequence[Tensor | None], sources: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The gradients, as depending on all that they came from."""
    given = [part for part in found if part is not None]
    tied = iter(_Refusal.apply(message, len(given), *given, *sources))
    return tuple(None if part is None else next(tied) for part in found)


class _Refusal(torch.autograd.Function):
    """The first `count` tensors; their derivative is an error."""

    @staticmethod
    def forward(ctx, message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(part.view_as(part) for part in tensors[:count])

    @staticmethod
    def backward(ctx, *grads: Tensor) -> None:
        raise RuntimeError(ctx.message)
