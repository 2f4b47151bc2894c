"""The kernel's forward and backward pass as one function of autograd."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.native import call as calls
from relpos_fairseq.attention.native.call import OPERANDS, TENSORS, Call, Table
from relpos_fairseq.attention.native.lowering import Lowered, lower
from relpos_fairseq.attention.once import differentiable_once

DROPS = 65536  # parts of all probabilities, in which a dropout is counted
_RANKS = tuple(len(TENSORS) <= place for place in range(len(OPERANDS)))  # whether it is a table
Operands = tuple[Tensor | None, ...]


def attend(inputs: AttentionInputs) -> Tensor:
    """Output (B, H, T, Dv) of inputs that `refusal` does not refuse."""
    low = lower(inputs)
    call, masks = describe(inputs, low)
    get = low.operands.get
    out = _Attention.apply(call, masks, *[get(name) for name in OPERANDS])
    return out.to(inputs.v.dtype)


def describe(inputs: AttentionInputs, low: Lowered) -> tuple[Call, tuple[Tensor | None, ...]]:
    """The call but for its operands, and the tensors without gradients that it points to.

    Args:
        inputs: the call.
        low: the same, lowered.
    """
    positions, operands, call = inputs.positions, low.operands, Call()
    call.batch, call.heads, call.tgt, call.dim = inputs.q.shape
    call.src, call.value_dim = positions.src_len, inputs.v.size(-1)
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
        first = low.first.contiguous()
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
        laid = _laid_out(operands)
        q, v = laid[0], laid[2]
        if q.size(-1) == v.size(-1):
            out = torch.empty_like(q)
        else:
            out = v.new_empty(*q.shape[:3], v.size(-1))
        top, mass = q.new_empty((2, call.batch * call.heads, call.tgt)).unbind()
        _point(call, laid, out, top, mass)
        _run("relpos_forward", call, q.dtype)
        ctx.call, ctx.masks = call, masks
        ctx.save_for_backward(out, top, mass, *laid)
        return out

    @staticmethod
    @differentiable_once("attention by the compiled kernel", "use --attention-backend reference")
    def backward(ctx, dout: Tensor) -> Operands:
        out, top, mass, *laid = ctx.saved_tensors
        # What was saved may have been moved or formed again; and a graph may be walked twice.
        call = Call.from_buffer_copy(ctx.call)
        _point(call, laid, out, top, mass)
        if dout.stride(-1) != 1:
            dout = dout.contiguous()
        call.dout = _tensor(dout)
        wanted, grads = ctx.needs_input_grad[2:], []
        heads = (call.batch, call.heads)
        for name, operand, needed in zip(OPERANDS, laid, wanted, strict=True):
            grads.append(_room(call, name, operand, heads) if needed else None)
        _run("relpos_backward", call, out.dtype)
        for place, (grad, operand) in enumerate(zip(grads, laid, strict=True)):
            if grad is not None and grad.shape != operand.shape:
                grads[place] = _summed(grad, operand, heads)
        return None, None, *grads


def _laid_out(operands: Operands) -> list[Tensor | None]:
    """Operands whose channels follow one another; tables without gaps."""
    laid = []
    for operand, is_table in zip(operands, _RANKS, strict=True):
        if operand is not None and (is_table or operand.stride(-1) != 1):
            operand = operand.contiguous()
        laid.append(operand)
    return laid


def _point(call: Call, laid: list[Tensor | None], out: Tensor, top: Tensor, mass: Tensor) -> None:
    """Tell the call where operands and results lie."""
    for name, operand, is_table in zip(OPERANDS, laid, _RANKS, strict=True):
        if operand is None:
            continue
        if is_table:
            shared = operand.size(0) == 1
            setattr(call, name, Table(operand.data_ptr(), 0 if shared else operand.stride(0)))
        else:
            setattr(call, name, _tensor(operand))
    call.out, call.top, call.mass = _tensor(out), top.data_ptr(), mass.data_ptr()


def _tensor(x: Tensor) -> calls.Tensor:
    """Where (B|1, H|1, length, channels) lies; strides are 0 where it is broadcast."""
    batch, heads, rows, _ = x.stride()
    ones = x.shape
    return calls.Tensor(
        x.data_ptr(), 0 if ones[0] == 1 else batch, 0 if ones[1] == 1 else heads, rows
    )


def _room(call: Call, name: str, operand: Tensor, heads: tuple[int, int]) -> Tensor:
    """Where the kernel puts a gradient: as the operand, or of each head its own (N, ...)."""
    if name in ("q", "k", "v", "cq", "ck"):
        grad = torch.empty_like(operand)
        setattr(call, f"d{name}", _tensor(grad))
        return grad
    rest = operand.shape[2:] if name in ("f", "g") else operand.shape[1:]
    grad = operand.new_empty(heads[0] * heads[1], *rest)
    setattr(call, f"d{name}", grad.data_ptr())
    return grad


def _summed(grad: Tensor, operand: Tensor, heads: tuple[int, int]) -> Tensor:
    """Gradients of all heads (N, ...), summed over those that share the operand."""
    if operand.dim() == 4:  # factors (B|1, H|1, L, r)
        return grad.unflatten(0, heads).sum_to_size(operand.shape)
    if operand.size(0) == 1:
        return grad.sum(0, keepdim=True)
    return grad.unflatten(0, heads).sum(0)


def _run(function: str, call: Call, dtype: torch.dtype) -> None:
    failed = getattr(calls.kernel(dtype), function)(call)
    if failed:
        gib = ctypes.sizeof(ctypes.c_double) * (call.src + call.tgt) * call.dim / 2**30
        raise MemoryError(
            f"the attention kernel has no memory for its buffers ({call.threads} threads, "
            f"{call.tgt} queries, {call.src} keys of {call.dim} channels, about {gib:.3f} GiB a "
            f"thread): use fewer threads (OMP_NUM_THREADS) or smaller batches"
        )
