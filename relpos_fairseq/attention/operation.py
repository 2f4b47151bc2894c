"""Define a kernel as two operations of torch, and their derivative."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

# ---- Hand-written backward passes that have no derivative of their own.


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


# ---- A kernel as two operations of torch, and their derivative.
# Torch's compilers and tracers see `relpos::NAME` and `relpos::NAME_backward`, which they can order,
# move and record, but not read; what surrounds them is theirs.  A function of autograd calls them:
# `torch.library.register_autograd` would take 0.2 ms more of a call of the two passes.
#
# A kernel's tensors come as a list of those that there are.  Bit p of `kinds` says which ones, and
# `numbers` and `scale` are all else that it is told.


_CALL = "Tensor[] tensors, int kinds, SymInt[] numbers, float scale"
_library = torch.library.Library("relpos", "FRAGMENT")


class Kernel(Protocol):
    """The passes, and room for what they return: of the same shapes, types and strides.

    What `forward` returns begins with the outputs; the rest is kept for `backward`, which returns
    the gradients of the tensors whose bits `wanted` has, in their order.
    """

    def forward(self, tensors, kinds, numbers, scale) -> list[Tensor]: ...

    def results(self, tensors, kinds, numbers, scale) -> list[Tensor]: ...

    def backward(self, grads, results, tensors, kinds, numbers, scale, wanted) -> list[Tensor]: ...

    def gradients(self, tensors, kinds, numbers, scale, wanted) -> list[Tensor]: ...


def define(
    name: str, kernel: Kernel, devices: Sequence[str], refusal: tuple[str, str]
) -> Callable[..., tuple[Tensor, ...]]:
    """Define a kernel's operations, and return what calls them.

    Args:
        name: of the operation.
        kernel: the passes.
        devices: torch's names of those that it runs on.
        refusal: what has no second derivative, and what to do instead.

    Returns:
        A function of the number of outputs, kinds, numbers, scale and tensors; it returns outputs.
    """
    back = f"{name}_backward"
    _library.define(f"{name}({_CALL}) -> Tensor[]")
    _library.define(f"{back}(Tensor[] grads, Tensor[] results, {_CALL}, int wanted) -> Tensor[]")
    for device in devices:
        _library.impl(name, kernel.forward, device)
        _library.impl(back, kernel.backward, device)
    torch.library.register_fake(f"relpos::{name}", kernel.results, lib=_library)
    torch.library.register_fake(f"relpos::{back}", lambda grads, results, *call: kernel.gradients(*call), lib=_library)
    forward, backward = (getattr(torch.ops.relpos, each).default for each in (name, back))

    class Attention(torch.autograd.Function):
        """The operations; keeps their tensors and results."""

        @staticmethod
        def forward(ctx, outputs: int, kinds: int, numbers, scale: float, *tensors: Tensor):
            results = forward(tensors, kinds, numbers, scale)
            ctx.call, ctx.kept = (kinds, numbers, scale), len(results)
            ctx.save_for_backward(*results, *tensors)
            return results[0] if outputs == 1 else tuple(results[:outputs])

        @staticmethod
        @differentiable_once(*refusal)
        def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
            saved, wanted = ctx.saved_tensors, 0
            wants = ctx.needs_input_grad[4:]
            for number, want in enumerate(wants):
                wanted |= want << number
            results, tensors = saved[: ctx.kept], saved[ctx.kept :]
            found = iter(backward(grads, results, tensors, *ctx.call, wanted))
            return None, None, None, None, *(next(found) if want else None for want in wants)

    def call(outputs: int, kinds: int, numbers, scale: float, tensors: list[Tensor]):
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:  # which the function refuses
            found = Attention.apply(outputs, kinds, numbers, scale, *tensors)
            return (found,) if outputs == 1 else found
        return tuple(forward(tensors, kinds, numbers, scale)[:outputs])

    return call


def arranged(places: Sequence[str], given: dict[str, Tensor]) -> tuple[int, list[Tensor]]:
    """Return the tensors that are given by names of `places`, as `kinds` and the list of them."""
    kinds, tensors = 0, []
    for place, name in enumerate(places):
        if name in given:
            kinds |= 1 << place
            tensors.append(given[name])
    return kinds, tensors


def named(places: Sequence[str], kinds: int, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return what `arranged` was given, in its order."""
    there = (name for place, name in enumerate(places) if kinds >> place & 1)
    return dict(zip(there, tensors, strict=True))
