"""The members of a hybrid at one place, evaluated together: what layers see and decoding keeps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from relpos_fairseq.positions import Positions
from relpos_fairseq.scheme import PositionScheme
from relpos_fairseq.terms import Decay, PositionTerms

LEAST_CAPACITY = 32  # decoding makes room for 32, 64, 128, ... tokens


class Evaluated(NamedTuple):
    """What members come to for some positions.

    Args:
        prepared: each member's content-free part.
        terms: the terms of all members, one after the other.
        members: the same, a tuple a member.
    """

    prepared: tuple[Any, ...]
    terms: tuple[PositionTerms, ...]
    members: tuple[tuple[PositionTerms, ...], ...]

    def at(self, positions: Positions) -> Evaluated:
        """Return the same with all factors read by position."""
        if all(term.position_factors is None for term in self.terms):
            return self
        members = tuple(tuple(term.at(positions) for term in terms) for terms in self.members)
        return Evaluated(self.prepared, sum(members, ()), members)


class SchemeStack(nn.ModuleList):
    """The members of a hybrid that stand at one place: in a layer, or shared by all layers.

    Args:
        schemes: the members.
        layer: the layer that they stand in; 0 too where layers share them.
    """

    def __init__(self, schemes: Iterable[PositionScheme] = (), layer: int = 0) -> None:
        super().__init__(schemes)
        self.layer = layer

    def embed(self, positions: Positions) -> Tensor | None:
        """Sum what the members add to the input: (B|1, T, E) or None."""
        return _sum(scheme.embed(positions) for scheme in self)

    def prepare(self, positions: Positions) -> tuple[Any, ...]:
        return tuple(scheme.prepare(positions) for scheme in self)

    def terms(self, prepared: tuple[Any, ...], positions: Positions) -> tuple[PositionTerms, ...]:
        return self.evaluated(prepared, positions).at(positions).terms

    def evaluated(self, prepared: tuple[Any, ...], positions: Positions) -> Evaluated:
        """Return what was prepared, with the members' terms, whose factors are not yet read by position."""
        pairs = zip(self, prepared, strict=True)
        members = tuple(scheme.terms(part, positions) for scheme, part in pairs)
        return Evaluated(prepared, sum(members, ()), members)

    def evaluate(self, positions: Positions) -> Evaluated:
        """Return what the members prepare, and their terms."""
        return self.evaluated(self.prepare(positions), positions).at(positions)

    def log_gates(self, source: Tensor) -> Tensor | None:
        """Sum the members' log gates for a layer's input (S, B, E): (B, H|1, S, sides) or None."""
        return _sum(scheme.log_gates(source) for scheme in self)

    def gated(self, source: Tensor) -> tuple[PositionTerms, ...]:
        """Return what the members' gates contribute for a layer's input (S, B, E)."""
        return decay_of(self.log_gates(source))


def _sum(parts: Iterable[Tensor | None]) -> Tensor | None:
    """Sum those that are there, None without any."""
    found = [part for part in parts if part is not None]
    return sum(found[1:], found[0]) if found else None


def decay_of(gates: Tensor | None) -> tuple[PositionTerms, ...]:
    """Return the term of log gates (B, H|1, S, sides), none without any."""
    return () if gates is None else (PositionTerms(decay=Decay.of_gates(gates)),)


def rotation_of(pairs: Iterable[tuple[PositionScheme, Any]]) -> tuple[PositionScheme, Any] | None:
    """Return the first member that transforms queries and keys, with its prepared part."""
    return next((pair for pair in pairs if pair[0].rotates), None)


@dataclass(frozen=True)
class PositionContext:
    """What a layer's attention needs of positions.

    Args:
        positions: where queries and keys stand.
        causal: keys in a query's future are excluded.
        shared: the terms that all layers share.
        rotation: the scheme that transforms queries and keys, with its prepared part, or None.
        memory: (M, B, E) input of the key and value projections for the slots before the
            queries' tokens, or None; the positions count these slots.
        window: how many slots a query sees, the last of them its own; None: all.
        documents: (B, S) document number of each slot, or None; other documents are excluded.
        parts: (shared, rotation) of each part of a plan whose layers differ; `of_layer` chooses.
    """

    positions: Positions
    causal: bool
    shared: tuple[PositionTerms, ...] = ()
    rotation: tuple[PositionScheme, Any] | None = None
    memory: Tensor | None = None
    window: int | None = None
    documents: Tensor | None = None
    parts: tuple[tuple[tuple[PositionTerms, ...], tuple[PositionScheme, Any] | None], ...] = ()

    def of_layer(self, layer: int) -> PositionContext:
        """Return what the attention of one layer, counted from 0, needs."""
        if not self.parts:
            return self
        shared, rotation = self.parts[layer % len(self.parts)]
        return replace(self, shared=shared, rotation=rotation, parts=())


class DecodingTerms:
    """What schemes prepare, and their terms, kept between the steps of decoding.

    Parts are prepared for more tokens than there are, so that many steps are served.  Where tokens
    stand in order, a step's factors stay tables, which attention reads at the last position.
    """

    def __init__(self) -> None:
        self._capacity = 0
        self._gradients = False
        self._prepared: tuple = ()
        self._last = Evaluated((), (), ())
        self._moving = True
        self._limited: list[PositionScheme] = []

    def evaluate(self, schemes: SchemeStack, positions: Positions) -> Evaluated:
        """Do as `SchemeStack.evaluate`, with what earlier steps left."""
        if any(scheme.by_length for scheme in schemes):
            return schemes.evaluate(positions)
        # What was prepared without gradients has none to give to a step that wants them.
        if self._capacity < positions.src_len or self._gradients != torch.is_grad_enabled():
            self._prepare(schemes, positions)
            self._form(schemes, positions)
        elif self._moving:
            self._form(schemes, positions)
        else:
            for scheme in self._limited:
                scheme.check_length(positions)
        in_order = positions.token_index is None and positions.drawn is None
        return self._last if positions.is_step and in_order else self._last.at(positions)

    def _form(self, schemes: SchemeStack, positions: Positions) -> None:
        self._last = schemes.evaluated(self._prepared, positions)
        terms = self._last.terms
        # What moves with the query: a reset, and factors that a scheme read itself.
        self._moving = any(term.reset is not None or term.static_factors is not None for term in terms)
        members = zip(schemes, self._last.members, strict=True)
        self._limited = [scheme for scheme, own in members if any(term.position_factors for term in own)]

    def _prepare(self, schemes: SchemeStack, positions: Positions) -> None:
        self._capacity = length = capacity_for(positions.src_len)
        self._gradients = torch.is_grad_enabled()
        start = length - positions.tgt_len
        self._prepared = schemes.prepare(replace(positions, src_len=length, query_start=start))


def capacity_for(length: int) -> int:
    """Return how many tokens decoding makes room for, once it holds `length`."""
    return max(LEAST_CAPACITY, 1 << (length - 1).bit_length())
