"""The tables of a step of decoding: what needs neither query nor keys, formed for many steps."""

from __future__ import annotations

from dataclasses import fields
from functools import cached_property

import torch
from torch import Tensor

from relpos_fairseq.terms import PositionTerms


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


def _added(vectors: Tensor | None, part: TermTables) -> bool:
    return vectors is not None and not part.term.product


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


_TABLES = tuple(
    field.name
    for field in fields(PositionTerms)
    if field.name not in ("relation", "by_row", "static_factors", "decay", "reset")
)


def _same_tables(one: PositionTerms, other: PositionTerms) -> bool:
    """Whether two terms differ in their factors, logits by row and decay alone."""
    return one is other or (
        one.relation == other.relation
        and all(getattr(one, name) is getattr(other, name) for name in _TABLES)
    )
