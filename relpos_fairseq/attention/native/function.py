"""The kernel's forward and backward pass over tensors, as operations of torch call them.

A call's tensors come as a list of those that there are; bit p of `kinds` says that the one at place
p of `PLACES` is among them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.attention.native import call as calls
from relpos_fairseq.attention.native.call import (
    FACTORS,
    OPERANDS,
    TABLES,
    TENSORS,
    Call,
    Numbers,
    Table,
)

_TENSORS = tuple((place, name) for place, name in enumerate(TENSORS))
_TABLES = tuple((place, name) for place, name in enumerate(OPERANDS) if name in TABLES)
_GRADIENTS = tuple(f"d{name}" for name in OPERANDS)
CONTENT = ("q", "k", "v", "content_q", "content_k")
_LIKE_OPERAND = tuple(name in CONTENT for name in OPERANDS)
_BY_HEAD = (*TENSORS, *TABLES, "out", "dout", *(f"d{name}" for name in CONTENT))
MASKS = ("first", "padding", "documents")
PLACES = (*OPERANDS, *MASKS, "seed")
AT_ONCE = 32 << 20  # bytes of gradients that the kernel writes apart, before they are summed


def forward(
    tensors: list[Tensor], kinds: int, numbers: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Return the output, and the (2, N, T) largest logits and sums that its gradients need."""
    given = _spread(tensors, kinds)
    call = _described(given, numbers, scale)
    out, sums = results(tensors)
    laid = _point(call, given[: len(OPERANDS)], out, sums)
    _run(calls.kernel(sums.dtype).relpos_forward, call)
    del laid  # not before: the call has the addresses alone
    return out, sums


def backward(
    dout: Tensor,
    out: Tensor,
    sums: Tensor,
    tensors: list[Tensor],
    kinds: int,
    numbers: list[int],
    scale: float,
    wanted: int,
) -> list[Tensor]:
    """Return the gradients of those of `tensors` whose bits `wanted` has, in their order."""
    given = _spread(tensors, kinds)
    call = _described(given, numbers, scale)
    laid = _point(call, given[: len(OPERANDS)], out, sums)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    call.dout = _tensor(dout)
    wants = [False] * len(OPERANDS)
    for number, place in enumerate(_places(kinds)):
        if wanted >> number & 1:
            wants[place] = True
    grads = _gradients(call, laid, sums, wants)
    return [grad for grad in grads if grad is not None]


def results(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return room for the output, (2, N, T) largest logits and sums."""
    q, v = tensors[0], tensors[2]
    if q.size(-1) != v.size(-1):
        out = v.new_empty(*q.shape[:3], v.size(-1))
    elif q.stride(-1) == 1:
        out = torch.empty_like(q)
    else:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return out, q.new_empty((2, q.size(0) * q.size(1), q.size(2)))


def like_gradients(tensors: list[Tensor], kinds: int, wanted: int) -> list[Tensor]:
    """Return room for what `backward` returns."""
    found = []
    for number, (place, operand) in enumerate(zip(_places(kinds), tensors, strict=True)):
        if wanted >> number & 1:
            if _LIKE_OPERAND[place] and operand.stride(-1) == 1:
                found.append(torch.empty_like(operand))
            else:
                found.append(operand.new_empty(operand.shape))
    return found


def _spread(tensors: list[Tensor], kinds: int) -> list[Tensor | None]:
    """Return a tensor or None for each of PLACES."""
    given: list[Tensor | None] = [None] * len(PLACES)
    for place, tensor in zip(_places(kinds), tensors, strict=True):
        given[place] = tensor
    return given


@functools.lru_cache
def _places(kinds: int) -> tuple[int, ...]:
    """Return the places of a call's tensors, in their order."""
    return tuple(place for place in range(len(PLACES)) if kinds >> place & 1)


@functools.lru_cache
def _of_numbers(numbers: tuple[int, ...], scale: float) -> Call:
    """Return a call's numbers as the kernel reads them, to be copied."""
    call = Call(**dict(zip(Numbers._fields, numbers, strict=True)), scale=scale)
    call.all_heads = call.heads
    return call


def _described(given: list[Tensor | None], numbers: list[int], scale: float) -> Call:
    """Return the call but for its operands."""
    call = Call.from_buffer_copy(_of_numbers(tuple(numbers), scale))
    call.threads = torch.get_num_threads()
    first, padding, documents, seed = given[len(OPERANDS) :]
    for name, mask in (("first", first), ("padding", padding), ("documents", documents)):
        if mask is not None:
            setattr(call, name, mask.data_ptr())
    if first is not None:
        call.first_per_row = first.numel() > 1
    if seed is not None:
        call.seed = int(seed)
    return call


def _point(
    call: Call, operands: Sequence[Tensor | None], out: Tensor, numbers: Tensor
) -> list[Tensor | None]:
    """Tell the call where operands and results lie; returns the operands as it reads them.

    Their channels follow one another, and tables are without gaps.
    """
    laid = list(operands)
    for place, name in _TENSORS:
        operand = laid[place]
        if operand is not None:
            # Rows of the batch that read the same numbers share one gradient: of a batch of 1 only.
            expanded = operand.stride(0) == 0 and operand.size(0) > 1 and name in FACTORS
            if operand.stride(-1) != 1 or expanded:
                laid[place] = operand = operand.contiguous()
            setattr(call, name, _tensor(operand))
    for place, name in _TABLES:
        operand = laid[place]
        if operand is not None:
            laid[place] = operand = operand.contiguous()
            stride = operand.stride(0) if operand.size(0) > 1 else 0
            setattr(call, name, Table(operand.data_ptr(), stride))
    top = numbers.data_ptr()
    call.out, call.top = _tensor(out), top
    call.mass = top + numbers.stride(0) * numbers.element_size()
    return laid


def _tensor(x: Tensor) -> calls.Tensor:
    """Where (B|1, H|1, length, channels) lies; strides are 0 where it is broadcast."""
    batch, heads, rows, _ = x.stride()
    if x.size(0) == 1:
        batch = 0
    if x.size(1) == 1:
        heads = 0
    return calls.Tensor(x.data_ptr(), batch, heads, rows)


@dataclass
class _Apart:
    """A gradient that the kernel writes in several rows, before they are summed.

    Args:
        rows: of the batch, or groups of them.
        shape: of the operand: (B|1, H|1, ...).
    """

    rows: int
    shape: tuple[int, ...]


def _gradients(
    call: Call, laid: list[Tensor | None], numbers: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the operands that want one.

    The kernel writes those of tables for each head of each row of the batch, those of factors for
    each head of the groups that rows are taken in.  Where these would take much memory before they
    are summed, some heads are evaluated at a time; which ones depends on shapes and the number of
    threads alone.
    """
    grads: list[Tensor | None] = [None] * len(laid)
    groups = calls.kernel(numbers.dtype).relpos_groups(call) if call.rank else call.batch
    apart: dict[int, _Apart] = {}
    for place, operand in enumerate(laid):
        if operand is None or not wanted[place]:
            continue
        if _LIKE_OPERAND[place]:
            grads[place] = grad = torch.empty_like(operand)
            setattr(call, _GRADIENTS[place], _tensor(grad))
        elif operand.dim() == 4:
            apart[place] = _Apart(groups, operand.shape)
        else:
            apart[place] = _Apart(call.batch, (1, *operand.shape))
    for first, heads in _parts(call, apart.values(), numbers.element_size()):
        for place, grad in _of_part(call, first, heads, numbers, apart).items():
            if heads == call.heads:
                grads[place] = grad.view(laid[place].shape)
                continue
            if grads[place] is None:
                grads[place] = laid[place].new_zeros(laid[place].shape)
            own = grads[place].view(apart[place].shape)
            own = own[:, first : first + heads] if own.size(1) > 1 else own
            own += grad
    return grads


def _parts(call: Call, apart: Iterable[_Apart], element_size: int) -> Iterator[tuple[int, int]]:
    """First head and number of heads of each part of a backward pass.

    Args:
        call: the call.
        apart: gradients that the kernel writes in several rows.
        element_size: bytes of a number.
    """
    all_heads, threads = call.heads, call.threads
    size = 0  # bytes of a head, before they are summed
    for grad in apart:
        if tuple(grad.shape[:2]) != (grad.rows, all_heads):
            size += grad.rows * math.prod(grad.shape[2:]) * element_size
    heads = max(AT_ONCE // max(size, 1), 2 * threads)  # no thread is idle for long
    heads = min(all_heads, heads // threads * threads)
    for first in range(0, all_heads, heads):
        yield first, min(heads, all_heads - first)


def _of_part(
    call: Call, first: int, heads: int, numbers: Tensor, apart: dict[int, _Apart]
) -> dict[int, Tensor]:
    """Evaluate some heads; what they give to operands: (B|1, heads|1, ...)."""
    if heads < call.heads:
        call = Call.from_buffer_copy(call)
        size = numbers.element_size()
        for name in _BY_HEAD:
            place = getattr(call, name)
            if place.data:
                place.data += first * place.h * size
        numbers = numbers.view(2, call.batch, call.heads, call.tgt)[:, :, first : first + heads]
        numbers = numbers.contiguous()
        call.top, call.mass = numbers[0].data_ptr(), numbers[1].data_ptr()
        call.heads, call.first_head = heads, first
    found = {}
    for place, grad in apart.items():
        found[place] = numbers.new_empty((grad.rows, heads, *grad.shape[2:]))
        setattr(call, _GRADIENTS[place], found[place].data_ptr())
    _run(calls.kernel(numbers.dtype).relpos_backward, call)
    for place, grad in apart.items():
        own = (grad.shape[0], heads if grad.shape[1] > 1 else 1, *grad.shape[2:])
        found[place] = found[place].sum_to_size(own)
    return found


def _run(function: Callable[[Call], int], call: Call) -> None:
    if call.batch and function(call):  # a batch without rows has nothing to evaluate
        raise MemoryError(
            f"the attention kernel has no memory for its buffers ({call.threads} threads, each for "
            f"a head of {call.tgt} queries and {call.src} keys, {call.dim} channels): use fewer "
            f"threads (OMP_NUM_THREADS), or --attention-backend blocked"
        )
