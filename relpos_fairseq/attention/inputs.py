"""Define the inputs of one attention call, and what all backends share: masks, softmax, dropout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.core.positions import Positions, is_exported
from relpos_fairseq.core.relations import DistanceRelation
from relpos_fairseq.core.terms import DenseBias, Mixing, PositionTerms, Reset

T = TypeVar("T")


@dataclass(frozen=True)
class AttentionInputs:
    """One attention call.

    Args:
        q: (B, H, T, D) queries, before any rotation: tables are multiplied with them.
        k: (B, H, S, D) keys, before any rotation.
        v: (B, H, S, Dv) values.
        terms: what the position schemes contribute.
        positions: where queries and keys stand.
        scale: factor of the content and of the vector products.
        causal: keys in a query's future are excluded.
        key_padding: (B, S) True at excluded keys, or None.
        dropout: probability with which attention probabilities are dropped (0 in evaluation).
        content_q: (B, H, T, D') rotated queries for the content q.k, or None for q itself.
        content_k: (B, H, S, D') rotated keys, or None for k itself.
        clipped_key_products: (B, H, S, P) products of the keys and the clipped row of key_vectors, cached by
            decoding for P product terms, or None; those of near keys are not read (see `step`).
        window: how many slots a query sees, the last of them its own; None: all.
        documents: (B, S) document number of each slot, or None; other documents are excluded.
        step_tables: the `step.StepTables` that decoding keeps between steps, or None.
        key_rows: (B, S|1) the row of k, v, content_k and clipped_key_products in which each key of a query's row
            lies, as decoding keeps the keys of hypotheses; None: the same row.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    terms: tuple[PositionTerms, ...]
    positions: Positions
    scale: float
    causal: bool = False
    key_padding: Tensor | None = None
    dropout: float = 0.0
    content_q: Tensor | None = None
    content_k: Tensor | None = None
    clipped_key_products: Tensor | None = None
    window: int | None = None
    documents: Tensor | None = None
    step_tables: Any = None  # its file imports this one
    key_rows: Tensor | None = None

    def __post_init__(self) -> None:
        """Raise ValueError for a window without slots."""
        if self.window is not None and self.window < 1:
            raise ValueError(f"window must be >= 1, or None for all keys, got {self.window}")

    @property
    def exact(self) -> torch.dtype:
        """The type of logits and probabilities: that of q, but at least fp32."""
        return torch.promote_types(self.q.dtype, torch.float32)

    @property
    def rotated(self) -> bool:
        """Whether the content q.k has rotated queries and keys, unlike the products with tables."""
        return self.content_q is not None

    def exact_pairs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, content q and content k in the type `exact`."""
        q, k = self.q.to(self.exact), self.k.to(self.exact)
        content_q = q if self.content_q is None else self.content_q.to(self.exact)
        content_k = k if self.content_k is None else self.content_k.to(self.exact)
        return q, k, content_q, content_k

    def placed(self) -> AttentionInputs:
        """Return the call with position_factors replaced by static_factors: their rows at the call's positions."""
        if all(term.position_factors is None for term in self.terms):
            return self
        return replace(self, terms=tuple(term.at(self.positions) for term in self.terms))

    def gathered(self) -> AttentionInputs:
        """Return the call with every key in its query's row."""
        if (rows := self.key_rows) is None:
            return self
        kept = ("k", "v", "content_k", "clipped_key_products")
        return replace(self, key_rows=None, **self.changed(kept, lambda x: of_rows(x, rows)))

    def changed(self, names: Iterable[str], change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """Return by their names what `change` makes of those of the named tensors that the call has."""
        return {name: change(x) for name in names if (x := getattr(self, name)) is not None}

    def rows(self, start: int, stop: int) -> AttentionInputs:
        """Return the call for the queries [start, stop)."""
        cut = self.changed(("q", "content_q"), lambda x: x[:, :, start:stop])
        terms = tuple(_rows_of(term, start, stop) for term in self.terms)
        return replace(self, terms=terms, positions=self.positions.rows(start, stop), **cut)

    def keys(self, stop: int) -> AttentionInputs:
        """Return the call for the keys [0, stop); the slots of all queries must be below `stop`."""
        cut = self.changed(("k", "v", "content_k"), lambda x: x[:, :, :stop])
        cut |= self.changed(("key_padding", "documents"), lambda x: x[:, :stop])
        terms = tuple(_keys_of(term, stop) for term in self.terms)
        return replace(self, terms=terms, positions=self.positions.keys(stop), **cut)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> AttentionInputs:
        """Return the call with `change` applied to every tensor that may have a gradient, in a fixed order."""
        changed = self.changed(("q", "k", "v", "content_q", "content_k"), change)
        return replace(self, terms=tuple(_mapped(term, change) for term in self.terms), **changed)

    def tensors(self) -> list[Tensor]:
        """Return every tensor that may have a gradient, in the order of `mapped`."""
        found: list[Tensor] = []

        def keep(tensor: Tensor) -> Tensor:
            found.append(tensor)
            return tensor

        self.mapped(keep)
        return found

    def with_tensors(self, tensors: Iterable[Tensor]) -> AttentionInputs:
        """Return the call with other tensors, given in the order of `mapped`."""
        others = iter(tensors)
        return self.mapped(lambda _: next(others))

    def excluded(self) -> Tensor | None:
        """Return (B|1, 1, T, S), True where a key is excluded, or None if no mask applies."""
        masked = None
        if self.causal and (is_exported() or self.positions.highest_distance > 0):
            masked = (self.positions.distance() > 0)[None, None]
        if self.window is not None and (is_exported() or self.positions.lowest_distance <= -self.window):
            masked = _either(masked, (self.positions.distance() <= -self.window)[None, None])
        if self.documents is not None:
            of_query = self.positions.query_rows(self.documents)
            other = of_query[:, :, None] != self.documents[:, None, :]
            masked = _either(masked, other[:, None])
        if self.key_padding is not None:
            masked = _either(masked, self.key_padding[:, None, None, :])
        return masked


def of_rows(x: Tensor, rows: Tensor) -> Tensor:
    """Return (B, H, S, ...), slot j of row b being that of row `rows[b, j]` of x (B', H, S, ...); rows is (B, S|1)."""
    return x[rows, :, torch.arange(x.size(2), device=x.device)].transpose(1, 2)


def _either(masked: Tensor | None, more: Tensor) -> Tensor:
    return more if masked is None else masked | more


def _rows_of(term: PositionTerms, start: int, stop: int) -> PositionTerms:
    if term.static_factors is None:
        return term
    query, key = term.static_factors
    return replace(term, static_factors=(query[:, :, start:stop], key))


def _keys_of(term: PositionTerms, stop: int) -> PositionTerms:
    if term.decay is not None:
        return replace(term, decay=term.decay.mapped(lambda sums: sums[:, :, :stop]))
    if term.static_factors is None:
        return term
    query, key = term.static_factors
    return replace(term, static_factors=(query, key[:, :, :stop]))


def _mapped(term: PositionTerms, change: Callable[[Tensor], Tensor]) -> PositionTerms:
    changed: dict[str, Any] = {}  # fields by name, each of its own type
    for name in term.present:
        value = getattr(term, name)
        if isinstance(value, Tensor):
            changed[name] = change(value)
        elif name in ("static_factors", "position_factors"):
            changed[name] = (change(value[0]), change(value[1]))
        elif name == "dense_bias":
            changed[name] = DenseBias(value.form, tuple(change(tensor) for tensor in value.tensors))
        elif name == "mixing":
            changed[name] = Mixing(*map(change, value))
        elif name == "decay":
            changed[name] = value.mapped(change)
        elif name == "reset":
            changed[name] = Reset(change(value.row), change(value.column), value.first)
    return replace(term, **changed)


def required(value: T | None) -> T:
    """Return a part of a term, or of a call, that stands there since another part needs it."""
    if value is None:
        raise TypeError("a part is missing that another part of the term or call needs")
    return value


def distances_of(term: PositionTerms) -> DistanceRelation:
    """Return the relation of a term whose tables are read by distance alone."""
    if not isinstance(term.relation, DistanceRelation):
        raise TypeError(f"a table over {term.relation} is not read by distance")
    return term.relation


def probabilities(logits: Tensor, excluded: Tensor | None, padded: bool) -> Tensor:
    """Return the softmax over the keys that are not excluded; a row without such keys gives 0.

    Args:
        logits: (B, H, T, S).
        excluded: (B|1, 1, T, S) or None.
        padded: whether all keys of a row may be excluded.
    """
    if excluded is None:
        return logits.softmax(dim=-1)
    probs = logits.masked_fill(excluded, torch.finfo(logits.dtype).min).softmax(dim=-1)
    return probs.masked_fill(excluded, 0.0) if padded else probs


def drop(probs: Tensor, probability: float, generator: torch.Generator | None = None) -> Tensor:
    """Drop probabilities (dropout), before values and value vectors are weighted by them.

    Args:
        probs: (B, H, T, S).
        probability: of being dropped.
        generator: of the random numbers; None: torch's default.
    """
    if not probability:
        return probs
    if generator is None:
        return F.dropout(probs, probability)
    kept = torch.empty_like(probs).bernoulli_(1 - probability, generator=generator)
    return probs * kept.div_(1 - probability)
