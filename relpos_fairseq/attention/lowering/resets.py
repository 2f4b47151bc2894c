"""A reset: the position logits of the first token's row and column are two numbers a head.

A kernel sums what terms add by kind (vectors, scalars, factors) and replaces whole kinds.  Where
one term of a kind is reset and another is not, the kind is replaced for both, and what the other
one adds in that row and that column comes back as factors of rank 2:

    f_i.g_j = [i is first] row_j + [i is not first] column_i [j is first]
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering.factors import Factors, is_segments
from relpos_fairseq.terms import PositionTerms

OF_VECTORS, OF_SCALARS, OF_FACTORS = 1, 2, 4  # kinds of what terms add to the logits, as bits
NOTHING = 8  # the reset's numbers are added, and no kind is replaced


def folds_offset(inputs: AttentionInputs) -> bool:
    """Return whether u in u.k may be added to the content's query: nothing comes between them."""
    multiplied = any(term.gate is not None or term.product or term.trilinear is not None for term in inputs.terms)
    return not multiplied and not inputs.rotated


def kinds_of(term: PositionTerms) -> int:
    """Return the bits of what a term adds, where v.a_r of a query_offset v is a scalar."""
    vectors = not term.product and (term.query_vectors is not None or term.key_vectors is not None)
    factors = term.static_factors is not None or is_segments(term) or term.decay is not None
    scalars = term.static is not None and not is_segments(term) or term.query_offset is not None
    return OF_VECTORS * vectors + OF_SCALARS * scalars + OF_FACTORS * factors


class Resets:
    """The resets of a call as one.

    Args:
        inputs: a call of which at least one term is reset.
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        """Find which kinds are replaced."""
        self.inputs = inputs
        self.held = [t for t in inputs.terms if t.reset is not None and kinds_of(t)]
        replaced = free = 0
        for term in inputs.terms:
            if term.reset is None:
                free |= kinds_of(term)
            else:
                replaced |= kinds_of(term)
        if not folds_offset(inputs) and any(t.content_offset is not None for t in inputs.terms):
            free |= OF_VECTORS  # u goes into the table of key_vectors
        shared = replaced & free
        self.mixes_tables = bool(shared & ~OF_FACTORS)
        if self.mixes_tables:
            replaced |= OF_VECTORS | OF_SCALARS
        # Factors that come back, or are not reset, share one product with those that are.
        self.clears_factors = bool(replaced & OF_FACTORS and shared)
        if self.clears_factors:
            replaced &= ~OF_FACTORS
        self.kinds = replaced or (NOTHING if self.held else 0)
        self.first = next((term.reset.first for term in self.held), None)  # (B|1,)

    def numbers(self) -> Tensor:
        """Return the logits of row and column, summed over terms: (H|1, 2)."""
        total = None
        for term in self.held:
            both = torch.broadcast_tensors(term.reset.row, term.reset.column)
            logits = torch.stack(both, dim=-1).to(self.inputs.exact)
            total = logits if total is None else total + logits
        return total

    def cleared(self, factors: Factors) -> Factors:
        """Return factors whose product is 0 in the first token's row and column."""
        of_queries, of_keys = factors
        positions = self.inputs.positions
        other = (~self._is_first()).to(of_queries.dtype)  # (B|1, S)
        return (of_queries * positions.of_queries(other)[:, None, :, None], of_keys * other[:, None, :, None])

    def kept(self, dtype: torch.dtype) -> Factors:
        """Return the factors that bring back what terms without a reset add."""
        inputs = self.inputs
        of_key = self._is_first()[:, None].to(inputs.exact)  # (B|1, 1, S)
        of_query = inputs.positions.of_queries(of_key.transpose(1, 2)).transpose(1, 2)
        row, column = self._row_and_column()  # (B|1, H|1, S) and (B|1, H|1, T)
        of_queries = torch.stack(torch.broadcast_tensors(of_query, (1 - of_query) * column), -1)
        of_keys = torch.stack(torch.broadcast_tensors(row, of_key), -1)
        return of_queries.to(dtype), of_keys.to(dtype)

    def _is_first(self) -> Tensor:
        """Return (B|1, S), True at the first token."""
        positions = self.inputs.positions
        slots = torch.arange(positions.src_len, device=positions.device)
        return slots == self.first[:, None]

    def _row_and_column(self) -> tuple[Tensor, Tensor]:
        """Return what terms without a reset add for (first, j) and for (i, first)."""
        inputs, positions, first = self.inputs, self.inputs.positions, self.first[:, None]
        slots = torch.arange(positions.src_len, device=positions.device)
        queries = slots[positions.query_start : positions.query_stop]
        q, k, _, _ = inputs.exact_pairs()
        first_q = _at(q, self.first - positions.query_start)  # (B, H, 1, D)
        first_k = _at(k, self.first)
        row = self._added(first_q, k, slots - first)
        column = self._added(q, first_k, first - queries)
        return row, column

    def _added(self, q: Tensor, k: Tensor, distance: Tensor) -> Tensor:
        """Return the logits of pairs of a query and a key.

        Args:
            q: (B, H, L, D) queries, or one.
            k: (B, H, L, D) keys, or one.
            distance: (B|1, L) of each pair.
        """
        inputs, exact, scale = self.inputs, self.inputs.exact, self.inputs.scale
        total = q.new_zeros(1, 1, distance.size(-1))
        for term in inputs.terms:
            if term.content_offset is not None and not folds_offset(inputs):
                total = total + scale * (term.content_offset.to(exact)[None, :, None] * k).sum(-1)
            if term.reset is not None or term.relation is None or is_segments(term):
                continue
            read = _reader(term, distance, exact)
            if term.query_vectors is not None and not term.product:
                query = q
                if term.query_offset is not None:
                    query = q + term.query_offset.to(exact)[None, :, None]
                total = total + scale * (query * read("query_vectors")).sum(-1)
            if term.key_vectors is not None and not term.product:
                total = total + scale * (k * read("key_vectors")).sum(-1)
            if term.static is not None:
                total = total + read("static")
        return total


def _reader(term: PositionTerms, distance: Tensor, dtype: torch.dtype) -> Callable[[str], Tensor]:
    """Return what reads a term's table (H|1, R, ...) by distances (B|1, L): (B|1, H|1, L, ...)."""
    ids = term.relation.of_distance(distance)
    return lambda name: getattr(term, name).to(dtype)[:, ids].transpose(0, 1)


def _at(x: Tensor, place: Tensor) -> Tensor:
    """Return row place[b] (B|1,) of each x[b] of (B, H, L, D), an end's where there is none."""
    index = place.clamp(0, x.size(2) - 1).expand(x.size(0))
    return x[torch.arange(x.size(0), device=x.device), :, index][:, :, None]
