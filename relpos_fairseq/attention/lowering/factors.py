"""Logits that are products of two factors, f_i.g_j: TUPE's, Chen's, and segment pairs'."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.relations import Segments
from relpos_fairseq.terms import PositionTerms

Factors = tuple[Tensor, Tensor]  # (B|1, H|1, T, r) of queries, (B|1, H|1, S, r) of keys


def is_segments(term: PositionTerms) -> bool:
    """Return whether a term's scalars belong to pairs of segments: factors of rank `count`."""
    return isinstance(term.relation, Segments) and term.static is not None


def rank_of(term: PositionTerms) -> int:
    """Return the rank r of a term's factors, 0 without any."""
    rank = 0 if term.static_factors is None else term.static_factors[0].size(-1)
    return rank + (term.relation.count if is_segments(term) else 0)


def factors_of(term: PositionTerms, inputs: AttentionInputs, dtype: torch.dtype) -> list[Factors]:
    """Return a term's pairs of factors, those of pairs of segments among them."""
    pairs = [] if term.static_factors is None else [term.static_factors]
    if is_segments(term):
        pairs.append(_segment_factors(term, inputs))
    return [(of_queries.to(dtype), of_keys.to(dtype)) for of_queries, of_keys in pairs]


def side_by_side(one: Tensor, other: Tensor) -> Tensor:
    """Concatenate factors (B|1, H|1, L, r) and (B|1, H|1, L, r') to (B|1, H|1, L, r + r')."""
    common = torch.broadcast_shapes(one.shape[:2], other.shape[:2])
    return torch.cat([part.expand(*common, -1, -1) for part in (one, other)], dim=-1)


def _segment_factors(term: PositionTerms, inputs: AttentionInputs) -> Factors:
    """Split a table of segment pairs (H|1, n^2): rows for queries, unit vectors for keys."""
    positions, count = inputs.positions, term.relation.count
    of_key = functional.one_hot(positions.segments, count).to(inputs.exact)  # (B, S, n)
    of_query = positions.of_queries(of_key)  # (B, T, n)
    table = term.static.to(inputs.exact).view(1, -1, count, count)
    return of_query[:, None] @ table, of_key[:, None]
