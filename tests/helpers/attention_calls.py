"""Attention calls of a scheme whose terms are formed anew each time, and what they must equal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from cases import Case, build, terms_of
from helpers.scheme_calls import weighted
from relpos_fairseq.attention import AttentionInputs, attend
from relpos_fairseq.core.positions import Positions

LENGTH = 200
EXACT = {"rtol": 1e-9, "atol": 1e-10}


class Call:
    """A call of a scheme.

    Args:
        scheme: its name.
        length: T = S.
        options: of the inputs.
    """

    def __init__(self, scheme: str, length: int = LENGTH, **options) -> None:
        """Random parameters, queries, keys and values in fp64."""
        causal = options.get("causal", False)
        self.stack, self.layer = build(Case(scheme), causal=causal, heads=2, longest=length)
        generator = torch.Generator().manual_seed(3)
        self.qkv = [torch.randn(2, 2, length, 4, generator=generator, dtype=torch.float64) for _ in "qkv"]
        self.positions, self.options = Positions(length, length), options
        parameters = (*self.stack.parameters(), *self.layer.parameters())
        self.parameters = [part for part in parameters if part.requires_grad]

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
        """The call of some queries, keys and values."""
        terms = terms_of(self.stack, self.layer, self.positions)
        made = AttentionInputs(q, k, v, terms, self.positions, self.stack.plan.scale)
        return replace(made, **self.options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: str = "blocked") -> Tensor:
        """(B, H, T, D)."""
        return attend(self.inputs(q, k, v), backend)[0]

    def gradients(self, leaves: list[Tensor], backend: str = "blocked") -> list[Tensor]:
        """Output, then gradients of q, k, v and the parameters."""
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = self.attend(*leaves, backend)
        found = torch.autograd.grad(weighted(out), [*leaves, *self.parameters], materialize_grads=True)
        return [out.detach(), *found]


def same(found: list[Tensor], expected: list[Tensor], **tolerance) -> None:
    """All of both are equal."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **(tolerance or EXACT))


def in_a_thread(work: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What `work` returns in a thread that has kept no storage yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Torch's number of threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def permuted(x: Tensor) -> Tensor:
    """As fairseq's layers have it: (T, B, H, D) in memory."""
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def strided(x: Tensor) -> Tensor:
    """Every second channel of something wider, at an odd offset."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.size(-1) + 1, dtype=x.dtype)
    wide[..., 1::2] = x
    return wide[..., 1::2]


def expanded(x: Tensor) -> Tensor:
    """The first row of the batch for all of them, without a copy."""
    return x[:1].expand_as(x)


def turned(x: Tensor) -> Tensor:
    """Channels far apart: (B, H, D, T) in memory."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


class Interrupt(torch.overrides.TorchFunctionMode):
    """Raises KeyboardInterrupt at some call of a torch function."""

    def __init__(self, after: int) -> None:
        """Count down from `after`."""
        super().__init__()
        self.left = after

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call, or interrupt."""
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))
