"""Fused kernels in Triton: attention with positions, forward and backward, for GPUs.

No atomics: same inputs, same bits.  A call keeps q, k, v, the output, one number a query and the products with its near
tables, O(T (D + k)) for tables of k distances.  In reading order: `operands` (a call as tensors), `kernel_args` (what
kernels are given, and the words used throughout), `tile`, `logits`, `forward`, `backward` (the kernels), `trilinear`
(M3's products), `fused_attention` (launches).  `refusal` tells what the kernels do not compute; `call_signature`,
`selftest` and `selftest_cache` test them on a GPU before `auto` takes them.

A step of decoding has one query, so that nothing is fused: `attend_step` evaluates it, as for the backend `blocked`.
"""

from __future__ import annotations

from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.step import attend_step, supports_step
from relpos_fairseq.attention.triton.refusal import interpreted, reasons, refusal, refusal_anywhere, unproved

name = "triton"

__all__ = ["attend", "interpreted", "name", "reasons", "refusal", "refusal_anywhere", "unproved"]


def attend(inputs: AttentionInputs) -> Tensor:
    """Return the output (B, H, T, Dv) of inputs that `refusal` does not refuse."""
    if supports_step(inputs.terms, inputs.positions):
        return attend_step(inputs)[0]
    # Triton is optional, and slow to import.
    from relpos_fairseq.attention.triton.fused_attention import fused_attention

    return fused_attention(inputs)
