"""One step of incremental decoding: a single query that stands on the last key.

All distances are -(S - 1)..0, and beyond a relation's lowest distance every key shares one row of
a table.  That tail folds into the query (k.b_tail), drops out of the softmax (q.a_tail, the same
for all keys) or leaves one sum of probabilities (values), so only the last few keys meet vectors of
their own and nothing is recomputed for all keys: O(S D) a step, as plain attention.  What needs
neither query nor keys is formed once for many steps (`StepTables`).
"""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs, drop, probabilities
from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import DistanceRelation
from relpos_fairseq.terms import PositionTerms


def serves(terms: tuple[PositionTerms, ...], positions: Positions) -> bool:
    """Whether this is a step that the functions here evaluate: distances alone, nothing reset."""
    return positions.is_step and all(
        term.reset is None
        and (term.relation is None or isinstance(term.relation, DistanceRelation))
        for term in terms
    )


def tail_products(terms: tuple[PositionTerms, ...], k: Tensor) -> Tensor | None:
    """k.b_tail of each product term, which decoding caches: (B, H, S, P), or None without any."""
    exact = torch.promote_types(k.dtype, torch.float32)
    products = [
        k.to(exact) @ term.key_vectors[:, :1].to(exact).transpose(-1, -2)
        for term in terms
        if term.product
    ]
    return torch.cat(products, dim=-1) if products else None


class TermTables:
    """One term's tables as the last query meets them, formed when first asked for.

    A near table has a row for each of the last `keys` distances, the query's own last; fewer keys
    meet its last rows.  Its first row is the one that all keys further off share: the tail.

    Args:
        term: the term, over distances.
        scale: factor of the content and of added vector products.
        exact: type of the results.
        device: their device.
    """

    def __init__(
        self, term: PositionTerms, scale: float, exact: torch.dtype, device: torch.device
    ) -> None:
        """Find the rows."""
        self.term, self.scale, self.exact = term, scale, exact
        self.keys = max(0, -term.relation.lowest) + 1
        self._rows = term.relation.window(1 - self.keys, 0, device)

    def near(self, table: Tensor) -> Tensor:
        """(H|1, R, ...) for the near keys: (H|1, keys, ...)."""
        return table.index_select(1, self._rows).to(self.exact)

    def beyond_tail(self, table: Tensor) -> Tensor:
        """What near rows (H|1, R, ...) differ by from the tail's: (H|1, keys, ...)."""
        near = self.near(table)
        return near - near[:, :1]

    def spread(self, near: Tensor, length: int) -> Tensor:
        """Scalars of near keys (H|1, keys) for the last `length` keys: (H|1, length)."""
        if length <= self.keys:
            return near[:, self.keys - length :]
        return torch.cat([near[:, :1].expand(-1, length - self.keys), near], dim=1)

    @cached_property
    def query(self) -> Tensor:
        """Scale (a_r - a_tail), transposed: (H|1, D, keys).  q.a_tail is the same for all keys."""
        return (self.beyond_tail(self.term.query_vectors) * self.scale).transpose(1, 2)

    @cached_property
    def key(self) -> Tensor:
        """Scale (b_r - b_tail): (H|1, keys, D)."""
        return self.beyond_tail(self.term.key_vectors) * self.scale

    @cached_property
    def product_query(self) -> Tensor:
        """a_r, transposed: (H|1, D, keys)."""
        return self.near(self.term.query_vectors).transpose(1, 2)

    @cached_property
    def product_key(self) -> Tensor:
        """b_r: (H|1, keys, D)."""
        return self.near(self.term.key_vectors)

    @cached_property
    def trilinear(self) -> Tensor:
        """Scale (w_r - w_tail): (H|1, keys, D)."""
        return self.beyond_tail(self.term.trilinear) * self.scale

    @cached_property
    def value(self) -> tuple[Tensor, Tensor]:
        """Value vectors less the tail's (H|1, keys, D), and the tail's (H|1, 1, D)."""
        near = self.near(self.term.value_vectors)
        return near - near[:, :1], near[:, :1]


class StepTables:
    """The tables of all terms as the last query meets them, for every step of up to `length` keys.

    Args:
        terms: of the step; others with the same tables may follow (see `fit`).
        scale: factor of the content.
        exact: type of logits.
        device: of the tables.
        length: most keys that a step may have.
    """

    def __init__(
        self,
        terms: tuple[PositionTerms, ...],
        scale: float,
        exact: torch.dtype,
        device: torch.device,
        length: int,
    ) -> None:
        """Form what needs neither query nor keys."""
        self.terms, self.length = terms, length
        self.parts = tuple(
            None if term.relation is None else TermTables(term, scale, exact, device)
            for term in terms
        )
        given = [part for part in self.parts if part is not None]
        self.products = [part for part in given if part.term.product]
        self.queries = [part for part in given if _added(part.term.query_vectors, part)]
        self.keys = [part for part in given if _added(part.term.key_vectors, part)]
        self.values = [part for part in given if part.term.value_vectors is not None]
        self.trilinear = next((part for part in given if part.term.trilinear is not None), None)
        self.gate = self.static = self.offset = None
        for part in given:
            self._add_scalars(part)
        self.factor = None  # (1, H|1, 1, D) scale w_tail of a trilinear term, which folds into q
        if self.trilinear is not None:
            tail = self.trilinear.near(self.trilinear.term.trilinear)[None, :, :1]
            self.factor = tail * scale

    def _add_scalars(self, part: TermTables) -> None:
        """Gate, static and (v.a_r) for every key, and the vectors that all keys meet."""
        term, exact = part.term, part.exact
        if term.gate is not None:
            gate = part.spread(part.near(term.gate), self.length)
            self.gate = gate if self.gate is None else self.gate * gate
        if term.static is not None:
            self.static = _sum(self.static, part.spread(part.near(term.static), self.length))
        if term.query_offset is not None:
            products = (term.query_offset.to(exact)[:, None] @ part.query)[:, 0]
            self.static = _sum(self.static, part.spread(products, self.length))
        if term.content_offset is not None:
            offset = term.content_offset.to(exact)[None, :, None] * part.scale
            self.offset = _sum(self.offset, offset)
        if _added(term.key_vectors, part):
            tail = part.near(term.key_vectors)[None, :, :1] * part.scale
            self.offset = _sum(self.offset, tail)  # (1, H|1, 1, D)

    def fit(self, terms: tuple[PositionTerms, ...], length: int) -> bool:
        """Whether they serve a step of `length` keys with these terms."""
        if length > self.length:
            return False
        if terms is self.terms:
            return True
        return len(terms) == len(self.terms) and all(map(_same_tables, terms, self.terms))


def tables_for(inputs: AttentionInputs) -> StepTables:
    """The tables of this step: those it brings where they fit, or new ones."""
    length, known = inputs.positions.src_len, inputs.step_tables
    if known is not None and known.fit(inputs.terms, length):
        return known
    return StepTables(inputs.terms, inputs.scale, inputs.exact, inputs.q.device, length)


def attend_step(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, 1, Dv) and probabilities (B, H, 1, S).

    Batch and heads are one dimension of P = B H pairs wherever they can be: at short lengths the
    number of calls into torch counts for more than what they compute.
    """
    tables = tables_for(inputs)
    batch, heads, length, _ = inputs.k.shape
    logits = _logits(inputs, tables)[:, :, None]
    padded = inputs.key_padding is not None
    probs = drop(probabilities(logits, inputs.excluded(), padded), inputs.dropout)
    flat = probs.reshape(-1, 1, length)
    v = inputs.v.to(inputs.exact).flatten(0, 1)  # (P, S, Dv)
    vectors = None
    for part in tables.values:
        # Probabilities sum to 1 but for dropout and a row without keys.
        mass = flat.sum(-1) if padded or inputs.dropout else None
        vectors = _sum(vectors, _value_part(probs, part, mass))
    out = torch.bmm(flat, v) if vectors is None else torch.baddbmm(vectors, flat, v)
    return out.view(batch, heads, 1, -1).to(inputs.v.dtype), probs


def _logits(inputs: AttentionInputs, tables: StepTables) -> Tensor:
    """(B, H, S) logits, but for what is the same for all keys."""
    q, k, content_q, content_k = inputs.exact_pairs()
    batch, heads, length, _ = k.shape
    folds = tables.gate is None and not (tables.products or inputs.rotated)
    query, scale = content_q, inputs.scale
    if tables.factor is not None:
        query, scale = content_q * tables.factor, 1.0
    if folds and tables.offset is not None:
        query, scale = torch.add(tables.offset, query, alpha=scale), 1.0
    logits = _scaled_product(query, content_k, scale)
    by_head = logits.view(batch, heads, length)
    if tables.trilinear is not None:
        _add_near(by_head, _meet(tables.trilinear.trilinear, content_k, content_q))
    if tables.gate is not None:
        by_head = by_head * tables.gate[:, -length:]
    for index, part in enumerate(tables.products):
        by_head = by_head * _product(part, q, k, inputs.key_tails, index)
    if tables.offset is not None and not folds:
        by_head = by_head + (tables.offset @ k.transpose(-1, -2))[:, :, 0]
    if tables.static is not None:
        by_head += tables.static[:, -length:]
    for part in tables.queries:
        _add_near(by_head, _per_head(q, part.query[:, :, -length:]))
    for part in tables.keys:
        _add_near(by_head, _meet(part.key, k))
    for term in inputs.terms:
        if term.static_factors is not None:
            row, column = (factor.to(q.dtype) for factor in term.static_factors)
            by_head += (row @ column.transpose(-1, -2))[:, :, 0]
    return by_head


def _scaled_product(query: Tensor, k: Tensor, scale: float) -> Tensor:
    """Scale q.k of (B, H, 1, D) and (B, H, S, D): (P, 1, S)."""
    query, k = query.flatten(0, 1), k.flatten(0, 1)
    return torch.bmm(query if scale == 1.0 else query * scale, k.transpose(1, 2))


def _product(
    part: TermTables, q: Tensor, k: Tensor, key_tails: Tensor | None, index: int
) -> Tensor:
    """(q.a_r)(k.b_r) of a product term: (B, H, S)."""
    length = k.size(2)
    queries = _per_head(q, part.product_query)  # (B, H, keys), the tail's first
    if key_tails is None:
        tails = tail_products((part.term,), k)[..., 0]
    else:
        tails = key_tails[..., index]
    n = min(part.keys, length)
    factor = queries[..., :1] * tails
    factor[..., length - n :] = queries[..., -n:] * _meet(part.product_key, k)
    return factor


def _value_part(probs: Tensor, part: TermTables, mass: Tensor | None) -> Tensor:
    """What value vectors add to the output: (P, 1, Dv).

    Args:
        probs: (B, H, 1, S).
        part: the term.
        mass: (P, 1) sum of each row's probabilities, or None where that is 1.
    """
    near, tail = part.value
    n = min(part.keys, probs.size(-1))
    if near.size(0) == 1 and mass is None:
        return torch.addmm(tail[0], probs.flatten(0, 2)[:, -n:], near[0, -n:])[:, None]
    far = tail[:, 0] if mass is None else mass.view(*probs.shape[:2], 1) * tail[:, 0]
    return (_per_head(probs[..., -n:], near[:, -n:]) + far).flatten(0, 1)[:, None]


def _meet(rows: Tensor, k: Tensor, q: Tensor | None = None) -> Tensor:
    """Near keys meet rows of their own (H|1, keys, D), channels weighed by q: (B, H, n)."""
    n = min(rows.size(1), k.size(2))
    recent = k[:, :, -n:] if q is None else k[:, :, -n:] * q
    return (recent * rows[:, -n:]).sum(-1)


def _per_head(x: Tensor, matrices: Tensor) -> Tensor:
    """(B, H, 1, L) times (H|1, L, n), without a copy of the matrices a row: (B, H, n)."""
    batch, heads, _, inner = x.shape
    if matrices.size(0) == 1:
        return (x.reshape(-1, inner) @ matrices[0]).view(batch, heads, -1)
    return torch.bmm(x.view(batch, heads, inner).transpose(0, 1), matrices).transpose(0, 1)


def _add_near(logits: Tensor, near: Tensor) -> None:
    """Add (B, H, n) to the last keys of (B, H, S) logits, which no operation has kept."""
    logits[..., logits.size(-1) - near.size(-1) :].add_(near)


def _added(vectors: Tensor | None, part: TermTables) -> bool:
    return vectors is not None and not part.term.product


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


_TABLES = tuple(
    field.name
    for field in fields(PositionTerms)
    if field.name not in ("relation", "static_factors", "reset")
)


def _same_tables(one: PositionTerms, other: PositionTerms) -> bool:
    """Whether two terms differ in their factors alone."""
    return one is other or (
        one.relation == other.relation
        and all(getattr(one, name) is getattr(other, name) for name in _TABLES)
    )
