"""Define a kernel as two operations of torch, and their derivative.

Torch's compilers and tracers see `relpos::NAME` and `relpos::NAME_backward`, which they can order,
move and record, but not look into.  A function of autograd calls both operations:
`torch.library.register_autograd` would add 0.2 ms to a call of the two passes.

An operation takes the tensors of a kernel as one list of those that are present.  Bit p of `present`
says whether the tensor with the p-th name is in it.  `numbers` and `scale` are all else that the
kernel is told.

`differentiable_once` decorates backward passes that are written by hand, here and elsewhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

_CALL = "Tensor[] tensors, int present, SymInt[] numbers, float scale"
_library = torch.library.Library("relpos", "FRAGMENT")
Tensors = Sequence[Tensor]


class Given(NamedTuple):
    """What a kernel is given; see the top of this file."""

    tensors: list[Tensor]
    present: int
    numbers: Sequence[int]
    scale: float


class Kernel(NamedTuple):
    """The passes of a kernel, and empty tensors of the shapes, types and strides that they return.

    Args:
        forward: of what is given: the outputs, then what `backward` needs.
        results: of the same: empty tensors for what `forward` returns.
        backward: of the gradients of the outputs, the results of `forward`, what was given, and bits `wanted`: the
            gradients of the tensors whose bits `wanted` has, in their order.
        gradients: of what was given, and `wanted`: empty tensors for what `backward` returns.
    """

    forward: Callable[[Given], list[Tensor]]
    results: Callable[[Given], list[Tensor]]
    backward: Callable[[list[Tensor], list[Tensor], Given, int], list[Tensor]]
    gradients: Callable[[Given, int], list[Tensor]]


def define(
    name: str, kernel: Kernel, devices: Sequence[str], refusal: tuple[str, str]
) -> Callable[..., tuple[Tensor, ...]]:
    """Define the two operations of a kernel, and return the function that calls them.

    Args:
        name: of the operation.
        kernel: the passes: a `Kernel`, or a module with the four functions.
        devices: torch's names of the devices that it runs on.
        refusal: what has no second derivative, and what to do instead.

    Returns:
        A function of the number of outputs, present, numbers, scale and tensors; it returns the outputs.
    """
    back = f"{name}_backward"
    _library.define(f"{name}({_CALL}) -> Tensor[]")
    _library.define(f"{back}(Tensor[] grads, Tensor[] results, {_CALL}, int wanted) -> Tensor[]")
    for device in devices:
        _library.impl(name, lambda *call: kernel.forward(Given(*call)), device)
        _library.impl(back, lambda dout, found, *call: kernel.backward(dout, found, Given(*call[:4]), call[4]), device)
    torch.library.register_fake(f"relpos::{name}", lambda *call: kernel.results(Given(*call)), lib=_library)
    torch.library.register_fake(
        f"relpos::{back}", lambda dout, found, *call: kernel.gradients(Given(*call[:4]), call[4]), lib=_library
    )
    forward, backward = (getattr(torch.ops.relpos, each).default for each in (name, back))

    class Attention(torch.autograd.Function):
        """Call the forward operation; keep its tensors and results for the backward operation."""

        @staticmethod
        def forward(ctx, outputs: int, present: int, numbers, scale: float, *tensors: Tensor):
            results = forward(tensors, present, numbers, scale)
            ctx.call, ctx.kept = (present, numbers, scale), len(results)
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

    def call(outputs: int, present: int, numbers, scale: float, tensors: list[Tensor]):
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:  # which the function refuses
            found = Attention.apply(outputs, present, numbers, scale, *tensors)
            return (found,) if outputs == 1 else found
        return tuple(forward(tensors, present, numbers, scale)[:outputs])

    return call


def arranged(places: Sequence[str], given: dict[str, Tensor]) -> tuple[int, list[Tensor]]:
    """Return tensors, given by names of `places`, as `present` and a list in the order of `places`."""
    present, tensors = 0, []
    for place, name in enumerate(places):
        if name in given:
            present |= 1 << place
            tensors.append(given[name])
    return present, tensors


def named(places: Sequence[str], present: int, tensors: Tensors) -> dict[str, Tensor]:
    """Return by their names the tensors that `arranged` has put into a list."""
    names = (name for place, name in enumerate(places) if present >> place & 1)
    return dict(zip(names, tensors, strict=True))


def differentiable_once(what: str, remedy: str) -> Callable[[Callable], Callable]:
    """Decorate the backward pass of an autograd function: its own derivative becomes an error.

    The pass runs without autograd, and without autocast, which would round its products.  Where the
    caller keeps a graph of gradients (create_graph=True), differentiating them fails.  Torch's
    once_differentiable silently treats saved tensors as constants there.

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


def _tied(message: str, found: Sequence[Tensor | None], sources: Tensors) -> tuple[Tensor | None, ...]:
    """Return the gradients as tensors that depend on all of `sources`; their derivative is an error."""
    given = [part for part in found if part is not None]
    tied = iter(_Refusal.apply(message, len(given), *given, *sources))
    return tuple(None if part is None else next(tied) for part in found)


class _Refusal(torch.autograd.Function):
    """Pass on the first `count` tensors; their derivative is an error."""

    @staticmethod
    def forward(ctx, message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(part.view_as(part) for part in tensors[:count])

    @staticmethod
    def backward(ctx, *grads: Tensor) -> None:
        raise RuntimeError(ctx.message)
