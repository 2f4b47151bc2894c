"""Chi et al. 2023, Dissecting Transformer Length Extrapolation, Sandwich (arXiv:2212.10356).

    e_ij = q_i . k_j / sqrt(d) + 1/r_h sum_c cos((i - j) / 10000^(2c/D)),   r_h = 8 h / H for h = 1..H

The sum is the inner product of the sinusoids of i and j, for D channels: D -> --position-sandwich-dim.
c counts 0..D/2 - 1, as in the authors' listing; their equation writes 1..D/2.
The paper is causal; the cosine is even, so that an encoder sees |i - j|.  Nothing is learned.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.core.options import RESET_CLS, SCALE, Number
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped, sinusoid_of_distance
from relpos_fairseq.core.scheme import AttentionShape, PositionScheme, SchemeInfo, SchemeOptions, register_scheme
from relpos_fairseq.core.terms import PositionTerms

DIM = Number(name="sandwich_dim", place=124, help="channels of the sinusoids, an even number", auto=128, least=2)


@register_scheme("sandwich")
class Sandwich(PositionScheme):
    """A fixed bias that falls about as the logarithm of distance, from sinusoids."""

    info = SchemeInfo(205, "Chi 2023, App. E", "q·k/√d + H/(8h) Σ_c cos((i-j)/10000^(2c/D))", "fixed")
    takes = frozenset({SCALE, RESET_CLS, DIM})
    never_neutral = "it has no parameter, and falls with distance"

    @classmethod
    def check_options(cls, options: SchemeOptions, shape: AttentionShape) -> None:
        """Raise an error for an odd number of channels: each frequency has two."""
        if options.sandwich_dim % 2:
            raise ValueError(f"sandwich_dim must be even, got {options.sandwich_dim} ({DIM.flag})")

    def prepare(self, positions: Positions) -> tuple[Clipped, Tensor]:
        """Return the relation over the distances that occur, and the biases (H, R)."""
        relation, dim = Clipped.unclipped(positions), self.options.sandwich_dim
        distance = relation.distances(positions.device).double()
        bias = sinusoid_of_distance(distance, dim)[:, dim // 2 :].sum(-1)  # (R,)
        heads = torch.arange(1, self.shape.num_heads + 1, device=positions.device, dtype=torch.float64)
        return relation, self.shape.num_heads / (8 * heads)[:, None] * bias

    def terms(self, prepared: tuple[Clipped, Tensor], positions: Positions) -> tuple[PositionTerms, ...]:
        """Return the biases."""
        relation, static = prepared
        return (PositionTerms(relation=relation, static=static, reset=self.reset_at(positions)),)
