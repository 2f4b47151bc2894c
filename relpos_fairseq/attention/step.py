"""One step of incremental decoding: a single query that stands on the last key.

All distances are -(S - 1)..0, and beyond a relation's lowest distance every key shares one row of
a table.  That tail folds into the query, so only the last few keys meet vectors of their own and
nothing is recomputed for all keys: O(S D) a step, as plain attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.attention.formula import Products, logits
from relpos_fairseq.attention.inputs import AttentionInputs, drop, probabilities
from relpos_fairseq.terms import PositionTerms


def attend_step(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, 1, Dv) and probabilities (B, H, 1, S)."""
    padded = inputs.key_padding is not None
    probs = probabilities(logits(LastQuery(inputs)), inputs.excluded(), padded)
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


class LastQuery(Products):
    """Tables met by the last query: a few near keys have rows of their own, the rest share one."""

    def __init__(self, inputs: AttentionInputs) -> None:
        """Find out whether tails fold into the content's query."""
        super().__init__(inputs)
        self.folds = not inputs.rotated and not any(
            term.product or term.gate is not None or term.trilinear is not None or term.reset
            for term in inputs.terms
        )
        products = [term for term in inputs.terms if term.product]
        tails = () if inputs.key_tails is None else inputs.key_tails.unbind(-1)
        self.cached = {id(term): tail for term, tail in zip(products, tails, strict=False)}

    def content(self, q: Tensor, k: Tensor) -> Tensor:
        """q.k with u and the keys' tail vectors folded into q, or the trilinear term."""
        for term in self.inputs.terms:
            if term.trilinear is not None:
                return self._trilinear(q, k, term)
            if self.folds and term.content_offset is not None:
                q = q + term.content_offset.to(q.dtype)[None, :, None] * self.inputs.scale
            if self.folds and term.key_vectors is not None:
                q = q + _Band(term, self.inputs).tail(term.key_vectors) * self.inputs.scale
        return q @ k.transpose(-1, -2)

    def _trilinear(self, q: Tensor, k: Tensor, term: PositionTerms) -> Tensor:
        band = _Band(term, self.inputs)
        recent = k[:, :, band.tail_keys :]
        near = (q * band.rows(term.trilinear) * recent).sum(-1)[:, :, None]
        folded = q * band.tail(term.trilinear)
        return band.join(folded @ k[:, :, : band.tail_keys].transpose(-1, -2), near)

    def offset(self, offset: Tensor, k: Tensor) -> Tensor | None:
        """u.k, unless `content` has it."""
        return None if self.folds else super().offset(offset, k)

    def scalars(self, table: Tensor, term: PositionTerms) -> Tensor:
        """(1, H|1, 1, S)."""
        return _Band(term, self.inputs).scalars(table)[None]

    def query(self, q: Tensor, term: PositionTerms) -> Tensor:
        """q.a_r: (B, H, 1, S)."""
        band = _Band(term, self.inputs)
        near = q @ band.rows(term.query_vectors).transpose(-1, -2)
        far = q @ band.tail(term.query_vectors).transpose(-1, -2)
        return band.join(far, near)

    def key(self, k: Tensor, term: PositionTerms) -> Tensor:
        """k_j.b_r, or what it differs by from the folded k_j.b_tail: only near keys differ."""
        band = _Band(term, self.inputs)
        recent, vectors = k[:, :, band.tail_keys :], band.rows(term.key_vectors)
        if self.folds:
            vectors = vectors - band.tail(term.key_vectors)
        near = (recent * vectors).sum(-1)[:, :, None]
        if self.folds:
            return torch.nn.functional.pad(near, (band.tail_keys, 0))
        if id(term) in self.cached:
            return band.join(self.cached[id(term)][:, :, None], near)
        older = k[:, :, : band.tail_keys]
        return band.join(band.tail(term.key_vectors) @ older.transpose(-1, -2), near)


def _value_part(probs: Tensor, term: PositionTerms, band: _Band) -> Tensor:
    """Probabilities of the band meet their vectors, the tail's mass the tail's."""
    near = probs[..., band.tail_keys :] @ band.rows(term.value_vectors)
    far = probs[..., : band.tail_keys].sum(-1, keepdim=True)
    return near + far * band.tail(term.value_vectors)
