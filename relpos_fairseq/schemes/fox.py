"""Lin et al. 2025, Forgetting Transformer: Softmax Attention with a Forget Gate (arXiv:2503.02130).

    e_ij = q_i . k_j / sqrt(d) + sum_{l = j+1..i} log f_l,   f_l = sigmoid(w . x_l + b)      eq. 6-8

x_l is the layer's input at token l (after the layer norm of a pre-norm layer, as for q and k),
w -> `gate_weight`, b -> `gate_bias`, for each head.  A gate is computed from its own token alone and
cached with the token's key.  As in the released code, w starts at N(0, 0.02) and b at 0, and there is no
other position encoding; `fox+rope` adds the rotation of its variant.

The paper is causal.  In an encoder keys after the query have gates of their own, counted as
x-transformers does: sum_{l = i+1..j} log g_l for j > i.  With w = 0 it is ALiBi, of slopes -log f.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relpos_fairseq.core.gates import log_sigmoid, of_tokens
from relpos_fairseq.core.options import SCALE
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.scheme import ConversionSource, PositionScheme, SchemeInfo, Table, register_scheme


def _from_slopes(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from alibi: w = 0 and log sigmoid(b) = -m, the penalty of one step: b = -log(e^m - 1)."""
    _, penalties = source.old.prepare(Positions(2, 2))  # (H, 3), of the distances -1, 0, 1
    bias = -torch.expm1(-penalties[:, :1].double()).log()
    weight, old_bias = (source.new.get_parameter(name) for name in ("gate_weight", "gate_bias"))
    return {"gate_weight": torch.zeros_like(weight), "gate_bias": bias.expand(old_bias.shape)}


@register_scheme("fox")
class Fox(PositionScheme):
    """A forget gate a token and head, whose logarithms add up between query and key."""

    info = SchemeInfo(240, "Lin 2025 eq. 6-8", "q·k/√d + Σ_{l=j+1..i} log σ(w·x_l + b)", "w N(0, 0.02), b 0")
    takes = frozenset({SCALE})
    default_share = "none"
    uses_positions = False
    tables = {"gate_weight": Table("num_heads sides embed_dim", std=0.02), "gate_bias": Table("num_heads sides")}
    never_neutral = "its gates stay below 1"
    convert_from = {"alibi": _from_slopes}
    gate_weight: nn.Parameter  # (H, sides, E)
    gate_bias: nn.Parameter  # (H, sides)

    @property
    def sides(self) -> int:
        """How many sides of a query have keys: a decoder has one."""
        return 1 if self.shape.causal else 2

    def log_gates(self, source: Tensor) -> Tensor:
        """Return log f of each token: (B, H, S, sides)."""
        return log_sigmoid(of_tokens(source, self.gate_weight, self.gate_bias))
