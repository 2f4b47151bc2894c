"""Su et al. 2021, RoFormer: Rotary Position Embedding (arXiv:2104.09864), eq. 34.

    e_ij = (R_i q_i) . (R_j k_j) / sqrt(d),   R_m rotates pair c by m theta_c, theta_c = b^(-2c/d)

The rotation comes after the projection, in each head, so that the logits depend on j - i alone.  The
last channel of an odd head_dim is not rotated; --position-rope-share rotates the first share of the
channels alone, whose number is then d (GPT-NeoX).  Angles are computed in at least fp32.

Inputs longer than those of training have angles that training has not seen: `core/rotation.py` has other
angles for them.  log_n multiplies a query by max(1, log n_i / log L), n_i the keys that it may see, L
the length in training (Su 2021, spaces.ac.cn/archives/8823; Chiang and Cholak 2022, 2202.12172).

Angles that depend on the number of tokens n rotate every token otherwise in a longer input, and the layers above
see it.  A generation therefore scales all its steps by one n, the longest that it may become
(`placement.generation_of`): a step equals the full pass of that n.  transformers rotates each step by the number
of its tokens, which no full pass does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from relpos_fairseq.core.options import SCALE
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.rotation import (
    BASE,
    FACTOR,
    LOG_N,
    PAIRS,
    SCALING,
    SCALINGS,
    SHARE_OF_CHANNELS,
    SHORTEST,
    Rotary,
    Turns,
    check_scaling,
    frequencies,
    rotate,
    scales_by_length,
)
from relpos_fairseq.core.scheme import (
    AttentionShape,
    ConversionSource,
    PositionScheme,
    SchemeInfo,
    SchemeOptions,
    register_scheme,
)


@dataclass(frozen=True)
class Rotations:
    """The rotations of queries and keys.

    Args:
        turns: the rotation of every slot.
        temperature: (S, 1) or (B, 1, S, 1) factors of the queries, or None.
    """

    turns: Turns
    temperature: Tensor | None


def _other_options(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from other options: report other angles, or the inputs for which they are the same."""
    old, new = cast(Rope, source.old), cast(Rope, source.new)
    for option in sorted((BASE, PAIRS, SHARE_OF_CHANNELS), key=lambda option: option.place):
        before, after = (getattr(scheme.options, option.name) for scheme in (old, new))
        if before != after:
            source.report.lose(f"rope: {option.name} {after} instead of {before}")
    parts = (*SCALINGS, LOG_N)
    if any(getattr(old.options, part.name) != getattr(new.options, part.name) for part in parts):
        fixed = [s.options for s in (old, new) if s.scales and not s.scales_by_length]
        for options in fixed:
            source.report.lose(f"rope: {options.rope_scaling} by {options.rope_factor:g}")
        if not fixed:
            source.report.limit(min(old.trained_length, new.trained_length), "rope")
    return source.params


@register_scheme("rope")
class Rope(PositionScheme):
    """Rotations of query and key by their slots."""

    info = SchemeInfo(190, "Su 2021 eq. 34", "(Rᵢq)·(Rⱼk)/√d", "fixed")
    takes = frozenset({SCALE, *SCALINGS, LOG_N, BASE, SHARE_OF_CHANNELS, PAIRS})
    rotates = True
    never_neutral = "it has no parameter, and rotates q and k"
    convert_from = {"rope": _other_options}

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Keep the trained length in the checkpoint, so that later flags of the longest input do not change it."""
        super().__init__(shape, options)
        length = options.rope_length or max(shape.max_positions, SHORTEST)
        # "version" in the name keeps fairseq's moving average of weights from averaging it.
        self.register_buffer("length_version", torch.tensor(length))
        self.trained_length: int = length  # L, as a number that torch.export knows

    @classmethod
    def check_options(cls, options: SchemeOptions, shape: AttentionShape) -> None:
        """Raise an error for a base <= 1, a share of less than 2 channels, and a factor < 1 or without scaling."""
        share, factor = options.rope_share, options.rope_factor
        if options.rope_base <= 1:
            raise ValueError(f"rope_base must be > 1, got {options.rope_base:g} ({BASE.flag})")
        if not 2 <= int(share * shape.head_dim) <= max(shape.head_dim, 2):
            raise ValueError(
                f"rope_share must leave 2 to {shape.head_dim} channels of head_dim "
                f"{shape.head_dim} to rotate, got {share:g} ({SHARE_OF_CHANNELS.flag})"
            )
        if factor is not None and (factor < 1 or options.rope_scaling == "none"):
            raise ValueError(
                f"{FACTOR.flag} {factor:g} needs {SCALING.flag} (got {options.rope_scaling}), and must be >= 1"
            )
        check_scaling(options, int(share * shape.head_dim) // 2)

    @classmethod
    def counts_tokens(cls, options: SchemeOptions) -> bool:
        """Tell whether angles or temperature depend on the number of tokens."""
        return scales_by_length(options) or options.rope_log_n == "on"

    @property
    def by_length(self) -> bool:
        """True if the rotation depends on the number of tokens."""
        return self.counts_tokens(self.options)

    @property
    def scales(self) -> bool:
        """True if angles are rescaled."""
        return self.options.rope_scaling != "none"

    @property
    def scales_by_length(self) -> bool:
        """True if angles are rescaled only beyond the training length."""
        return scales_by_length(self.options)

    @property
    def pairs(self) -> int:
        """Number of pairs of channels that are rotated."""
        return int(self.options.rope_share * self.shape.head_dim) // 2

    def rotary(self) -> Rotary | None:
        """Return its rotation as other libraries have it, if it is as published or scaled linearly."""
        options = self.options
        scaling, fixed = options.rope_scaling, not self.by_length
        if not fixed or scaling not in ("none", "linear"):
            return None
        adjacent = options.rope_pairs != "halves"
        return Rotary(options.rope_base, 2 * self.pairs, adjacent, options.rope_factor or 1.0)

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        key = f"{prefix}length_version"
        if key not in state_dict or self.options.rope_length is not None:
            state_dict = {**state_dict, key: self.length_version}
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        self.trained_length = int(state_dict[key])

    def prepare(self, positions: Positions) -> Rotations:
        """Return the rotations of every slot."""
        place = positions.slot_positions().double()
        tokens = positions.scaling_lengths() if self.by_length else None  # (B|1,)
        frequency, size = frequencies(
            self.options, self.pairs, self.trained_length, tokens, positions.device
        )  # (P,) or (B|1, 1, 1, P)
        turns = Turns(place[:, None] * frequency, size)
        if self.options.rope_log_n == "off":
            return Rotations(turns, None)
        if self.shape.causal:
            seen = positions.key_number() + 1  # (B|1, S)
        else:
            seen = positions.row_lengths()[:, None].expand(-1, positions.src_len)
        temperature = (seen.double().clamp(min=1).log() / math.log(self.trained_length)).clamp(min=1)
        return Rotations(turns, temperature[:, None, :, None])

    def turns(self, prepared: Rotations, start: int) -> tuple[Tensor, bool] | None:
        """Return each slot's turns, unless queries have a temperature or rows other angles."""
        turn = prepared.turns.of(torch.float32, start, None)
        known = prepared.temperature is None and turn.dim() == 2
        return (turn, self.options.rope_pairs == "halves") if known else None

    def transform_query(self, q: Tensor, prepared: Rotations, start: int) -> Tensor:
        """Rotate each row by its slot's angles, and multiply it by its temperature."""
        turned = self.transform_key(q, prepared, start)
        if prepared.temperature is None:
            return turned
        rows = prepared.temperature[..., start : start + q.size(2), :]
        return (turned * rows.to(torch.promote_types(q.dtype, torch.float32))).to(q.dtype)

    def transform_key(self, k: Tensor, prepared: Rotations, start: int) -> Tensor:
        """Rotate each row by its slot's angles."""
        turn = prepared.turns.of(k.dtype, start, start + k.size(2))
        return rotate(k, turn, self.options.rope_pairs == "halves")
