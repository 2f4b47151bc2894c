"""The tables of a step of decoding: what needs neither query nor keys, formed for many steps."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable
from dataclasses import fields
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
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

    def __init__(self, term: PositionTerms, scale: float, exact: torch.dtype, device: torch.device) -> None:
        """Find the rows."""
        self.term, self.scale, self.exact = term, scale, exact
        self.keys = max(0, -term.relation.lowest) + 1
        self._rows = term.relation.window(1 - self.keys, 0, device)

    def near(self, table: Tensor) -> Tensor:
        """(H|1, R, ...) for the near keys: (H|1, keys, ...)."""
        return table.index_select(1, self._rows).to(self.exact)

    def beyond_tail(self, table: Tensor) -> Tensor:
        """What near rows of (H|1, R, ...) differ by from the tail's: (H|1, keys, ...)."""
        near = self.near(table)
        return near - near[:, :1]

    def inside(self, table: Tensor) -> Tensor:
        """The same without the tail's own row, which is 0, if there are others: (H|1, n, ...)."""
        beyond = self.beyond_tail(table)
        return beyond[:, min(1, self.keys - 1) :]

    def spread(self, near: Tensor, length: int) -> Tensor:
        """Scalars of near keys (H|1, keys) for the last `length` keys: (H|1, length)."""
        if length <= self.keys:
            return near[:, self.keys - length :]
        return torch.cat([near[:, :1].expand(-1, length - self.keys), near], dim=1)

    @cached_property
    def product_query(self) -> Tensor:
        """a_r, transposed: (H|1, D, keys)."""
        return self.near(self.term.query_vectors).transpose(1, 2)

    @cached_property
    def product_key(self) -> Tensor:
        """b_r: (H|1, keys, D)."""
        return self.near(self.term.key_vectors)


class StepTables:
    """The tables of all terms as the last query meets them, for every step of up to `length` keys.

    Near tables have rows for the last keys, whose number is theirs: what terms add there beyond
    what they add to all keys.  Each is None where no term has it.

    Attributes:
        query: (H|1, n, D) scale (a_r - a_tail).  q.a_tail is the same for all keys.
        key: (H|1, n, D) scale (b_r - b_tail).
        trilinear: (H|1, n, D) scale (w_r - w_tail).
        value: (H|1, n, Dv) value vectors less the tail's.
        value_tail: (H|1, 1, Dv).
        gate, static: (H|1, length) for every key.
        offset: (1, H|1, 1, D) what all keys meet beside the query.
        factor: (1, H|1, 1, D) scale w_tail of a trilinear term, which multiplies the query.
        products: the terms that multiply the content.
        factors: (H|1, n, r) of queries and of keys, a row a position, of each term that has such.

    Args:
        terms: of the step; others with the same tables may follow (see `fit`).
        scale: factor of the content.
        exact: type of logits.
        device: of the tables.
        length: most keys that a step may have.
    """

    def __init__(
        self, terms: tuple[PositionTerms, ...], scale: float, exact: torch.dtype, device: torch.device, length: int
    ) -> None:
        """Form what needs neither query nor keys."""
        self.terms, self.length, self.scale, self.exact = terms, length, scale, exact
        self._formed: dict = {}
        self.parts = tuple(None if term.relation is None else TermTables(term, scale, exact, device) for term in terms)
        given = [part for part in self.parts if part is not None]
        self.products = [part for part in given if part.term.product]
        by_position = (term.position_factors for term in terms if term.position_factors is not None)
        self.factors = [tuple(part.to(exact) for part in pair) for pair in by_position]
        self.query = self.key = self.trilinear = self.value = self.value_tail = None
        self.gate = self.static = self.offset = self.factor = None
        for part in given:
            self._add_scalars(part)
            self._add_vectors(part)

    def _add_scalars(self, part: TermTables) -> None:
        """Gate, static and (v.a_r) for every key, and the vectors that all keys meet."""
        term, exact = part.term, part.exact
        if term.gate is not None:
            gate = part.spread(part.near(term.gate), self.length)
            self.gate = gate if self.gate is None else self.gate * gate
        if term.static is not None:
            self.static = _sum(self.static, part.spread(part.near(term.static), self.length))
        if term.query_offset is not None:
            near = part.beyond_tail(term.query_vectors) * part.scale
            products = (near @ term.query_offset.to(exact)[:, :, None])[..., 0]
            self.static = _sum(self.static, part.spread(products, self.length))
        if term.content_offset is not None:
            offset = term.content_offset.to(exact)[None, :, None] * part.scale
            self.offset = _sum(self.offset, offset)
        if _added(term.key_vectors, part):
            tail = part.near(term.key_vectors)[None, :, :1] * part.scale
            self.offset = _sum(self.offset, tail)

    def _add_vectors(self, part: TermTables) -> None:
        """Near tables, and the tails that fold into the query or the output."""
        term = part.term
        if _added(term.query_vectors, part):
            near = part.inside(term.query_vectors) * part.scale
            self.query = _sum_near(self.query, near)
        if _added(term.key_vectors, part):
            self.key = _sum_near(self.key, part.inside(term.key_vectors) * part.scale)
        if term.trilinear is not None:
            self.trilinear = part.inside(term.trilinear) * part.scale
            self.factor = part.near(term.trilinear)[None, :, :1] * part.scale
        if term.value_vectors is not None:
            self.value = _sum_near(self.value, part.inside(term.value_vectors))
            self.value_tail = _sum(self.value_tail, part.near(term.value_vectors)[:, :1])

    def folds(self, rotated: bool) -> bool:
        """Whether `offset` may be added to the content's query, where that may be rotated."""
        return self.gate is None and not (self.products or rotated)

    def factors_at(self, length: int) -> list[tuple[Tensor, Tensor]]:
        """The factors of the last of `length` positions, (1, H|1, 1, r), and of all, (1, H|1, length, r)."""
        return [(query[None, :, length - 1 : length], key[None, :, :length]) for query, key in self.factors]

    def once(self, key: Hashable, form: Callable[[], Any]) -> Any:
        """What `form` returns of these tables, formed for the first step that asks."""
        found = self._formed.get(key)
        if found is None:
            found = self._formed[key] = form()
        return found

    def fit(self, terms: tuple[PositionTerms, ...], length: int) -> bool:
        """Whether they serve a step of `length` keys with these terms."""
        if length > self.length:
            return False
        if terms is self.terms:
            return True
        same = len(terms) == len(self.terms) and all(map(_same_tables, terms, self.terms))
        if same:
            self.terms = terms  # which the next to ask brings again
        return same


def _added(vectors: Tensor | None, part: TermTables) -> bool:
    return vectors is not None and not part.term.product


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


def _sum_near(total: Tensor | None, part: Tensor) -> Tensor:
    """Add tables whose last rows are one key's; the shorter adds nothing to keys further off."""
    if total is None:
        return part
    rows = max(total.size(1), part.size(1))
    longer = (F.pad(table, (0, 0, rows - table.size(1), 0)) for table in (total, part))
    return sum(longer)


_tables_of = operator.attrgetter(
    *(
        field.name
        for field in fields(PositionTerms)
        if field.name not in ("relation", "dense_bias", "static_factors", "decay", "reset")
    )
)


def _same_tables(one: PositionTerms, other: PositionTerms) -> bool:
    """Whether two terms differ in their factors, logits by row and decay alone."""
    return one is other or (
        one.relation == other.relation and all(map(operator.is_, _tables_of(one), _tables_of(other)))
    )
