"""Terms over relations as what the kernels take: a band of distances between two constant tails.

Everything that a scheme has is formed here under autograd; nothing here has a size of T x S.

    content  q.k, or in a band `replaced`, with other queries right of it
    factor   gate_d * pq[i, d] pk[j, d]
    added    scale (aq[i, d] + ak[j, d]) + static_d + f_i . g_j, or the reset's logits
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowered import (
    SCALARS,
    VECTORS,
    add_factors,
    add_scalars,
    factors_of,
    folds_offset,
    is_segments,
    reset_bits,
)
from relpos_fairseq.attention.windows import Reach, Window, meet, over_window
from relpos_fairseq.relations import DistanceRelation
from relpos_fairseq.terms import PositionTerms

NARROW = 256  # distances up to which products with each vector are kept


@dataclass
class Lowered:
    """A call as the kernels take it; tensors by the names of the module's formula.

    Args:
        reach: distances of visible pairs.
        vectors: window of tables of vectors.
        scalars: window of tables of scalars.
        tensors: q, k (B, H, T|S, D) and v; `right` as q; aq, pq (B, H, T, W); ak, pk (B, H, S, W);
            vq, vk as q, k, with rq, rk (H|1, L, D), the vectors that they meet, of all of `reach`;
            band (B, H, T, W); static, gate (H|1, W'); f, g (B|1, H|1, T|S, r); theta (H|1, 2).
        value_vectors: (H|1, W, D) that meet the band's probabilities, or None.
        first: (B|1,) slot of the reset's first token, or None.
        reset: bits 1, 2, 4: the reset replaces what vectors, scalars, factors add.
    """

    reach: Reach
    vectors: Window
    scalars: Window
    tensors: dict[str, Tensor] = field(default_factory=dict)
    value_vectors: Tensor | None = None
    first: Tensor | None = None
    reset: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add to a tensor that may not be there yet."""
        self.tensors[name] = self.tensors[name] + tensor if name in self.tensors else tensor


def is_wide(term: PositionTerms, reach: Reach) -> bool:
    """Whether the vectors that a term adds are for so many distances that kernels form products."""
    if term.product or (term.query_vectors is None and term.key_vectors is None):
        return False
    highest = min(term.relation.highest, reach.highest)
    return highest - max(term.relation.lowest, reach.lowest) >= NARROW


def windows_of(inputs: AttentionInputs) -> tuple[Reach, Window, Window]:
    """Visible distances, and the windows of vectors and of scalars."""
    reach = Reach.of(inputs)
    by_kind: dict[tuple[str, ...], list[DistanceRelation]] = {VECTORS: [], SCALARS: []}
    for term in inputs.terms:
        for fields, relations in by_kind.items():
            if fields is VECTORS and not is_segments(term) and is_wide(term, reach):
                fields = ("trilinear", "value_vectors")
            if is_segments(term) or all(getattr(term, name) is None for name in fields):
                continue
            relations.append(term.relation)
    return reach, Window.over(by_kind[VECTORS], reach), Window.over(by_kind[SCALARS], reach)


def lower(inputs: AttentionInputs) -> Lowered:
    """Lower a call that `refusal` does not refuse."""
    reach, vectors, scalars = windows_of(inputs)
    low = Lowered(reach, vectors, scalars)
    q = inputs.content_q if inputs.rotated else inputs.q
    low.tensors["k"] = inputs.content_k if inputs.rotated else inputs.k
    low.tensors["v"] = inputs.v
    if folds_offset(inputs):
        for term in inputs.terms:
            if term.content_offset is not None:
                q = _plus(q, term.content_offset)
    low.tensors["q"] = q
    for term in inputs.terms:
        _add_vectors(low, term, inputs)
        add_scalars(low.tensors, term, inputs, low.scalars)
        for factors in factors_of(term, inputs, inputs.q.dtype):
            add_factors(low.tensors, *factors)
        _add_reset(low, term)
    return low


def _plus(x: Tensor, offset: Tensor) -> Tensor:
    """X (B, H, L, D) plus an offset (H|1, D), added in at least fp32."""
    exact = torch.promote_types(x.dtype, torch.float32)
    return (x.to(exact) + offset.to(exact)[None, :, None]).to(x.dtype)


def _add_vectors(low: Lowered, term: PositionTerms, inputs: AttentionInputs) -> None:
    q, k, exact = inputs.q, inputs.k, inputs.exact

    def table(name: str, dtype: torch.dtype) -> Tensor:
        windowed = over_window(getattr(term, name), term.relation, low.vectors, inputs.positions)
        return windowed.to(dtype)

    if term.product:
        # A product of three passes what half precision holds.
        low.tensors["pq"] = meet(q.to(exact), table("query_vectors", exact))
        low.tensors["pk"] = meet(k.to(exact), table("key_vectors", exact))
    elif is_wide(term, low.reach):
        _add_wide(low, term, inputs)
    else:
        if term.query_vectors is not None:
            query = q if term.query_offset is None else _plus(q, term.query_offset)
            low.add("aq", meet(query, table("query_vectors", q.dtype)))
        if term.key_vectors is not None:
            low.add("ak", meet(k, table("key_vectors", k.dtype)))
    if term.content_offset is not None and not folds_offset(inputs):
        offset = meet(k, term.content_offset[:, None].to(k.dtype))
        low.add("ak", offset.expand(-1, -1, -1, low.vectors.width))
    if term.trilinear is not None:
        _replace_content(low, table("trilinear", exact), inputs)
    if term.value_vectors is not None:
        vectors = table("value_vectors", inputs.v.dtype)
        low.value_vectors = vectors if low.value_vectors is None else low.value_vectors + vectors


def _add_wide(low: Lowered, term: PositionTerms, inputs: AttentionInputs) -> None:
    """Vectors for every visible distance, and who meets them."""
    window = Window(low.reach.lowest, low.reach.highest)
    for side, x in (("q", inputs.q), ("k", inputs.k)):
        vectors = term.query_vectors if side == "q" else term.key_vectors
        if vectors is None:
            continue
        if side == "q" and term.query_offset is not None:
            x = _plus(x, term.query_offset)
        low.tensors[f"v{side}"] = x
        table = over_window(vectors, term.relation, window, inputs.positions)
        low.add(f"r{side}", table.to(x.dtype))


def _replace_content(low: Lowered, weights: Tensor, inputs: AttentionInputs) -> None:
    """sum_c q_c k_c w_c of the band; tails are products with a query that has their w in it."""
    # Triton is imported where something is evaluated, not where it is refused.
    from relpos_fairseq.attention.triton.trilinear import trilinear_band

    q, k = low.tensors["q"], low.tensors["k"]
    rows, window = q.size(2), low.vectors
    first = inputs.positions.query_start + window.low + rows - 1
    band = trilinear_band(q.to(inputs.exact), k.to(inputs.exact), weights, first)
    low.tensors["band"] = band
    exact = q.to(inputs.exact)
    low.tensors["q"] = (exact * weights[:, :1]).to(q.dtype)
    low.tensors["right"] = (exact * weights[:, -1:]).to(q.dtype)


def _add_reset(low: Lowered, term: PositionTerms) -> None:
    if term.reset is None:
        return
    exact = torch.promote_types(term.reset.row.dtype, torch.float32)
    theta = torch.stack(torch.broadcast_tensors(term.reset.row, term.reset.column), dim=-1)
    low.add("theta", theta.to(exact))
    low.first = term.reset.first
    low.reset |= reset_bits(term)
