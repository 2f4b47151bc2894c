"""Fused kernels in Triton: attention with positions as one band of distances between two tails.

Forward and backward, without atomics: same inputs, same bits.  A call keeps q, k, v, the output,
one number a query and the products of its tables, O(T (D + k)) for tables of k distances.
`lowering` says what becomes of the terms, `refusal` what is not served, `proof` how kernels prove
themselves on a GPU before `auto` takes them.

A step of decoding has one query and nothing to fuse: `attend_step` evaluates it, here as in the
backend `blocked`.
"""

from __future__ import annotations

from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.step import attend_step, supports_step
from relpos_fairseq.attention.triton.refusal import interpreted, reasons, refusal, refusal_anywhere, unproved

name = "triton"

__all__ = ["attend", "interpreted", "name", "reasons", "refusal", "refusal_anywhere", "unproved"]


def attend(inputs: AttentionInputs) -> Tensor:
    """Output (B, H, T, Dv) of inputs that `refusal` does not refuse."""
    if supports_step(inputs.terms, inputs.positions):
        return attend_step(inputs)[0]
    # Triton is an import of its own weight, and optional.
    from relpos_fairseq.attention.triton.fused_attention import attend as fused

    return fused(inputs)
