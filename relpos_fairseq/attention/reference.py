"""The eager reference: the terms' formula with one gather a table.  The specification.

It holds (T, S) matrices a head, and (T, S, D) for a trilinear term; every other backend must equal
it in values and gradients.
"""

from __future__ import annotations

from torch import Tensor

from relpos_fairseq.attention.inputs import (
    AttentionInputs,
    apply_reset,
    drop,
    probabilities,
    total,
)
from relpos_fairseq.terms import PositionTerms

name = "reference"


def refusal(inputs: AttentionInputs) -> str | None:
    """Nothing is refused."""
    return None


def attend(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, Dv) and probabilities (B, H, T, S) after dropout."""
    excluded = inputs.excluded()
    probs = probabilities(logits(inputs), excluded, inputs.key_padding is not None)
    probs = drop(probs, inputs.dropout)
    out = probs @ inputs.v.to(inputs.exact)
    for term in inputs.terms:
        if term.value_vectors is not None:
            buckets = _sum_by_id(probs, term.relation.ids(inputs.positions), term.relation.size)
            out = out + buckets @ term.value_vectors.to(inputs.exact)
    return out.to(inputs.v.dtype), probs


def logits(inputs: AttentionInputs) -> Tensor:
    """(B, H, T, S) logits before masking."""
    q, k, content_q, content_k = inputs.exact_pairs()
    ids = [
        None if term.relation is None else term.relation.ids(inputs.positions)
        for term in inputs.terms
    ]
    pairs = list(zip(inputs.terms, ids, strict=True))
    result = _content(content_q * inputs.scale, content_k, pairs)
    for term, index in pairs:
        if term.gate is not None:
            result = result * _by_pair(term.gate.to(q.dtype), index)
        if term.product:
            result = result * _query_product(q, term.query_vectors, index)
            result = result * _key_product(k, term.key_vectors, index)
    for term, index in pairs:
        if term.content_offset is not None:
            offset = term.content_offset.to(q.dtype)[None, :, None] * inputs.scale
            result = result + offset @ k.transpose(-1, -2)
        added = _added(term, index, q, k, inputs.scale)
        if added is not None and term.reset is not None:
            added = apply_reset(added, term.reset, inputs.positions)
        if added is not None:
            result = result + added
    return result


def _content(q: Tensor, k: Tensor, pairs: list[tuple[PositionTerms, Tensor | None]]) -> Tensor:
    for term, index in pairs:
        if term.trilinear is not None:
            weights = _by_pair(term.trilinear.to(q.dtype), index)  # (B|1, H|1, T, S, D)
            return (q[:, :, :, None] * k[:, :, None] * weights).sum(-1)
    return q @ k.transpose(-1, -2)


def _added(
    term: PositionTerms, index: Tensor | None, q: Tensor, k: Tensor, scale: float
) -> Tensor | None:
    """What the term adds, with the scale applied: (B|1, H|1, T, S)."""

    def parts():
        if term.query_vectors is not None and not term.product:
            query = q
            if term.query_offset is not None:
                query = q + term.query_offset.to(q.dtype)[None, :, None]
            yield _query_product(query * scale, term.query_vectors, index)
        if term.key_vectors is not None and not term.product:
            yield _key_product(k * scale, term.key_vectors, index)
        if term.static is not None:
            yield _by_pair(term.static.to(q.dtype), index)
        if term.static_factors is not None:
            query, key = (factor.to(q.dtype) for factor in term.static_factors)
            yield query @ key.transpose(-1, -2)

    return total(parts())


def _by_pair(table: Tensor, index: Tensor) -> Tensor:
    """(H|1, R, ...) read by (B|1, T, S) ids: (B|1, H|1, T, S, ...)."""
    return table[:, index].transpose(0, 1)


def _query_product(q: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """q_i.a_r: (B, H, T, S)."""
    products = q @ table.to(q.dtype).transpose(-1, -2)  # (B, H, T, R)
    return products.gather(-1, index[:, None].expand(*products.shape[:3], -1))


def _key_product(k: Tensor, table: Tensor, index: Tensor) -> Tensor:
    """k_j.b_r: (B, H, T, S)."""
    products = table.to(k.dtype) @ k.transpose(-1, -2)  # (B, H, R, S)
    return products.gather(-2, index[:, None].expand(*products.shape[:2], -1, -1))


def _sum_by_id(probs: Tensor, index: Tensor, size: int) -> Tensor:
    """Probabilities summed over the keys of each id: (B, H, T, R)."""
    buckets = probs.new_zeros(*probs.shape[:3], size)
    return buckets.scatter_add(-1, index[:, None].expand_as(probs), probs)
