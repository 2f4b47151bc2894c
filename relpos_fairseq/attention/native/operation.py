"""The kernel as an operation of torch, and the call of it that evaluates `AttentionInputs`."""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering import Lowered
from relpos_fairseq.attention.native import function
from relpos_fairseq.attention.native.call import OVER_DISTANCES, Numbers
from relpos_fairseq.attention.native.checks import check_device
from relpos_fairseq.attention.native.operands import lower_for_c
from relpos_fairseq.attention.operation import define

DROPS = 65536  # parts of all probabilities, in which a dropout is counted
_kernel = define("attend", function, ["CPU"], ("attention by the compiled kernel", "use --attention-backend reference"))


def attend(inputs: AttentionInputs) -> Tensor:
    """Output (B, H, T, Dv) of inputs that `refusal` does not refuse."""
    low = lower_for_c(inputs)
    numbers = describe(inputs, low)
    check_device(low.tensors.items())
    kinds, tensors = function.arranged({**low.tensors, **_masks(inputs, low)})
    (out,) = _kernel(1, kinds, numbers, inputs.scale, tensors)
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
