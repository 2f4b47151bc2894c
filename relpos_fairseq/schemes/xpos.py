"""Sun et al. 2022, A Length-Extrapolatable Transformer, xPos (arXiv:2212.10554), section 3.

    e_ij = sum_c zeta_c^((i - j) / s) (R_i q_i)_c . (R_j k_j)_c / sqrt(d)

    zeta_c = (2c/d + 0.4) / 1.4 of pair c, R as RoPE's;  s -> --position-xpos-base (torchscale: 512)

Pairs that turn fast decay fast with distance.  The paper is causal; in an encoder the product with a
future key grows as that with a past key decays, as in torchscale.

zeta^(i/s) multiplies queries and zeta^(-j/s) keys.  Slots are counted from the middle of the trained
length, which changes no product and keeps both in the range of half precision (torchscale counts
from the middle of each input, which a cached key cannot follow).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.core.options import SCALE, Number
from relpos_fairseq.core.positions import Positions, is_captured
from relpos_fairseq.core.rotation import BASE, PAIRS, Turns, rotate
from relpos_fairseq.core.scheme import ConversionSource, PositionScheme, SchemeInfo, register_scheme

GAMMA = 0.4
XPOS_BASE = Number(
    name="xpos_base", place=130, help="tokens after which a pair's product decays by its zeta; 0: none does", auto=512
)


@dataclass(frozen=True)
class Decaying:
    """The complex factors of queries and keys at every slot.

    Args:
        queries: those of queries.
        keys: those of keys.
    """

    queries: Turns
    keys: Turns


def _from_rotations(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from rope or other options: report other rotations or another decay."""
    old, new = source.old.options, source.new.options
    alike = all(getattr(old, part.name) == getattr(new, part.name) for part in (BASE, PAIRS))
    plain = getattr(old, "rope_share", 1.0) == 1.0
    if not (alike and plain and getattr(old, "xpos_base", 0) == new.xpos_base):
        source.report.lose(f"{source.old.name}: other rotations, or decay over {new.xpos_base}")
    return source.params


@register_scheme("xpos")
class XPos(PositionScheme):
    """Rotations of query and key by their slots, and decay."""

    info = SchemeInfo(195, "Sun 2022 §3", "Σ_c ζ_c^((i-j)/s) (Rᵢq)_c·(Rⱼk)_c/√d", "fixed")
    takes = frozenset({SCALE, BASE, PAIRS, XPOS_BASE})
    rotates = True
    never_neutral = "it has no parameter, and rotates q and k"
    convert_from = {"rope": _from_rotations, "xpos": _from_rotations}

    def prepare(self, positions: Positions) -> Decaying:
        """Return the factors of every slot."""
        slot = positions.slot_positions().double()
        pairs = self.shape.head_dim // 2
        share = torch.arange(pairs, device=positions.device, dtype=torch.float64) / max(pairs, 1)
        angle = slot[:, None] * self.options.rope_base**-share
        if not self.options.xpos_base:
            turns = Turns(angle)
            return Decaying(turns, turns)
        exponent = (slot - self._middle)[:, None] / self.options.xpos_base
        size = ((share + GAMMA) / (1 + GAMMA)) ** exponent
        return Decaying(Turns(angle, size), Turns(angle, 1 / size))

    @property
    def _middle(self) -> int:
        return self.shape.max_positions // 2

    def transform_query(self, q: Tensor, prepared: Decaying, start: int) -> Tensor:
        """Rotate each row by its slot's angles, and decay it."""
        return self._multiply(q, prepared.queries, start)

    def transform_key(self, k: Tensor, prepared: Decaying, start: int) -> Tensor:
        """Rotate each row by its slot's angles, and let it grow."""
        return self._multiply(k, prepared.keys, start)

    def _multiply(self, x: Tensor, turns: Turns, start: int) -> Tensor:
        stop, base = start + x.size(2), self.options.xpos_base
        if is_captured():
            turn = turns.of(x.dtype, start, stop)
            return rotate(x, turn, self.options.rope_pairs == "halves")
        furthest = max(self._middle - start, stop - 1 - self._middle)
        growth = furthest * math.log((1 + GAMMA) / GAMMA) / base if base else 0.0
        if growth > math.log(torch.finfo(x.dtype).max) / 2:
            raise ValueError(
                f"xpos multiplies by e^{growth:.0f} at slot {stop - 1}, which {x.dtype} does not "
                f"hold: use bf16 or fp32, a larger {XPOS_BASE.flag} or shorter inputs"
            )
        turn = turns.of(x.dtype, start, stop)
        return rotate(x, turn, self.options.rope_pairs == "halves")
