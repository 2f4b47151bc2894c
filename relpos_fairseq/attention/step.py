"""Evaluate one step of incremental decoding: a single query, which stands on the last key.

All distances are -(S - 1)..0.  Beyond a relation's lowest distance all keys share one row of a
table, the clipped row; the last few keys, which are nearer, are *near keys*.  What the clipped row
adds is folded into the query (k.b_clipped), is the same for all keys and drops out of the softmax
(q.a_clipped), or needs only the sum of the probabilities (values).  So only near keys are multiplied
with rows of their own, and a step costs O(S D), as plain attention does.

`StepTables` holds what needs neither query nor keys: decoding forms it once for many steps.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable
from dataclasses import fields
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs, distances_of, drop, probabilities, required
from relpos_fairseq.attention.reference import decay_logits
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import DistanceRelation
from relpos_fairseq.core.terms import PositionTerms


def supports_step(terms: tuple[PositionTerms, ...], positions: Positions) -> bool:
    """Return whether `attend_step` serves a call: a step of decoding with terms that read only distances, no resets."""
    in_place = positions.is_step and positions.randomized is None
    return in_place and all(
        term.reset is None
        and term.contextual is None
        and term.mixing is None
        and (term.relation is None or isinstance(term.relation, DistanceRelation))
        for term in terms
    )


# ------------------------------------------------------------------------------------------------ Tables


class TermTables:
    """The tables of one term, expanded to the keys that a step's query reads; each is computed on first use.

    A near table has a row for each of the last `keys` keys, the query's own last.  Its first row is
    the clipped row, which all keys further off read too.  Where there are fewer keys, they read the
    last rows.

    Args:
        term: a term over distances.
        exact: type of the results.
        device: their device.
    """

    def __init__(self, term: PositionTerms, exact: torch.dtype, device: torch.device) -> None:
        self.term, self.exact = term, exact
        relation = distances_of(term)
        self.keys = max(0, -relation.lowest) + 1
        self._rows = relation.window(1 - self.keys, 0, device)

    def near(self, table: Tensor) -> Tensor:
        """Return the rows of a table (H|1, R, ...) for the near keys: (H|1, keys, ...)."""
        return table.index_select(1, self._rows).to(self.exact)

    def less_clipped(self, table: Tensor) -> Tensor:
        """Return by how much near rows of (H|1, R, ...) differ from the clipped row: (H|1, keys, ...)."""
        near = self.near(table)
        return near - near[:, :1]

    def inside(self, table: Tensor) -> Tensor:
        """Return `less_clipped` without its first row (always 0), unless that is the only one: (H|1, n, ...)."""
        return self.less_clipped(table)[:, min(1, self.keys - 1) :]

    def spread(self, near: Tensor, length: int) -> Tensor:
        """Expand scalars of near keys (H|1, keys) to the last `length` keys: (H|1, length)."""
        if length <= self.keys:
            return near[:, self.keys - length :]
        return torch.cat([near[:, :1].expand(-1, length - self.keys), near], dim=1)

    @cached_property
    def product_query(self) -> Tensor:
        """The query_vectors a_r of a product term for near keys, transposed: (H|1, D, keys)."""
        return self.near(required(self.term.query_vectors)).transpose(1, 2)

    @cached_property
    def product_key(self) -> Tensor:
        """The key_vectors b_r of a product term for near keys: (H|1, keys, D)."""
        return self.near(required(self.term.key_vectors))


class StepTables:
    """The tables of all terms, summed and expanded to keys, for every step of decoding with up to `length` keys.

    A near table has n rows, for the last n keys.  It holds only what terms add there beyond what they
    add for all keys.  Each attribute is None where no term has such a table.

    Attributes:
        near_query: (H|1, n, D) scale (a_r - a_clipped).  q.a_clipped is the same for all keys.
        near_key: (H|1, n, D) scale (b_r - b_clipped).
        near_trilinear: (H|1, n, D) scale (w_r - w_clipped).
        near_value: (H|1, n, Dv) value vectors less the clipped row.
        clipped_value: (H|1, 1, Dv) the clipped row of value vectors.
        gate, static: (H|1, length) for every key.
        offset: (1, H|1, 1, D) what is multiplied with every key, besides the query.
        query_scale: (1, H|1, 1, D) scale w_clipped of a trilinear term, which multiplies the query.
        products: the terms that multiply the content.
        factors: of each term with position_factors: (H|1, length, r) of queries, and of keys.

    Args:
        terms: the terms of the step; later steps may bring others with the same tables (see `fit`).
        scale: factor of the content.
        exact: type of the logits.
        device: of the tables.
        length: how many keys a step may have.
    """

    def __init__(
        self, terms: tuple[PositionTerms, ...], scale: float, exact: torch.dtype, device: torch.device, length: int
    ) -> None:
        self.terms, self.length, self.scale, self.exact = terms, length, scale, exact
        self._formed: dict[Hashable, Any] = {}
        parts = [TermTables(term, exact, device) for term in terms if term.relation is not None]
        self.products = [part for part in parts if part.term.product]
        by_position = (term.position_factors for term in terms if term.position_factors is not None)
        self.factors = [(of_queries.to(exact), of_keys.to(exact)) for of_queries, of_keys in by_position]
        self.near_query: Tensor | None = None
        self.near_key: Tensor | None = None
        self.near_trilinear: Tensor | None = None
        self.near_value: Tensor | None = None
        self.clipped_value: Tensor | None = None
        self.gate: Tensor | None = None
        self.static: Tensor | None = None
        self.offset: Tensor | None = None
        self.query_scale: Tensor | None = None
        for part in parts:
            self._add_scalars(part)
            self._add_vectors(part)

    def _add_scalars(self, part: TermTables) -> None:
        """Add a term's gate, static and v.a_r to `gate` and `static`, for every key."""
        term = part.term
        if term.gate is not None:
            gate = part.spread(part.near(term.gate), self.length)
            self.gate = gate if self.gate is None else self.gate * gate
        if term.static is not None:
            self.static = _sum(self.static, part.spread(part.near(term.static), self.length))
        if term.query_offset is not None:
            near = part.less_clipped(required(term.query_vectors)) * self.scale
            products = (near @ term.query_offset.to(part.exact)[:, :, None])[..., 0]
            self.static = _sum(self.static, part.spread(products, self.length))

    def _add_vectors(self, part: TermTables) -> None:
        """Add a term's vectors: near rows to near tables, clipped rows to what is the same for all keys."""
        term, scale = part.term, self.scale
        if term.content_offset is not None:
            self.offset = _sum(self.offset, term.content_offset.to(part.exact)[None, :, None] * scale)
        if term.query_vectors is not None and not term.product:
            self.near_query = _sum_near(self.near_query, part.inside(term.query_vectors) * scale)
        if term.key_vectors is not None and not term.product:
            self.near_key = _sum_near(self.near_key, part.inside(term.key_vectors) * scale)
            self.offset = _sum(self.offset, part.near(term.key_vectors)[None, :, :1] * scale)
        if term.trilinear is not None:
            self.near_trilinear = part.inside(term.trilinear) * scale
            self.query_scale = part.near(term.trilinear)[None, :, :1] * scale
        if term.value_vectors is not None:
            self.near_value = _sum_near(self.near_value, part.inside(term.value_vectors))
            self.clipped_value = _sum(self.clipped_value, part.near(term.value_vectors)[:, :1])

    def folds_offset(self, rotated: bool) -> bool:
        """Return whether `offset` may be added to the query of the content: no gate, product or rotation changes it."""
        return self.gate is None and not (self.products or rotated)

    def hold_all(self, terms: tuple[PositionTerms, ...]) -> bool:
        """Return whether a step of these terms, which fit, needs nothing beside the tables and products of its keys."""
        apart = any(part is not None for term in terms for part in (term.dense_bias, term.static_factors, term.decay))
        near = all(part.keys > 1 for part in self.products)
        return not apart and near and len(self.products) <= 1 and len(self.factors) <= 1

    def __getstate__(self) -> dict[str, Any]:  # what a backend formed of them may hold addresses
        return self.__dict__ | {"_formed": {}}

    def once(self, key: Hashable, form: Callable[[], Any]) -> Any:
        """Return the result of `form()`, computed once and stored under `key` as long as these tables live."""
        found = self._formed.get(key)
        if found is None:
            found = self._formed[key] = form()
        return found

    def fit(self, terms: tuple[PositionTerms, ...], length: int) -> bool:
        """Return whether these tables are valid for a step of `length` keys with these terms."""
        if length > self.length:
            return False
        if terms is self.terms:
            return True
        same = len(terms) == len(self.terms) and all(map(_same_tables, terms, self.terms))
        if same:
            self.terms = terms  # the next step brings these again
        return same


def _sum(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


def _sum_near(total: Tensor | None, part: Tensor) -> Tensor:
    """Add two near tables (H|1, n, D) of different n, aligned at their last rows; missing rows count as 0."""
    if total is None:
        return part
    rows = max(total.size(1), part.size(1))
    longer, other = (F.pad(table, (0, 0, rows - table.size(1), 0)) for table in (total, part))
    return longer + other


_tables_of = operator.attrgetter(
    *(
        field.name
        for field in fields(PositionTerms)
        if field.name not in ("relation", "dense_bias", "static_factors", "decay", "mixing", "reset")
    )
)


def _same_tables(one: PositionTerms, other: PositionTerms) -> bool:
    """Return whether two terms have the same tables; factors, dense bias and decay may differ."""
    return one is other or (
        one.relation == other.relation and all(map(operator.is_, _tables_of(one), _tables_of(other)))
    )


def form_clipped_key_products(terms: tuple[PositionTerms, ...], k: Tensor) -> Tensor | None:
    """Return k.b_clipped of each product term, which decoding caches: (B, H, S, P), or None without any."""
    exact = torch.promote_types(k.dtype, torch.float32)
    # Not a product of matrices, which takes a step longer, and many keys three times as long.
    clipped = [term.key_vectors[:, :1].to(exact) for term in terms if term.product and term.key_vectors is not None]
    products = [(k.to(exact) * row).sum(-1, keepdim=True) for row in clipped]  # rows of (H|1, 1, D)
    if len(products) < 2:
        return products[0] if products else None
    return torch.cat(products, dim=-1)


def tables_for(inputs: AttentionInputs) -> StepTables:
    """Return the `StepTables` of a step: those in `inputs.step_tables` if they fit, else new ones."""
    length = inputs.positions.src_len
    known: StepTables | None = inputs.step_tables
    if known is not None and known.fit(inputs.terms, length):
        return known
    return StepTables(inputs.terms, inputs.scale, inputs.exact, inputs.q.device, length)


# ---------------------------------------------------------------------------------------------- The step


def attend_step(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, 1, Dv) and the probabilities (B, H, 1, S) of a step.

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
    near, clipped = tables.near_value, tables.clipped_value
    if near is None or clipped is None:
        out = torch.bmm(flat, v)
    else:
        # Probabilities sum to 1, except with dropout and in a row without keys.
        mass = flat.sum(-1) if padded or inputs.dropout else None
        out = torch.baddbmm(_value_part(probs, (near, clipped), mass), flat, v)
    return out.view(batch, heads, 1, v.size(-1)).to(inputs.v.dtype), probs


def added_of(inputs: AttentionInputs) -> list[Tensor]:
    """Return the dense biases and decays of this step, (B|1, H|1, S) each."""
    added = []
    for term in inputs.terms:
        if term.dense_bias is not None:
            added.append(term.dense_bias.of(inputs.positions)[:, :, 0])
        if term.decay is not None:
            added.append(decay_logits(term.decay, inputs.positions)[:, :, 0].to(inputs.exact))
    return added


def factors_of(inputs: AttentionInputs, tables: StepTables) -> list[tuple[Tensor, Tensor]]:
    """Return all pairs of factors of this step: (B|1, H|1, 1, r) of the query, (B|1, H|1, S, r) of keys."""
    length = inputs.k.size(2)
    by_position = [(query[None, :, length - 1 : length], key[None, :, :length]) for query, key in tables.factors]
    return given_factors(inputs) + by_position


def given_factors(inputs: AttentionInputs) -> list[tuple[Tensor, Tensor]]:
    """Return the pairs of factors that are not read by position."""
    given = (term.static_factors for term in inputs.terms if term.static_factors is not None)
    return [(of_query.to(inputs.exact), of_keys.to(inputs.exact)) for of_query, of_keys in given]


def product_of_factors(factors: tuple[Tensor, Tensor]) -> Tensor:
    """Return the logits (B|1, H|1, S) of a pair of factors."""
    of_query, of_keys = factors
    return (of_query @ of_keys.transpose(-1, -2))[:, :, 0]


def products_of(inputs: AttentionInputs, tables: StepTables) -> Tensor:
    """Return the product of (q.a_r)(k.b_r) over all product terms, for a step: (B, H, S)."""
    q, k = inputs.q.to(inputs.exact), inputs.k.to(inputs.exact)
    known = inputs.clipped_key_products
    found = []
    for index, part in enumerate(tables.products):
        if known is None:
            clipped = required(form_clipped_key_products((part.term,), k))[..., 0]
        else:
            clipped = known[..., index]
        found.append(_product(part, q, k, clipped))
    return math.prod(found[1:], start=found[0])


def _product(part: TermTables, q: Tensor, k: Tensor, clipped_key_products: Tensor) -> Tensor:
    """Return (q.a_r)(k.b_r) of one product term, for a step: (B, H, S)."""
    query_products = _per_head(q, part.product_query)  # (B, H, keys), with the clipped row first
    n = min(part.keys, k.size(2))
    product = query_products[..., :1] * clipped_key_products
    product[..., k.size(2) - n :] = query_products[..., -n:] * _near_products(part.product_key, k)
    return product


def _logits(inputs: AttentionInputs, tables: StepTables) -> Tensor:
    """Return logits (B, H, S), without what is the same for all keys."""
    q, k, content_q, content_k = inputs.exact_pairs()
    length, folds = k.size(2), tables.folds_offset(inputs.rotated)
    products = torch.bmm(
        _content_query(content_q, inputs.scale, tables, folds).flatten(0, 1), content_k.flatten(0, 1).mT
    )
    logits = products.view(k.shape[:3])  # (B, H, S), of P products (1, S)
    if tables.near_trilinear is not None:
        _add_near(logits, _near_products(tables.near_trilinear, content_k, content_q))
    multipliers = [] if tables.gate is None else [tables.gate[None, :, -length:]]
    if tables.products:
        multipliers.append(products_of(inputs, tables))
    if multipliers:
        logits = logits * math.prod(multipliers[1:], start=multipliers[0])
    added = [*added_of(inputs), *map(product_of_factors, factors_of(inputs, tables))]
    if tables.static is not None:
        added.append(tables.static[None, :, -length:])
    if tables.offset is not None and not folds:
        added.append((tables.offset @ k.mT)[:, :, 0])
    if added:
        logits += sum(added[1:], added[0])
    if tables.near_query is not None:
        near = tables.near_query[:, -length:]
        _add_near(logits, _per_head(q, near.mT))
    if tables.near_key is not None:
        _add_near(logits, _near_products(tables.near_key, k))
    return logits


def _content_query(query: Tensor, scale: float, tables: StepTables, folds_offset: bool) -> Tensor:
    """Return the query of the content (B, H, 1, D), scaled; with `folds_offset`, `offset` is added to it."""
    if tables.query_scale is not None:
        query, scale = query * tables.query_scale, 1.0
    if folds_offset and tables.offset is not None:
        return torch.add(tables.offset, query, alpha=scale)
    return query if scale == 1.0 else query * scale


def _value_part(probs: Tensor, tables: tuple[Tensor, Tensor], mass: Tensor | None) -> Tensor:
    """Return what value vectors add to the output: (P, 1, Dv).

    Args:
        probs: (B, H, 1, S).
        tables: of the step.
        mass: (P, 1) sum of each row's probabilities, or None where that is 1.
    """
    near, clipped = tables  # near_value and clipped_value
    n = min(near.size(1), probs.size(-1))
    if near.size(0) == 1 and mass is None:
        return torch.addmm(clipped[0], probs.flatten(0, 2)[:, -n:], near[0, -n:])[:, None]
    far = clipped[:, 0] if mass is None else mass.view(*probs.shape[:2], 1) * clipped[:, 0]
    return (_per_head(probs[..., -n:], near[:, -n:]) + far).flatten(0, 1)[:, None]


def _near_products(near: Tensor, k: Tensor, q: Tensor | None = None) -> Tensor:
    """Return dot products of near keys and rows of a near table (H|1, keys, D), channels weighted by q: (B, H, n)."""
    n = min(near.size(1), k.size(2))
    recent = k[:, :, -n:] if q is None else k[:, :, -n:] * q
    return (recent * near[:, -n:]).sum(-1)


def _per_head(x: Tensor, matrices: Tensor) -> Tensor:
    """Return (B, H, 1, L) times (H|1, L, n), without a copy of the matrices for each batch row: (B, H, n)."""
    batch, heads, _, inner = x.shape
    if matrices.size(0) == 1:
        return (x.reshape(batch * heads, inner) @ matrices[0]).view(batch, heads, matrices.size(-1))
    return torch.bmm(x.view(batch, heads, inner).transpose(0, 1), matrices).transpose(0, 1)


def _add_near(logits: Tensor, near: Tensor) -> None:
    """Add (B, H, n) in place to the last n keys of logits (B, H, S); autograd must not have saved these."""
    logits[..., logits.size(-1) - near.size(-1) :].add_(near)
