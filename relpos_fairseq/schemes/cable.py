"""Veisi et al. 2025, Context-aware Biases for Length Extrapolation (CABLE; arXiv:2503.08067v3), eq. 2-7.

    e_ij = q_i . k_j / sqrt(d) - softplus(u . x_i + c) sum_{l = j+1..i} relu(w . x_l + b)

x_l is the layer's input at token l, as for q and k; for each head w -> `gate_weight`, b -> `gate_bias`,
u -> `slope_weight`, c -> `slope_bias`.  The sum is S_i - S_j of the paper's cumulative sums S; each token's
part is cached with its key.

What the text leaves open is as in the released code (compared: its K-CABLE, less the kernel).  Eq. 5 has
no sign, but calls the biases penalties, and the code sums -relu; the code's layers have biases b and c;
weights start at N(0, 0.02), b and c at 0.  The paper trains a BERT too but has no equation for it: the code
takes -|S_i - S_j|, the same sum for keys after the query.

With w = u = 0 it is ALiBi.  CABLE_NW is the case softplus(u . x_i + c) = 1; with the softplus of the code
of the paper's first version in place of relu, it is `fox` of the opposite w and b.  Not here: the ablation
K-CABLE, which adds -log(B^2 + 1) for a bias B.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from relpos_fairseq.core.gates import log_sigmoid, of_tokens
from relpos_fairseq.core.options import SCALE
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.scheme import ConversionSource, PositionScheme, SchemeInfo, Table, register_scheme


def _from_slopes(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from alibi: w = u = 0, b = m, the penalty of one step, and softplus(c) = 1."""
    _, penalties = source.old.prepare(Positions(2, 2))  # (H, 3), of the distances -1, 0, 1
    new = {name: torch.zeros_like(source.new.get_parameter(name)) for name in Cable.tables}
    one = math.log(math.expm1(1.0))
    return new | {"gate_bias": -penalties[:, :1].to(new["gate_bias"]), "slope_bias": new["slope_bias"] + one}


@register_scheme("cable")
class Cable(PositionScheme):
    """Penalties that each token sets for each head, added up between query and key, and weighted by the query."""

    info = SchemeInfo(
        245, "Veisi 2025 eq. 2-7", "q·k/√d - softplus(u·xᵢ + c) Σ_{l=j+1..i} relu(w·x_l + b)", "w, u N(0, 0.02), b, c 0"
    )
    takes = frozenset({SCALE})
    default_share = "none"
    uses_positions = False
    tables = {
        "gate_weight": Table("num_heads 1 embed_dim", std=0.02),
        "gate_bias": Table("num_heads 1"),
        "slope_weight": Table("num_heads 1 embed_dim", std=0.02),
        "slope_bias": Table("num_heads 1"),
    }
    never_neutral = "its penalties do not learn where they are 0"
    convert_from = {"alibi": _from_slopes}
    gate_weight: nn.Parameter  # (H, 1, E)
    gate_bias: nn.Parameter  # (H, 1)
    slope_weight: nn.Parameter  # (H, 1, E)
    slope_bias: nn.Parameter  # (H, 1)

    def log_gates(self, source: Tensor) -> Tensor:
        """Return the negative penalty of each token: (B, H, S, sides), the same on both sides."""
        penalties = of_tokens(source, self.gate_weight, self.gate_bias).relu()
        return -penalties.expand(-1, -1, -1, 1 if self.shape.causal else 2)

    def gate_weights(self, source: Tensor) -> Tensor:
        """Return the slope of each token: (B, H, S)."""
        return -log_sigmoid(-of_tokens(source, self.slope_weight, self.slope_bias))[..., 0]
