"""The kernel's forward and backward pass as one function of autograd."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd import forward_ad

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering import Lowered
from relpos_fairseq.attention.native import call as calls
from relpos_fairseq.attention.native.call import (
    FACTORS,
    OPERANDS,
    OVER_DISTANCES,
    TABLES,
    TENSORS,
    Call,
    Table,
)
from relpos_fairseq.attention.native.checks import check
from relpos_fairseq.attention.native.operands import lower_for_c
from relpos_fairseq.attention.once import differentiable_once

DROPS = 65536  # parts of all probabilities, in which a dropout is counted
_TENSORS = tuple((place, name) for place, name in enumerate(TENSORS))
_TABLES = tuple((place, name) for place, name in enumerate(OPERANDS) if name in TABLES)
_GRADIENTS = tuple(f"d{name}" for name in OPERANDS)
CONTENT = ("q", "k", "v", "content_q", "content_k")
_LIKE_OPERAND = tuple(name in CONTENT for name in OPERANDS)
_BY_HEAD = (*TENSORS, *TABLES, "out", "dout", *(f"d{name}" for name in CONTENT))
_MASKS = ("first", "padding", "documents")  # have no gradients
AT_ONCE = 32 << 20  # bytes of gradients that the kernel writes apart, before they are summed
Operands = tuple[Tensor | None, ...]


def attend(inputs: AttentionInputs) -> Tensor:
    """Output (B, H, T, Dv) of inputs that `refusal` does not refuse."""
    low = lower_for_c(inputs)
    call, masks = describe(inputs, low)
    check(call, low.tensors)
    operands = [low.tensors.get(name) for name in OPERANDS]
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:  # which the function refuses
        out = _Attention.apply(call, masks, *operands)
    else:
        out = _forward(call, operands)[0]
    return out.to(inputs.v.dtype)


def describe(inputs: AttentionInputs, low: Lowered) -> tuple[Call, tuple[Tensor | None, ...]]:
    """The call but for its operands, and the tensors without gradients that it points to.

    Args:
        inputs: the call.
        low: the same, lowered.
    """
    positions, operands, call = inputs.positions, low.tensors, Call()
    call.batch, call.heads, _, call.dim = inputs.q.shape
    call.all_heads = call.heads
    call.tgt, call.src = positions.tgt_len, positions.src_len
    call.value_dim = inputs.v.size(-1)
    call.start, call.scale = positions.query_start, inputs.scale
    call.causal, call.window = inputs.causal, inputs.window or 0
    call.threads = torch.get_num_threads()
    if "query_factors" in operands:
        call.rank = operands["query_factors"].size(-1)
    if not operands.keys().isdisjoint(OVER_DISTANCES):
        call.low, call.width = low.vectors.low, low.vectors.width
        call.wide = low.vectors == low.scalars  # a row for each of all distances
    if inputs.dropout:
        call.drop = round(inputs.dropout * DROPS)
        call.seed = int(torch.randint(1 << 40, 1 << 62, (), dtype=torch.long))
    first = padding = documents = None
    if low.reset_kinds:
        first = low.first.to(torch.int64).contiguous()
        call.reset_kinds, call.first = low.reset_kinds, first.data_ptr()
        call.first_per_row = first.numel() > 1
    shape = (call.batch, call.src)
    if inputs.key_padding is not None:
        padding = inputs.key_padding.to(torch.bool).expand(shape).contiguous().view(torch.uint8)
        call.padding = padding.data_ptr()
    if inputs.documents is not None:
        documents = inputs.documents.to(torch.int64).expand(shape).contiguous()
        call.documents = documents.data_ptr()
    return call, (first, padding, documents)


class _Attention(torch.autograd.Function):
    """Output (B, H, T, Dv); keeps it, the operands, and two numbers a query."""

    @staticmethod
    def forward(ctx, call: Call, masks: Operands, *operands: Tensor | None) -> Tensor:
        out, numbers, laid = _forward(call, operands)
        ctx.call = call
        ctx.save_for_backward(out, numbers, *masks, *laid)
        return out

    @staticmethod
    @differentiable_once("attention by the compiled kernel", "use --attention-backend reference")
    def backward(ctx, dout: Tensor) -> Operands:
        out, numbers, *rest = ctx.saved_tensors
        masks, laid = rest[: len(_MASKS)], rest[len(_MASKS) :]
        # What was saved may have been moved or formed again, and a graph may be walked twice.
        call = Call.from_buffer_copy(ctx.call)
        for name, mask in zip(_MASKS, masks, strict=True):
            if mask is not None:
                setattr(call, name, mask.data_ptr())
        laid = _point(call, laid, out, numbers)
        if dout.stride(-1) != 1:
            dout = dout.contiguous()
        call.dout = _tensor(dout)
        return None, None, *_gradients(call, laid, numbers, ctx.needs_input_grad[2:])


def _forward(
    call: Call, operands: Sequence[Tensor | None]
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """The output, (2, N, T) largest logits and sums, and the operands as the kernel reads them."""
    q, v = operands[0], operands[2]
    if q.size(-1) != v.size(-1):
        out = v.new_empty(*q.shape[:3], v.size(-1))
    elif q.stride(-1) == 1:
        out = torch.empty_like(q)
    else:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    numbers = q.new_empty((2, call.batch * call.heads, call.tgt))
    laid = _point(call, operands, out, numbers)
    _run(calls.kernel(q.dtype).relpos_forward, call)
    return out, numbers, laid


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
                grads[place] = torch.zeros_like(laid[place])
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
