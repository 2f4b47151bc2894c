"""Attend on CPUs by a kernel in C: one pass over tiles, forward and backward.

`attention.lowering` sums the terms field by field, `call` hands them to the kernel, `call.h` documents what
the kernel evaluates, and `build` compiles it when it is first needed.  A call keeps q, k, v, the output
and two numbers a query for the backward pass: nothing has a size of T x S.  A step of decoding has one
query and nothing to tile: `step` passes over keys and values once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.attention import lowering
from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.native import build, call, step
from relpos_fairseq.attention.step import attend_step, supports_step

name = "native"
TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

__all__ = ["attend", "build", "call", "name", "problem", "refusal", "refusal_anywhere", "serves_step", "step"]


def attend(inputs: AttentionInputs) -> Tensor:
    """Return the output (B, H, T, Dv) of attention, for inputs for which `refusal` returns None."""
    if serves_step(inputs):
        return step.attend_token(inputs)
    if supports_step(inputs.terms, inputs.positions):
        return attend_step(inputs)[0]
    return call.attend_sequence(inputs)


def serves_step(inputs: AttentionInputs) -> bool:
    """Return whether the inputs are a step of decoding that the kernel can evaluate on this machine."""
    return supports_step(inputs.terms, inputs.positions) and step.serves(inputs)


def refusal(inputs: AttentionInputs) -> str | None:
    """Return why these inputs cannot be evaluated, or None."""
    return refusal_anywhere(inputs) or problem(inputs)


def problem(inputs: AttentionInputs) -> str | None:
    """Return why this machine has no kernel for the inputs' type, or None."""
    return build.problem(inputs.exact)


def refusal_anywhere(inputs: AttentionInputs) -> str | None:
    """Return why these inputs cannot be evaluated on any machine, or None."""
    if inputs.q.device.type != "cpu":
        return f"tensors on {inputs.q.device.type} (its kernel is for CPUs)"
    if inputs.q.dtype not in TYPES:
        return f"inputs of {inputs.q.dtype}"
    if round(inputs.dropout * call.DROP_PARTS) == call.DROP_PARTS:
        return f"a dropout of {inputs.dropout:g}, which keeps nothing"
    return lowering.why_not_lowered(inputs)
