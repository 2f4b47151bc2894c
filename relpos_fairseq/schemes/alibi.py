"""Press et al. 2022, ALiBi: Train Short, Test Long (arXiv:2108.12409).

    e_ij = q_i . k_j / sqrt(d) - m_h |j - i|,   m_h = 2^(-8 h / H) for h = 1..H

For a number of heads that is no power of two the released code takes the slopes of the next lower
power and every second one of the next higher.  The paper is causal; in an encoder the distance is
symmetric, as its authors suggest.  Nothing is learned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.options import RESET_CLS, SCALE
from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import Clipped
from relpos_fairseq.scheme import PositionScheme, SchemeInfo, register_scheme
from relpos_fairseq.terms import PositionTerms


def slopes(heads: int) -> list[float]:
    """Return the head-specific slopes m_h, steepest first."""
    power = 1 << (heads.bit_length() - 1)
    values = [2.0 ** (-8.0 * (h + 1) / power) for h in range(power)]
    if power < heads:
        values += slopes(2 * power)[0::2][: heads - power]
    return values


@register_scheme("alibi")
class Alibi(PositionScheme):
    """A fixed linear penalty on distance."""

    info = SchemeInfo(200, "Press 2022", "q·k/√d - m_h|j-i|", "fixed")
    takes = frozenset({SCALE, RESET_CLS})
    never_neutral = "it has no parameter, and penalises distance"

    def prepare(self, positions: Positions) -> tuple[Clipped, Tensor]:
        """Return the relation over the distances that occur, and the penalties (H, R)."""
        relation = Clipped.unclipped(positions)
        distance = relation.distances(positions.device).abs()
        steepness = torch.tensor(slopes(self.shape.num_heads), dtype=torch.float64)
        return relation, -steepness.to(positions.device)[:, None] * distance

    def terms(self, prepared: tuple[Clipped, Tensor], positions: Positions) -> tuple[PositionTerms, ...]:
        """Return the penalties."""
        relation, static = prepared
        return (PositionTerms(relation=relation, static=static, reset=self.reset_at(positions)),)
