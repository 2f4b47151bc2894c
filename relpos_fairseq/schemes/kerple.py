"""Chi et al. 2022, KERPLE (arXiv:2205.09921), the logarithmic kernel (the paper's best).

e_ij = q_i . k_j / sqrt(d) - r_1 log(1 + r_2 |j - i|),   r_1, r_2 > 0 a head and layer

r_1 -> `amplitude`, r_2 -> `rate`, started uniformly in (0, 2) and (0, 1) and kept at 0.01 or
more, as the released code does.  On |j - i| in an encoder.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relpos_fairseq.core.options import RESET_CLS, SCALE, SHARE
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped
from relpos_fairseq.core.scheme import AttentionShape, PositionScheme, SchemeInfo, SchemeOptions, Table, register_scheme
from relpos_fairseq.core.terms import PositionTerms

LEAST = 0.01  # the released code's bound on both parameters


@register_scheme("kerple")
class Kerple(PositionScheme):
    """A learned logarithmic penalty on distance."""

    info = SchemeInfo(210, "Chi 2022", "q·k/√d - r₁ log(1 + r₂|j-i|)", "r₁ U(0, 2), r₂ U(0, 1)")
    takes = frozenset({SCALE, SHARE, RESET_CLS})
    default_share = "none"
    tables = {"amplitude": Table(), "rate": Table()}
    never_neutral = "its penalty is kept above zero"

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Make `amplitude` and `rate`: (heads|1,) each."""
        super().__init__(shape, options)
        heads = self.table_heads
        self.amplitude = nn.Parameter(2 * torch.rand(heads, generator=self._generator()))
        self.rate = nn.Parameter(torch.rand(heads, generator=self._generator()))

    def prepare(self, positions: Positions) -> tuple[Clipped, Tensor]:
        """Return the relation over the distances that occur, and the penalties (heads|1, R)."""
        relation = Clipped.unclipped(positions)
        distance = relation.distances(positions.device).abs()
        exact = torch.promote_types(self.rate.dtype, torch.float32)
        amplitude, rate = (bound_below(part.to(exact))[:, None] for part in (self.amplitude, self.rate))
        return relation, -amplitude * torch.log1p(rate * distance.to(exact))

    def terms(self, prepared: tuple[Clipped, Tensor], positions: Positions) -> tuple[PositionTerms, ...]:
        """Return the penalties."""
        relation, static = prepared
        return (PositionTerms(relation=relation, static=static, reset=self.reset_at(positions)),)


def bound_below(value: Tensor) -> Tensor:
    """Return max(value, LEAST) with the gradient of `value`, so that training can leave the bound."""
    return value + (value.clamp(min=LEAST) - value).detach()
