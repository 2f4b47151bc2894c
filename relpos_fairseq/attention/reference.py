"""The eager reference: one gather a table.  The specification of the backends.

It holds (T, S) matrices a head, and (T, S, D) for a trilinear term; every other backend must equal
it in values and gradients.
"""

from __future__ import annotations

from torch import Tensor

from relpos_fairseq.attention.formula import Products, logits
from relpos_fairseq.attention.inputs import AttentionInputs, drop, probabilities
from relpos_fairseq.positions import Positions
from relpos_fairseq.terms import PositionTerms

name = "reference"


def refusal(inputs: AttentionInputs) -> str | None:
    """Nothing is refused."""
    return None


def attend(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, T, Dv) and probabilities (B, H, T, S) after dropout."""
    excluded, products = inputs.excluded(), Gathered(inputs)
    probs = probabilities(logits(products), excluded, inputs.key_padding is not None)
    probs = drop(probs, inputs.dropout)
    out = probs @ inputs.v.to(inputs.exact)
    for term in inputs.terms:
        if term.value_vectors is not None:
            out = out + products.values(probs, term)
    return out.to(inputs.v.dtype), probs


def ids(term: PositionTerms, positions: Positions) -> Tensor:
    """(B|1, T, S) ids of the term's relation, once for all layers and tables that read by them."""
    relation = term.relation
    return positions.once(("ids", relation), lambda: relation.ids(positions))


class Gathered(Products):
    """Tables read by the ids of all pairs."""

    def content(self, q: Tensor, k: Tensor) -> Tensor:
        """q.k, or sum_c q_c k_c w_rc over a (T, S, D) tensor a head."""
        for term in self.inputs.terms:
            if term.trilinear is not None:
                weights = self.scalars(term.trilinear, term)  # (B|1, H|1, T, S, D)
                return (q[:, :, :, None] * k[:, :, None] * weights).sum(-1)
        return q @ k.transpose(-1, -2)

    def scalars(self, table: Tensor, term: PositionTerms) -> Tensor:
        """(H|1, R, ...) read for every pair: (B|1, H|1, T, S, ...)."""
        index = ids(term, self.inputs.positions)
        return table.to(self.inputs.exact)[:, index].transpose(0, 1)

    def query(self, q: Tensor, term: PositionTerms) -> Tensor:
        """q_i.a_r: all products with the table, then those of each pair."""
        products = q @ term.query_vectors.to(q.dtype).transpose(-1, -2)  # (B, H, T, R)
        index = ids(term, self.inputs.positions)
        return products.gather(-1, index[:, None].expand(*products.shape[:3], -1))

    def key(self, k: Tensor, term: PositionTerms) -> Tensor:
        """k_j.b_r: the same by key."""
        products = term.key_vectors.to(k.dtype) @ k.transpose(-1, -2)  # (B, H, R, S)
        index = ids(term, self.inputs.positions)
        return products.gather(-2, index[:, None].expand(*products.shape[:2], -1, -1))

    def contextual(self, content: Tensor, q: Tensor, table: Tensor) -> Tensor:
        """q_i.e_p, linear between the whole numbers beside p."""
        gates, excluded = content.sigmoid(), self.inputs.excluded()
        if excluded is not None:
            gates = gates.masked_fill(excluded, 0.0)
        place = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=table.size(1) - 1)  # (B, H, T, S)
        low, high = place.detach().floor().long(), place.detach().ceil().long()
        products = q @ table.to(q.dtype).transpose(-1, -2)  # (B, H, T, n)
        below, above = products.gather(-1, low), products.gather(-1, high)
        return below + (place - low) * (above - below)

    def values(self, probs: Tensor, term: PositionTerms) -> Tensor:
        """Value vectors weighed by probabilities (B, H, T, S): (B, H, T, Dv)."""
        buckets = _sum_by_id(probs, ids(term, self.inputs.positions), term.relation.size)
        return buckets @ term.value_vectors.to(self.inputs.exact)


def _sum_by_id(probs: Tensor, index: Tensor, size: int) -> Tensor:
    """Probabilities summed over the keys of each id: (B, H, T, R)."""
    buckets = probs.new_zeros(*probs.shape[:3], size)
    return buckets.scatter_add(-1, index[:, None].expand_as(probs), probs)
