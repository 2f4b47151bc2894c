"""The members of a hybrid at one place, evaluated together, and what decoding keeps of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.positions import Positions
from relpos_fairseq.scheme import PositionScheme
from relpos_fairseq.terms import PositionTerms

LEAST_CAPACITY = 32  # decoding makes room for 32, 64, 128, ... tokens


class SchemeStack(nn.ModuleList):
    """The members of a hybrid that stand at one place: in a layer, or shared by all layers."""

    def embed(self, positions: Positions) -> Tensor | None:
        """Sum what the members add to the input: (B|1, T, E) or None."""
        added = [part for scheme in self if (part := scheme.embed(positions)) is not None]
        return sum(added[1:], added[0]) if added else None

    def prepare(self, positions: Positions) -> tuple[Any, ...]:
        """Prepare each member's content-free part."""
        return tuple(scheme.prepare(positions) for scheme in self)

    def terms(self, prepared: tuple[Any, ...], positions: Positions) -> tuple[PositionTerms, ...]:
        """Return the members' terms, one after the other."""
        pairs = zip(self, prepared, strict=True)
        return tuple(term for scheme, part in pairs for term in scheme.terms(part, positions))

    def evaluate(self, positions: Positions) -> tuple[tuple, tuple[PositionTerms, ...]]:
        """Return what the members prepare, and their terms."""
        prepared = self.prepare(positions)
        return prepared, self.terms(prepared, positions)

    def rotation(self, prepared: tuple[Any, ...]) -> tuple[PositionScheme, Any] | None:
        """Return the member that transforms queries and keys, with its prepared part."""
        pairs = zip(self, prepared, strict=True)
        return next((pair for pair in pairs if pair[0].rotates), None)


class DecodingTerms:
    """What schemes prepare, and their terms, kept between the steps of decoding.

    Parts are prepared for more tokens than there are, so that many steps are served.
    """

    def __init__(self) -> None:
        self._capacity = 0
        self._gradients = False
        self._prepared: tuple = ()
        self._terms: tuple[PositionTerms, ...] = ()

    def evaluate(
        self, schemes: SchemeStack, positions: Positions
    ) -> tuple[tuple, tuple[PositionTerms, ...]]:
        """Do as `SchemeStack.evaluate`, with what earlier steps left."""
        # What was prepared without gradients has none to give to a step that wants them.
        if self._capacity < positions.src_len or self._gradients != torch.is_grad_enabled():
            self._prepare(schemes, positions)
        elif not self._moving:
            return self._prepared, self._terms
        self._terms = schemes.terms(self._prepared, positions)
        return self._prepared, self._terms

    @property
    def _moving(self) -> bool:
        """Whether terms depend on where the query stands, as only factors and a reset do."""
        return any(
            term.static_factors is not None or term.reset is not None for term in self._terms
        )

    def _prepare(self, schemes: SchemeStack, positions: Positions) -> None:
        self._capacity = length = capacity_for(positions.src_len)
        self._gradients = torch.is_grad_enabled()
        start = length - positions.tgt_len
        self._prepared = schemes.prepare(replace(positions, src_len=length, query_start=start))


def capacity_for(length: int) -> int:
    """Return how many tokens decoding makes room for, once it holds `length`."""
    return max(LEAST_CAPACITY, 1 << (length - 1).bit_length())
