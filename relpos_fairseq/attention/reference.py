"""The formula of the logits, and its eager evaluation: the specification of all backends.

    content = scale q.k                     or scale sum_c q_c k_c w_r,c of a trilinear term
    logits  = content * gate_r (q.a_r)(k.b_r)   of terms that multiply
            + scale (q.a_r + k.b_r + u.k + v.a_r) + static_r + f_i.g_j + dense_bias + decay

`logits` is this formula.  `GatheredProducts` reads each table for pairs of a query and a key by one gather: it holds
(T, S) matrices a head, and (T, S, D) for a trilinear term.  A backend that reads tables in other ways derives from it.
Every other backend must equal `attend` of this file in values and gradients.  See `relpos_fairseq.core.terms` for the
fields of terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs, drop, probabilities, required
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.terms import Decay, PositionTerms, Reset

name = "reference"


# ------------------------------------------------------------------------------------------- The formula


def attention_of(
    products: GatheredProducts, dropping: Callable[[Tensor], Tensor] = lambda probs: probs
) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, T, Dv) in at least fp32, and the probabilities (B, H, T, S) as `dropping` makes them."""
    inputs = products.inputs
    probs = dropping(probabilities(logits(products), inputs.excluded(), inputs.key_padding is not None))
    out = probs @ inputs.v.to(inputs.exact)
    for term in inputs.terms:
        if term.value_vectors is not None:
            out = out + products.values(probs, term)
    return out, probs


def logits(products: GatheredProducts) -> Tensor:
    """Return the logits (B, H, T, S) before masking, in at least fp32."""
    inputs = products.inputs
    q, k, content_q, content_k = inputs.exact_pairs()
    result = products.content(content_q * inputs.scale, content_k)
    for term in inputs.terms:
        if term.gate is not None:
            result = result * products.scalars(term.gate, term)
        if term.product:
            result = result * products.query(q, term)
            result = result * products.key(k, term)
    content = result
    for term in inputs.terms:
        for part in _added(term, q, k, products):
            result = result + part
        if term.contextual is not None:
            result = result + products.contextual(content, q * inputs.scale, term.contextual)
    for term in inputs.terms:
        if term.mixing is not None:
            result = result + term.mixing.of(content, None if result is content else result - content)
    return result


def _added(term: PositionTerms, q: Tensor, k: Tensor, products: GatheredProducts) -> Iterator[Tensor]:
    """Yield the logits that a term adds: u.k, and its position logits after its reset."""
    inputs = products.inputs
    if term.content_offset is not None:
        scaled = term.content_offset.to(q.dtype)[None, :, None] * inputs.scale  # (1, H|1, 1, D)
        yield scaled @ k.transpose(-1, -2)
    positions = total(_position_logits(term, q, k, products))
    if positions is not None:
        yield (positions if term.reset is None else apply_reset(positions, term.reset, inputs.positions))


def _position_logits(term: PositionTerms, q: Tensor, k: Tensor, products: GatheredProducts) -> Iterator[Tensor]:
    """Yield the position logits that a term adds, one part for each of its tables."""
    scale, exact = products.inputs.scale, products.inputs.exact
    if term.query_vectors is not None and not term.product:
        query = q
        if term.query_offset is not None:
            query = q + term.query_offset.to(q.dtype)[None, :, None]
        yield products.query(query * scale, term)
    if term.key_vectors is not None and not term.product:
        yield products.key(k * scale, term)
    if term.static is not None:
        yield products.scalars(term.static, term)
    if term.dense_bias is not None:
        yield term.dense_bias.of(products.inputs.positions).to(exact)
    if term.static_factors is not None:
        query, key = (factor.to(exact) for factor in term.static_factors)
        yield query @ key.transpose(-1, -2)
    if term.decay is not None:
        yield decay_logits(term.decay.mapped(lambda x: x.to(exact)), products.inputs.positions)


def decay_logits(decay: Decay, positions: Positions) -> Tensor:
    """Return the sum of log gates between each query and key, weighted by the query: (B, H|1, T, S)."""

    def between(sums: Tensor) -> Tensor:
        return positions.query_rows(sums, axis=2)[..., None] - sums[:, :, None]

    added = between(decay.past)
    if positions.highest_distance > 0:
        later = 0.0 if decay.future is None else -between(decay.future)
        added = torch.where(positions.distance() > 0, later, added)
    return added if decay.weight is None else added * positions.query_rows(decay.weight, axis=2)[..., None]


def static_logits(term: PositionTerms, products: GatheredProducts) -> Tensor:
    """Return the position logits of a term that needs neither q nor k."""
    return required(total(_added(term, products.inputs.q, products.inputs.k, products)))


def apply_reset(added: Tensor, reset: Reset, positions: Positions) -> Tensor:
    """Replace the first token's row and column of what a term adds, (B|1, H|1, T, S), by the reset's two logits."""
    slot = torch.arange(positions.src_len, device=positions.device)
    first = reset.first[:, None]
    row = (slot[positions.query_start : positions.query_stop] == first)[:, None, :, None]
    column = (slot == first)[:, None, None, :] & ~row
    theta_row, theta_column = (theta.to(added.dtype)[None, :, None, None] for theta in (reset.row, reset.column))
    added = torch.where(row, theta_row, added)
    return torch.where(column, theta_column, added)


def total(parts: Iterator[Tensor]) -> Tensor | None:
    """Return the sum of the parts, or None without any."""
    result = None
    for part in parts:
        result = part if result is None else result + part
    return result


# ----------------------------------------------------------------------------------------- The reference


def refusal(inputs: AttentionInputs) -> str | None:
    """Return None: nothing is refused."""
    return None


def attend(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, T, Dv) and the probabilities (B, H, T, S) after dropout."""
    out, probs = attention_of(GatheredProducts(inputs), lambda probs: drop(probs, inputs.dropout))
    return out.to(inputs.v.dtype), probs


class GatheredProducts:
    """Multiply queries and keys with tables for all pairs, (B|1, H|1, T, S), by one gather each at the pairs' ids.

    Args:
        inputs: the call.
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        self.inputs = inputs

    def _ids(self, term: PositionTerms) -> Tensor:
        """Return the ids (B|1, T, S) of the term's relation, computed once for all layers and tables."""
        relation, positions = required(term.relation), self.inputs.positions
        return positions.once(("ids", relation), lambda: relation.ids(positions))

    def content(self, q: Tensor, k: Tensor) -> Tensor:
        """Return q.k, or the trilinear term that replaces it; q is scaled."""
        for term in self.inputs.terms:
            if term.trilinear is not None:
                return self.trilinear(q, k, term)
        return q @ k.transpose(-1, -2)

    def trilinear(self, q: Tensor, k: Tensor, term: PositionTerms) -> Tensor:
        """Return sum_c q_c k_c w_rc, which takes a (T, S, D) tensor for each head."""
        weights = self.scalars(required(term.trilinear), term)  # (B|1, H|1, T, S, D)
        return (q[:, :, :, None] * k[:, :, None] * weights).sum(-1)

    def scalars(self, table: Tensor, term: PositionTerms) -> Tensor:
        """Return the entries of a table (H|1, R, ...) for every pair: (B|1, H|1, T, S, ...)."""
        return table.to(self.inputs.exact)[:, self._ids(term)].transpose(0, 1)

    def query(self, q: Tensor, term: PositionTerms) -> Tensor:
        """Return q_i.a_r: multiply each query with all rows of the table, then gather the products of the pairs."""
        products = q @ required(term.query_vectors).to(q.dtype).transpose(-1, -2)  # (B, H, T, R)
        return products.gather(-1, self._ids(term)[:, None].expand(*products.shape[:3], -1))

    def key(self, k: Tensor, term: PositionTerms) -> Tensor:
        """Return k_j.b_r: multiply each key with all rows of the table, then gather the products of the pairs."""
        products = required(term.key_vectors).to(k.dtype) @ k.transpose(-1, -2)  # (B, H, R, S)
        return products.gather(-2, self._ids(term)[:, None].expand(*products.shape[:2], -1, -1))

    def contextual(self, content: Tensor, q: Tensor, table: Tensor) -> Tensor:
        """Return q_i.e_p of a table (H|1, n, D), p a sum of gates; interpolated linearly between whole numbers."""
        gates, excluded = content.sigmoid(), self.inputs.excluded()
        if excluded is not None:
            gates = gates.masked_fill(excluded, 0.0)
        place = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=table.size(1) - 1)  # (B, H, T, S)
        low, high = place.detach().floor().long(), place.detach().ceil().long()
        products = q @ table.to(q.dtype).transpose(-1, -2)  # (B, H, T, n)
        below, above = products.gather(-1, low), products.gather(-1, high)
        return below + (place - low) * (above - below)

    def values(self, probs: Tensor, term: PositionTerms) -> Tensor:
        """Return value vectors weighted by probabilities (B, H, T, S): (B, H, T, Dv)."""
        buckets = probs.new_zeros(*probs.shape[:3], required(term.relation).size)
        buckets = buckets.scatter_add(-1, self._ids(term)[:, None].expand_as(probs), probs)  # (B, H, T, R)
        return buckets @ required(term.value_vectors).to(self.inputs.exact)
