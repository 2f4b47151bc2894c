"""PositionPlan: which position schemes an encoder or decoder has, with what options, and how a checkpoint names them.

`config.resolve` makes it from the flags, `placement` builds it, and `conversion` compares two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relpos_fairseq.core.options import RANDOM_AT, RANDOM_RANGE, SCALE, AttentionShape, SchemeOptions, in_order
from relpos_fairseq.core.scheme import PositionScheme


@dataclass(frozen=True)
class SchemePlan:
    """One member of a hybrid: its class, and the options with which it is built."""

    scheme: type[PositionScheme]
    options: SchemeOptions

    @property
    def across_layers(self) -> bool:
        """True if all layers share one instance of the scheme."""
        return self.options.share in ("layers", "both") or self.scheme.default_share is None


@dataclass(frozen=True)
class PositionPlan:
    """The position schemes of an encoder or decoder: the members of its hybrid, and what they share.

    Where layers have different schemes, `parts` are the plans of the first layers, repeated over
    the others (layer n has part n modulo their number); `members` are then those of all parts.
    """

    name: str
    members: tuple[SchemePlan, ...]
    scale_constant: float
    segment_encoding: str
    segment_share: str
    num_segments: int
    backend: str
    shape: AttentionShape
    parts: tuple[PositionPlan, ...] = ()

    def __post_init__(self) -> None:
        """Raise an error for members that this kind of attention, or its longest input, does not allow."""
        for scheme in (member.scheme for member in self.members):
            if scheme.causal_only and not self.shape.causal:
                raise ValueError(
                    f"position scheme {self.name}: {scheme.name} counts back from a query that "
                    f"sees no later key, as decoders do: give the encoder another "
                    f"(--encoder-position-scheme)"
                )
            if scheme.table_limited and self.random_range > self.shape.max_positions:
                raise ValueError(
                    f"{RANDOM_RANGE.flag} {self.random_range}: the table of position scheme "
                    f"{scheme.name} has {self.shape.max_positions} positions: give "
                    f"{self.shape.length_flag} {self.random_range}"
                )
        if self.always_random and (self.shape.causal or not self.random_range):
            reason = (
                "a decoder writes token by token, and each would move those before it: leave it out"
                if self.shape.causal
                else f"nothing is drawn: give {RANDOM_RANGE.flag}"
            )
            raise ValueError(f"{RANDOM_AT.flag} always: {reason}")

    @classmethod
    def of_parts(cls, parts: tuple[PositionPlan, ...]) -> PositionPlan:
        """Combine plans, one for each of the first layers, into the plan of all layers.

        Raises:
            ValueError: a member that acts on the input, which all layers share, is not in all parts,
                or `auto` means something else for a member in one part than in another.
        """
        if len(parts) == 1:
            return parts[0]
        name = "/".join(part.name for part in parts)
        members: dict[type[PositionScheme], SchemePlan] = {}
        for member in (member for part in parts for member in part.members):
            scheme = member.scheme
            if members.setdefault(scheme, member).options != member.options:
                one, other = vars(members[scheme].options), vars(member.options)
                odd = next(key for key in one if one[key] != other[key])
                raise ValueError(
                    f"position scheme {name}: {odd} of {scheme.name} would be {one[odd]} in one "
                    f"layer and {other[odd]} in another: give --position-{odd.replace('_', '-')}"
                )
            lacks = [p.name for p in parts if all(m.scheme is not scheme for m in p.members)]
            if scheme.own_scale is None and lacks:
                raise ValueError(
                    f"position scheme {name}: {scheme.name} is added to the input, which all "
                    f"layers read: join it to {' and '.join(lacks)} too ({scheme.name}+...)"
                )
        return replace(parts[0], name=name, members=tuple(members.values()), parts=parts)

    def of_layer(self, layer: int) -> PositionPlan:
        """Return the plan of one layer, counted from 0."""
        return self.parts[layer % len(self.parts)] if self.parts else self

    def check_layers(self, count: int) -> None:
        """Raise an error if the plan has more parts than the model has layers.

        Raises:
            ValueError: names the scheme and the number of layers.
        """
        if count and len(self.parts) > count:
            raise ValueError(
                f"position scheme {self.name} is for {len(self.parts)} layers, and "
                f"{self.shape.seed_name or 'the model'} has {count}: leave some out, or build "
                f"more layers"
            )

    @property
    def scale(self) -> float:
        """The factor of q.k in the first part; that of a layer is in the plan of `of_layer`."""
        return (self.scale_constant * self.shape.head_dim) ** -0.5

    @property
    def absolute(self) -> bool:
        return any(plan.scheme.absolute for plan in self.members)

    @property
    def random_range(self) -> int:
        """The number of positions from which training draws those of a batch at random; 0: positions are the slots."""
        return max(getattr(plan.options, RANDOM_RANGE.name, 0) for plan in self.members)

    @property
    def always_random(self) -> bool:
        values = (getattr(plan.options, RANDOM_AT.name, "training") for plan in self.members)
        return "always" in values

    @property
    def longest(self) -> int | None:
        """The longest input that the tables allow, or None without a limit."""
        limited = any(plan.scheme.table_limited for plan in self.members)
        return self.shape.max_positions if limited else None

    def agrees(self, described: str) -> bool:
        """Tell whether a checkpoint with this description (`describe`) may be loaded.

        An option that may be chosen after training may differ from a checkpoint that does not mention it.
        """
        afterwards = {
            f"{plan.scheme.name}.{option.name}"
            for plan in self.members
            for option in plan.scheme.takes
            if option.afterwards
        }
        known = [part.split("=")[0] for part in described.split()]
        free = afterwards.difference(known)
        ours = [part for part in self.describe().split() if part.split("=")[0] not in free]
        return ours == described.split()

    def describe(self) -> str:
        """Return schemes and options in one line, which a checkpoint remembers and a resume must repeat.

        The scale is the hybrid's, and is mentioned once.
        """
        parts = [self.name]
        for plan in self.members:
            for option in in_order(plan.scheme.takes):
                entry = option.memory(getattr(plan.options, option.name), self.shape)
                if entry is not None and option is not SCALE:
                    parts.append(f"{plan.scheme.name}.{entry}")
        scales = [f"{part.scale_constant:g}" for part in self.parts or (self,)]
        parts.append(f"scale={'/'.join(scales if len(set(scales)) > 1 else scales[:1])}")
        shared = f" segments.share={self.segment_share}" * (self.segment_encoding == "head")
        count = f" segments.count={self.num_segments}" * (self.num_segments != 2)
        parts.append(f"segments={self.segment_encoding}{shared}{count}")
        return " ".join(parts)


def encode_text(text: str) -> Tensor:
    """Return text as character codes (int64, so that averaging checkpoints keeps them)."""
    return torch.tensor(list(text.encode()), dtype=torch.long)


def decode_text(codes: Tensor) -> str:
    """Return the text that `encode_text` turned into `codes`."""
    return bytes(codes.tolist()).decode()
