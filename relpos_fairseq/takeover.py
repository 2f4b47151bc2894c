"""Takeover: the parameters of one scheme on their way into another's tables.

What a scheme's `takes_over` is made of.  q and k stand at the target's scale already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from relpos_fairseq.scheme import PositionScheme
from relpos_fairseq.tables import reread


class Report(Protocol):
    """Where a conversion says what it lost."""

    def lose(self, text: str, moved: float = 0.0) -> None:
        """Say what the target cannot express, and how far a table moved."""

    def limit(self, text: str) -> None:
        """Say for which inputs alone the conversion is exact."""


@dataclass(frozen=True)
class Takeover:
    """One layer's parameters of a scheme.

    Args:
        params: the source's, by name.
        old: the source.
        new: the target, with its initial values.
        report: where losses are said.
    """

    params: dict[str, Tensor]
    old: PositionScheme
    new: PositionScheme
    report: Report

    def across(self, name: str) -> Tensor:
        """Return a table over distances as the target's relation reads it."""
        old, new = self.old.relation, self.new.relation
        length = self.new.shape.max_positions
        table, error, beyond = reread(self.params[name], old, new, length)
        if error:
            self.report.lose(f"{self.old.name}: {name} over {old} is averaged over {new}", error)
        elif beyond:
            self.report.limit(f"inputs of up to {length} tokens ({self.new.name} reads its ends beyond)")
        gain = self.old.scalar_gain / self.new.scalar_gain
        return table if gain == 1 else table * gain

    def reset(self) -> dict[str, Tensor]:
        """Return the reset's parameter, where the source has one."""
        return {name: value for name, value in self.params.items() if name == "theta"}

    def zeros(self, name: str, like: Tensor) -> Tensor:
        """Return zeros for a parameter of the target, for as many heads as `like` has."""
        return like.new_zeros(like.size(0), *getattr(self.new, name).shape[1:])


def identity(like: Tensor, dim: int) -> Tensor:
    """Return a unit matrix (heads, dim, dim) for each head of `like` (heads, ...)."""
    return torch.eye(dim, dtype=like.dtype, device=like.device).expand(like.size(0), dim, dim)
