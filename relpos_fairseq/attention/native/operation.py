"""The kernel as two operations of torch, and their derivative.

Torch's compilers and tracers see `relpos::attend` and `relpos::attend_backward`, which they can
order, move and record, but not read; what surrounds them is theirs.  A function of autograd calls
them: `torch.library.register_autograd` would take 0.2 ms more of a call of the two passes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering import Lowered
from relpos_fairseq.attention.native import function
from relpos_fairseq.attention.native.call import OVER_DISTANCES, Numbers
from relpos_fairseq.attention.native.checks import check_device
from relpos_fairseq.attention.native.operands import lower_for_c
from relpos_fairseq.attention.once import differentiable_once

DROPS = 65536  # parts of all probabilities, in which a dropout is counted
_CALL = "Tensor[] tensors, int kinds, SymInt[] numbers, float scale"
_library = torch.library.Library("relpos", "FRAGMENT")
_library.define(f"attend({_CALL}) -> (Tensor, Tensor)")
_library.define(
    f"attend_backward(Tensor dout, Tensor out, Tensor sums, {_CALL}, int wanted) -> Tensor[]"
)
_library.impl("attend", function.forward, "CPU")
_library.impl("attend_backward", function.backward, "CPU")


def _fake(tensors: list[Tensor], *call) -> tuple[Tensor, Tensor]:
    return function.results(tensors)


def _fake_backward(
    dout: Tensor, out: Tensor, sums: Tensor, tensors: list[Tensor], kinds: int, *call
) -> list[Tensor]:
    return function.like_gradients(tensors, kinds, call[-1])


torch.library.register_fake("relpos::attend", _fake, lib=_library)
torch.library.register_fake("relpos::attend_backward", _fake_backward, lib=_library)
_forward = torch.ops.relpos.attend.default
_backward = torch.ops.relpos.attend_backward.default


def attend(inputs: AttentionInputs) -> Tensor:
    """Output (B, H, T, Dv) of inputs that `refusal` does not refuse."""
    low = lower_for_c(inputs)
    numbers = describe(inputs, low)
    check_device(low.tensors.items())
    kinds, tensors = function.arranged({**low.tensors, **_masks(inputs, low)})
    if torch.is_grad_enabled() or forward_ad._current_level >= 0:  # which the function refuses
        out = _Attention.apply(kinds, numbers, inputs.scale, *tensors)
    else:
        out = _forward(tensors, kinds, numbers, inputs.scale)[0]
    return out.to(inputs.v.dtype)


def describe(inputs: AttentionInputs, low: Lowered) -> Numbers:
    """Return the numbers of a call.

    Args:
        inputs: the call.
        low: the same, lowered.
    """
    positions, operands = inputs.positions, low.tensors
    batch, heads, _, dim = (inputs.content_q if inputs.rotated else inputs.q).shape
    rank = operands["query_factors"].size(-1) if "query_factors" in operands else 0
    lowest = width = wide = 0
    if any(name in operands for name in OVER_DISTANCES):
        lowest, width = low.vectors.low, low.vectors.width
        wide = int(low.vectors.equals(low.scalars))  # a row for each of all distances
    return Numbers(
        batch=batch,
        heads=heads,
        tgt=positions.tgt_len,
        src=positions.src_len,
        dim=dim,
        value_dim=inputs.v.size(-1),
        rank=rank,
        start=positions.query_start,
        low=lowest,
        width=width,
        wide=wide,
        causal=int(inputs.causal),
        window=inputs.window or 0,
        reset_kinds=low.reset_kinds,
        drop=round(inputs.dropout * DROPS),
    )


def _masks(inputs: AttentionInputs, low: Lowered) -> dict[str, Tensor]:
    """Return the tensors without gradients, as the kernel reads them."""
    found, shape = {}, (inputs.q.size(0), inputs.positions.src_len)
    if low.reset_kinds:
        found["first"] = low.first.to(torch.int64).contiguous()
    if inputs.key_padding is not None:
        padding = inputs.key_padding.to(torch.bool).expand(shape).contiguous()
        found["padding"] = padding.view(torch.uint8)
    if inputs.documents is not None:
        found["documents"] = inputs.documents.to(torch.int64).expand(shape).contiguous()
    if inputs.dropout:
        found["seed"] = torch.randint(1 << 40, 1 << 62, (), dtype=torch.long)
    return found


class _Attention(torch.autograd.Function):
    """Output (B, H, T, Dv); keeps it, the tensors, and two numbers a query."""

    @staticmethod
    def forward(ctx, kinds: int, numbers: Numbers, scale: float, *tensors: Tensor) -> Tensor:
        out, sums = _forward(tensors, kinds, numbers, scale)
        ctx.call = kinds, numbers, scale
        ctx.save_for_backward(out, sums, *tensors)
        return out

    @staticmethod
    @differentiable_once("attention by the compiled kernel", "use --attention-backend reference")
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        out, sums, *tensors = ctx.saved_tensors
        wants = ctx.needs_input_grad[3:]
        wanted = 0
        for number, want in enumerate(wants):
            wanted |= want << number
        grads = iter(_backward(dout, out, sums, tensors, *ctx.call, wanted))
        return None, None, None, *(next(grads) if want else None for want in wants)
