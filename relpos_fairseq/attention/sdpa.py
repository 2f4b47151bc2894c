"""Evaluate content alone, or with a constant bias, by torch's scaled_dot_product_attention.

Terms that depend on q or k, gates and value vectors are refused.  A static bias becomes SDPA's
additive mask, a (T, S) matrix a head: `auto` never chooses that, but a user may.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.reference import GatheredProducts, static_logits, total

name = "sdpa"
# With a mask, cuDNN's backward pass gives NaN at 64 tokens more than a multiple of 128
# (pytorch/pytorch 196678; see also 193893).
_WITH_MASK = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_SERVED = {"static", "dense_bias", "static_factors", "decay", "reset"}


def refusal(inputs: AttentionInputs) -> str | None:
    """Return the fields of terms that SDPA cannot evaluate, or None."""
    fields = {field for term in inputs.terms for field in term.present} - _SERVED
    return " and ".join(sorted(fields)) if fields else None


def attend(inputs: AttentionInputs) -> tuple[Tensor, None]:
    """Return the output (B, H, T, Dv), and None: SDPA keeps no probabilities."""
    q = inputs.q if inputs.content_q is None else inputs.content_q
    k = inputs.k if inputs.content_k is None else inputs.content_k
    mask, fast_causal = _mask(inputs)
    with sound_kernels(mask):
        out = F.scaled_dot_product_attention(
            q, k, inputs.v, attn_mask=mask, dropout_p=inputs.dropout, is_causal=fast_causal, scale=inputs.scale
        )
    return out, None


def sound_kernels(mask: Tensor | None) -> AbstractContextManager:
    """Return a context in which SDPA chooses only among kernels that compute correctly with this mask."""
    return nullcontext() if mask is None or not mask.is_cuda else sdpa_kernel(_WITH_MASK)


def _mask(inputs: AttentionInputs) -> tuple[Tensor | None, bool]:
    """Return SDPA's arguments attn_mask, (B|1, H|1, T, S) or None, and is_causal."""
    positions = inputs.positions
    products = GatheredProducts(inputs)
    bias = total(static_logits(term, products) for term in inputs.terms if term.adds_to_logits)
    square = positions.query_start == 0 and positions.tgt_len == positions.src_len
    masks = (inputs.key_padding, inputs.window, inputs.documents)
    if bias is None and all(m is None for m in masks) and inputs.causal and square:
        return None, positions.tgt_len > 1
    excluded = inputs.excluded()
    if bias is None:
        return (None if excluded is None else ~excluded), False
    if inputs.q.is_cuda:  # its kernels require a mask of q's type; on a CPU the bias stays unrounded
        bias = bias.to(inputs.q.dtype)
    if excluded is not None:
        bias = bias.masked_fill(excluded, float("-inf"))
    return bias.expand(-1, -1, positions.tgt_len, positions.src_len), False
