"""What the flags come to: the members of a hybrid, their options, and what they share.

`config.resolve` makes a `PositionPlan` of the flags; `placement` builds schemes from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from relpos_fairseq.options import SCALE, AttentionShape, SchemeOptions, in_order
from relpos_fairseq.scheme import PositionScheme


@dataclass(frozen=True)
class SchemePlan:
    """One member of a resolved hybrid: a class, and the options it is built with."""

    scheme: type[PositionScheme]
    options: SchemeOptions

    @property
    def across_layers(self) -> bool:
        """Whether one instance serves all layers."""
        return self.options.share in ("layers", "both") or self.scheme.default_share is None


@dataclass(frozen=True)
class PositionPlan:
    """A resolved stack (an encoder or a decoder): its members and everything they share."""

    name: str
    members: tuple[SchemePlan, ...]
    scale_constant: float
    segment_encoding: str
    segment_share: str
    num_segments: int
    backend: str
    shape: AttentionShape

    @property
    def scale(self) -> float:
        """What q.k is multiplied by."""
        return (self.scale_constant * self.shape.head_dim) ** -0.5

    @property
    def absolute(self) -> bool:
        """Whether any member reads absolute positions."""
        return any(plan.scheme.absolute for plan in self.members)

    @property
    def longest(self) -> int | None:
        """Longest input that the tables allow, or None."""
        limited = any(plan.scheme.table_limited for plan in self.members)
        return self.shape.max_positions if limited else None

    def describe(self) -> str:
        """Return the line that a checkpoint remembers and a resume is compared with.

        The scale is the hybrid's, and stands once.
        """
        parts = [self.name]
        for plan in self.members:
            for option in in_order(plan.scheme.takes):
                if option.remembered and option is not SCALE:
                    value = getattr(plan.options, option.name)
                    parts.append(f"{plan.scheme.name}.{option.name}={value}")
        parts.append(f"scale={self.scale_constant:g}")
        shared = f" segments.share={self.segment_share}" * (self.segment_encoding == "head")
        count = f" segments.count={self.num_segments}" * (self.num_segments != 2)
        parts.append(f"segments={self.segment_encoding}{shared}{count}")
        return " ".join(parts)
