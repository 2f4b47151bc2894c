"""Logits that are products of two factors, f_i.g_j: TUPE's, Chen's, segment pairs', and decays.

A causal decay past_i - past_j is (past_i, 1) . (1, -past_j).  In half precision its sums are split
into parts whose total is as exact as single precision: a product with 1 rounds nothing, and kernels
add in single precision.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.relations import Segments
from relpos_fairseq.terms import PositionTerms

HALF_PARTS = 3  # of 8 bits or more, for the 24 of single precision
Factors = tuple[Tensor, Tensor]  # (B|1, H|1, T, r) of queries, (B|1, H|1, S, r) of keys


def is_segments(term: PositionTerms) -> bool:
    """Return whether a term's scalars belong to pairs of segments: factors of rank `count`."""
    return isinstance(term.relation, Segments) and term.static is not None


def rank_of(term: PositionTerms, dtype: torch.dtype) -> int:
    """Return the rank r of a term's factors in a type, 0 without any."""
    rank = 0 if term.static_factors is None else term.static_factors[0].size(-1)
    if term.decay is not None:
        rank += 2 * _parts(dtype)
    return rank + (term.relation.count if is_segments(term) else 0)


def factors_of(term: PositionTerms, inputs: AttentionInputs, dtype: torch.dtype) -> list[Factors]:
    """Return a term's pairs of factors, those of pairs of segments among them."""
    pairs = [] if term.static_factors is None else [term.static_factors]
    if is_segments(term):
        pairs.append(_segment_factors(term, inputs))
    if term.decay is not None:
        pairs.append(_decay_factors(term.decay.past, inputs, dtype))
    return [(of_queries.to(dtype), of_keys.to(dtype)) for of_queries, of_keys in pairs]


def side_by_side(one: Tensor, other: Tensor) -> Tensor:
    """Concatenate factors (B|1, H|1, L, r) and (B|1, H|1, L, r') to (B|1, H|1, L, r + r')."""
    common = torch.broadcast_shapes(one.shape[:2], other.shape[:2])
    return torch.cat([part.expand(*common, -1, -1) for part in (one, other)], dim=-1)


def _parts(dtype: torch.dtype) -> int:
    """Return how many numbers of a type hold a sum of log gates."""
    return HALF_PARTS if dtype.itemsize < 4 else 1


def _decay_factors(sums: Tensor, inputs: AttentionInputs, dtype: torch.dtype) -> Factors:
    """Split sums of log gates (B, H|1, S) of a causal call: factors of rank 2 or 6."""
    parts, rest = [], sums
    for _ in range(_parts(dtype)):
        parts.append(rest.to(dtype))
        rest = (rest - parts[-1]).detach()  # the first part has the gradient
    of_key = torch.stack(parts, dim=-1)  # (B, H|1, S, n)
    one = torch.ones_like(of_key)
    of_query = inputs.positions.of_queries(of_key, axis=2)
    of_query = torch.cat([of_query, inputs.positions.of_queries(one, axis=2)], dim=-1)
    return of_query, torch.cat([one, -of_key], dim=-1)


def _segment_factors(term: PositionTerms, inputs: AttentionInputs) -> Factors:
    """Split a table of segment pairs (H|1, n^2): rows for queries, unit vectors for keys."""
    positions, count = inputs.positions, term.relation.count
    of_key = functional.one_hot(positions.segments, count).to(inputs.exact)  # (B, S, n)
    of_query = positions.of_queries(of_key)  # (B, T, n)
    table = term.static.to(inputs.exact).view(1, -1, count, count)
    return of_query[:, None] @ table, of_key[:, None]
