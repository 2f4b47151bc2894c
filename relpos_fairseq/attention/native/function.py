"""The kernel's forward and backward pass as one function of autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.native import call as calls
from relpos_fairseq.attention.native.call import OPERANDS, TABLES, TENSORS, Call, Table
from relpos_fairseq.attention.native.checks import check
from relpos_fairseq.attention.native.lowering import Lowered, lower
from relpos_fairseq.attention.once import differentiable_once

DROPS = 65536  # parts of all probabilities, in which a dropout is counted
_TENSORS = tuple((place, name) for place, name in enumerate(TENSORS))
_TABLES = tuple((place, name) for place, name in enumerate(OPERANDS) if name in TABLES)
_GRADIENTS = tuple(f"d{name}" for name in OPERANDS)
_LIKE_OPERAND = tuple(name in ("q", "k", "v", "cq", "ck") for name in OPERANDS)
Operands = tuple[Tensor | None, ...]


def attend(inputs: AttentionInputs) -> Tensor:
    """Output (B, H, T, Dv) of inputs that `refusal` does not refuse."""
    low = lower(inputs)
    call, masks = describe(inputs, low)
    check(call, low.operands)
    operands = [low.operands.get(name) for name in OPERANDS]
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
    positions, operands, call = inputs.positions, low.operands, Call()
    call.batch, call.heads, _, call.dim = inputs.q.shape
    call.tgt, call.src = positions.tgt_len, positions.src_len
    call.value_dim = inputs.v.size(-1)
    call.start, call.scale = positions.query_start, inputs.scale
    call.causal, call.window = inputs.causal, inputs.window or 0
    call.threads = torch.get_num_threads()
    if "f" in operands:
        call.rank = operands["f"].size(-1)
    if low.vectors is not None:
        call.low, call.width, call.wide = low.vectors.low, low.vectors.width, low.wide
    if inputs.dropout:
        call.drop = round(inputs.dropout * DROPS)
        call.seed = int(torch.randint(1 << 40, 1 << 62, (), dtype=torch.long))
    first = padding = documents = None
    if low.reset:
        first = low.first.to(torch.int64).contiguous()
        call.reset, call.first, call.first_per_row = low.reset, first.data_ptr(), first.numel() > 1
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
        ctx.call, ctx.masks = call, masks  # the call points to the masks
        ctx.save_for_backward(out, numbers, *laid)
        return out

    @staticmethod
    @differentiable_once("attention by the compiled kernel", "use --attention-backend reference")
    def backward(ctx, dout: Tensor) -> Operands:
        out, numbers, *laid = ctx.saved_tensors
        # What was saved may have been moved or formed again, and a graph may be walked twice.
        call = Call.from_buffer_copy(ctx.call)
        laid = _point(call, laid, out, numbers)
        if dout.stride(-1) != 1:
            dout = dout.contiguous()
        call.dout = _tensor(dout)
        kernel = calls.kernel(out.dtype)
        groups = kernel.relpos_groups(call) if call.rank else call.batch
        grads: list[Tensor | None] = [None, None]
        for place, needed in enumerate(ctx.needs_input_grad[2:]):
            grads.append(_room(call, place, laid[place], groups) if needed else None)
        _run(kernel.relpos_backward, call)
        for place, operand in enumerate(laid, 2):
            if grads[place] is not None:
                grads[place] = _summed(grads[place], operand, call)
        return tuple(grads)


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
            expanded = operand.stride(0) == 0 and operand.size(0) > 1 and name in ("f", "g")
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


def _room(call: Call, place: int, operand: Tensor, groups: int) -> Tensor:
    """Where the kernel puts a gradient: as the operand, or of each head its own (N, ...).

    Factors have one for each head of the `groups` that rows of the batch are taken in.
    """
    if _LIKE_OPERAND[place]:
        grad = torch.empty_like(operand)
        setattr(call, _GRADIENTS[place], _tensor(grad))
        return grad
    if operand.dim() == 4:
        grad = operand.new_empty((groups * call.heads, *operand.shape[2:]))
    else:
        grad = operand.new_empty((call.batch * call.heads, *operand.shape[1:]))
    setattr(call, _GRADIENTS[place], grad.data_ptr())
    return grad


def _summed(grad: Tensor, operand: Tensor, call: Call) -> Tensor:
    """A gradient of all heads (N, ...), summed over those that share the operand."""
    if grad.dim() == 4:
        return grad
    if operand.dim() == 4:  # factors (B|1, H|1, L, r)
        return grad.view(-1, call.heads, *grad.shape[1:]).sum_to_size(operand.shape)
    if operand.size(0) == 1:
        return grad.sum(0, keepdim=True)
    return grad.view(call.batch, call.heads, *grad.shape[1:]).sum(0)


def _run(function: Callable[[Call], int], call: Call) -> None:
    if call.batch and function(call):  # a batch without rows has nothing to evaluate
        raise MemoryError(
            f"the attention kernel has no memory for its buffers ({call.threads} threads, each for "
            f"a head of {call.tgt} queries and {call.src} keys, {call.dim} channels): use fewer "
            f"threads (OMP_NUM_THREADS), or --attention-backend blocked"
        )
