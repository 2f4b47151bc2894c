"""Calls of attention for the schemes of a layer: as layers make them, and small ones by which schemes are examined."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from relpos_fairseq.attention import AttentionInputs
from relpos_fairseq.core.config import PositionConfig, resolve
from relpos_fairseq.core.placement import Placement, PositionContext, SchemeStack
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.scheme import AttentionShape
from relpos_fairseq.core.terms import PositionTerms
from relpos_fairseq.schemes import scheme_class


def layer_terms(
    layer: SchemeStack, context: PositionContext, source: Tensor, padding: Tensor | None
) -> tuple[PositionTerms, ...]:
    """Return the terms that layers share and the layer's own, computed anew; `source` (S, B, E) is its input."""
    return context.shared + layer.evaluate(context.positions).terms + layer.gated(source, padding)


def rotated(inputs: AttentionInputs, context: PositionContext) -> AttentionInputs:
    """Return the inputs with q and k transformed for the content, where a scheme rotates them."""
    if context.rotation is None:
        return inputs
    scheme, prepared = context.rotation
    positions, q, k = context.positions, inputs.q, inputs.k
    first_key = positions.src_len - k.size(2)  # memory, or in decoding the new tokens alone
    q = scheme.transform_query(q, prepared, positions.query_start)
    k = scheme.transform_key(k, prepared, first_key)
    if any(term.uses_unrotated_qk for term in inputs.terms):
        return replace(inputs, content_q=q, content_k=k)
    return replace(inputs, q=q, k=k)  # no term uses them before rotation


def layer_call(
    placement: Placement, layer: SchemeStack, context: PositionContext, q: Tensor, k: Tensor, v: Tensor, source: Tensor
) -> AttentionInputs:
    """Return the attention of a layer's heads (B, H, T, D); `source` (S, B, E) is its input, without padding."""
    terms, plan = layer_terms(layer, context, source, None), placement.plan
    return rotated(AttentionInputs(q, k, v, terms, context.positions, plan.scale, plan.shape.causal), context)


def small_call(
    name: str, causal: bool = False, tokens: int = 4, heads: int = 2, dim: int = 4, device: str = "cpu"
) -> AttentionInputs:
    """Return a call of zeros with a scheme's terms, which shows what it consists of and which backend takes it."""
    causal = causal or any(scheme_class(part).causal_only for part in name.split("+"))
    shape = AttentionShape(embed_dim=heads * dim, num_heads=heads, max_positions=max(tokens, 2), causal=causal)
    placement = Placement(resolve(PositionConfig(position_scheme=name), shape, "translation"))
    layer = placement.layer_schemes(0)
    for module in (placement, layer):
        module.to(device)
    context = placement.context(Positions(tokens, tokens, device=torch.device(device)))
    q, k, v = (torch.zeros(1, heads, tokens, dim, device=device, requires_grad=True) for _ in "qkv")
    return layer_call(placement, layer, context, q, k, v, torch.zeros(tokens, 1, heads * dim, device=device))
