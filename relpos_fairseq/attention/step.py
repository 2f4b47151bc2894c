"""One step of incremental decoding: a single query that stands on the last key.

All distances are -(S - 1)..0, and beyond a relation's lowest distance every key shares one row of
a table.  That tail folds into the query, so only the last few keys meet vectors of their own and
nothing is recomputed for all keys: O(S D) a step, as plain attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import (
    AttentionInputs,
    apply_reset,
    drop,
    probabilities,
    total,
)
from relpos_fairseq.terms import PositionTerms


def attend_step(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, 1, Dv) and probabilities (B, H, 1, S)."""
    excluded = None if inputs.key_padding is None else inputs.key_padding[:, None, None, :]
    probs = probabilities(_logits(inputs), excluded, excluded is not None)
    probs = drop(probs, inputs.dropout)
    out = probs @ inputs.v.to(inputs.exact)
    for term in inputs.terms:
        if term.value_vectors is not None:
            out = out + _value_part(probs, term, _Band(term, inputs))
    return out.to(inputs.v.dtype), probs


def tail_products(terms: tuple[PositionTerms, ...], k: Tensor) -> Tensor | None:
    """k.b_tail of each product term, which decoding caches: (B, H, S, P), or None without any."""
    exact = torch.promote_types(k.dtype, torch.float32)
    products = [
        k.to(exact) @ term.key_vectors[:, :1].to(exact).transpose(-1, -2)
        for term in terms
        if term.product
    ]
    return torch.cat(products, dim=-1) if products else None


class _Band:
    """The keys near the query whose distance has a row of its own, and the tail before them."""

    def __init__(self, term: PositionTerms, inputs: AttentionInputs) -> None:
        positions = inputs.positions
        self.keys = min(positions.src_len, max(1, -term.relation.lowest))
        self.tail_keys = positions.src_len - self.keys
        window = term.relation.window(1 - self.keys, 0, positions.device)
        self.window, self.exact = window, inputs.exact
        low = positions.lowest_distance
        self.tail_id = term.relation.window(low, low, positions.device)

    def rows(self, table: Tensor) -> Tensor:
        """(H|1, R, ...) for the band's keys: (H|1, n, ...)."""
        return table.index_select(1, self.window).to(self.exact)

    def tail(self, table: Tensor) -> Tensor:
        """(H|1, R, ...) for the tail: (H|1, 1, ...)."""
        return table.index_select(1, self.tail_id).to(self.exact)

    def scalars(self, table: Tensor) -> Tensor:
        """(H|1, R) for every key: (H|1, 1, S)."""
        near = self.rows(table)[:, None]
        far = self.tail(table)[:, None].expand(-1, 1, self.tail_keys)
        return torch.cat([far, near], dim=-1)

    def join(self, far: Tensor, near: Tensor) -> Tensor:
        """Tail values for all keys (B, H, 1, S | 1) and the band's (B, H, 1, n): (B, H, 1, S)."""
        if far.size(-1) == 1:
            far = far.expand(*far.shape[:-1], self.tail_keys)
        return torch.cat([far[..., : self.tail_keys], near], dim=-1)


def _logits(inputs: AttentionInputs) -> Tensor:
    """(B, H, 1, S) logits before masking."""
    q, k, content_q, content_k = inputs.exact_pairs()
    bands = [None if t.relation is None else _Band(t, inputs) for t in inputs.terms]
    pairs = list(zip(inputs.terms, bands, strict=True))
    folds = _may_fold(inputs)
    if folds:
        content_q = _fold(content_q, pairs)
    result = _content(content_q * inputs.scale, content_k, pairs)
    tails = iter(() if inputs.key_tails is None else inputs.key_tails.unbind(-1))
    for term, band in pairs:
        if term.gate is not None:
            result = result * band.scalars(term.gate)
        if term.product:
            result = result * _query_product(q, term, band)
            result = result * _key_product(k, term, band, next(tails, None))
    for term, band in pairs:
        if term.content_offset is not None and not folds:
            offset = term.content_offset.to(q.dtype)[None, :, None] * inputs.scale
            result = result + offset @ k.transpose(-1, -2)
        added = _added(term, band, q, k, inputs.scale, folds)
        if added is not None and term.reset is not None:
            added = apply_reset(added, term.reset, inputs.positions)
        if added is not None:
            result = result + added
    return result


def _may_fold(inputs: AttentionInputs) -> bool:
    """Whether k.b_tail and u.k may be had by adding b_tail and u to the content's query."""
    return not inputs.rotated and not any(
        term.product or term.gate is not None or term.trilinear is not None or term.reset
        for term in inputs.terms
    )


def _fold(q: Tensor, pairs: list[tuple[PositionTerms, _Band | None]]) -> Tensor:
    for term, band in pairs:
        if term.content_offset is not None:
            q = q + term.content_offset.to(q.dtype)[None, :, None]
        if term.key_vectors is not None:
            q = q + band.tail(term.key_vectors)
    return q


def _added(
    term: PositionTerms, band: _Band | None, q: Tensor, k: Tensor, scale: float, folds: bool
) -> Tensor | None:
    """What the term adds beside what was folded into the content's query."""

    def parts():
        if term.query_vectors is not None and not term.product:
            query = q
            if term.query_offset is not None:
                query = q + term.query_offset.to(q.dtype)[None, :, None]
            yield _query_product(query * scale, term, band)
        if term.key_vectors is not None and not term.product:
            if folds:
                yield _key_difference(k, term, band) * scale
            else:
                yield _key_product(k, term, band, None) * scale
        if term.static is not None:
            yield band.scalars(term.static)[None]
        if term.static_factors is not None:
            query, key = (factor.to(q.dtype) for factor in term.static_factors)
            yield query @ key.transpose(-1, -2)

    return total(parts())


def _query_product(q: Tensor, term: PositionTerms, band: _Band) -> Tensor:
    """q.a_r: (B, H, 1, S)."""
    near = q @ band.rows(term.query_vectors).transpose(-1, -2)
    far = q @ band.tail(term.query_vectors).transpose(-1, -2)
    return band.join(far, near)


def _key_product(k: Tensor, term: PositionTerms, band: _Band, cached: Tensor | None) -> Tensor:
    """k_j.b_r: the tail's products cached or with one vector, the band's keys with their own."""
    recent = k[:, :, band.tail_keys :]
    near = (recent * band.rows(term.key_vectors)).sum(-1)[:, :, None]
    if not band.tail_keys:
        return near
    if cached is not None:
        return band.join(cached[:, :, None], near)
    older = k[:, :, : band.tail_keys]
    return band.join(band.tail(term.key_vectors) @ older.transpose(-1, -2), near)


def _key_difference(k: Tensor, term: PositionTerms, band: _Band) -> Tensor:
    """k_j.(b_r - b_tail): zero but for the band's keys."""
    vectors = band.rows(term.key_vectors) - band.tail(term.key_vectors)
    near = (k[:, :, band.tail_keys :] * vectors).sum(-1)[:, :, None]
    return torch.nn.functional.pad(near, (band.tail_keys, 0))


def _content(q: Tensor, k: Tensor, pairs: list[tuple[PositionTerms, _Band | None]]) -> Tensor:
    """q.k, or the trilinear term that replaces it: (B, H, 1, S)."""
    for term, band in pairs:
        if term.trilinear is not None:
            recent = k[:, :, band.tail_keys :]
            near = (q * band.rows(term.trilinear) * recent).sum(-1)[:, :, None]
            folded = q * band.tail(term.trilinear)
            return band.join(folded @ k[:, :, : band.tail_keys].transpose(-1, -2), near)
    return q @ k.transpose(-1, -2)


def _value_part(probs: Tensor, term: PositionTerms, band: _Band) -> Tensor:
    """Probabilities of the band meet their vectors, the tail's mass the tail's."""
    near = probs[..., band.tail_keys :] @ band.rows(term.value_vectors)
    far = probs[..., : band.tail_keys].sum(-1, keepdim=True)
    return near + far * band.tail(term.value_vectors)
