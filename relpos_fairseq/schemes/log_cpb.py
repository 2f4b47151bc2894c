"""Liu et al. 2022, Swin Transformer V2 (arXiv:2111.09883), section 3.3: log-spaced continuous position bias.

    e_ij = q_i . k_j / sqrt(d) + g(f_h(sign(j - i) log(1 + |j - i|)))

f is a network with one input, --position-cpb-width units and an output per head, of two published forms
(--position-cpb-form):

    swin     rectified units, g(x) = 16 sigmoid(x), N(0, 0.02), biases 0: Swin's released code
    dynamic  SiLU, g(x) = x, initial values of torch's Linear: x-transformers' DynamicPositionBias of one hidden
             layer (`log_distance=True`, `depth=1`), whose width is a quarter of the model's

    f -> `hidden_weight`, `hidden_bias`, `output_weight`

A constant that is added to all logits is left out, as softmax ignores it: the last bias of `dynamic`, and 8 of
16 sigmoid(x) = 8 + 8 tanh(x / 2).  Swin's images have two distances, of windows; its code divides them by the
window's (times 8) before the logarithm, and by log 8 after it: f absorbs the second, and text has no window for
the first.  Swin's cosines of q and k in place of q . k / sqrt(d) are not here.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.core.options import RESET_CLS, SCALE, SHARE, Choice, Number
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped
from relpos_fairseq.core.scheme import AttentionShape, PositionScheme, SchemeInfo, SchemeOptions, Table, register_scheme
from relpos_fairseq.core.terms import PositionTerms

FORM = Choice(
    name="cpb_form",
    place=126,
    help="of the network that makes a bias of a distance: swin (bounded) or dynamic (x-transformers')",
    auto="swin",
    choices=("swin", "dynamic"),
)
WIDTH = Number(
    name="cpb_width", place=127, help="units of the network that makes a bias of a distance", auto=512, least=1
)


@register_scheme("log_cpb")
class LogCpb(PositionScheme):
    """A learned function of the logarithm of the signed distance."""

    info = SchemeInfo(225, "Liu 2022 §3.3", "q·k/√d + 16σ(f(sign(j-i) log(1 + |j-i|)))", "N(0, 0.02), biases 0")
    takes = frozenset({SCALE, SHARE, RESET_CLS, FORM, WIDTH})
    default_share = "none"
    tables = {
        "hidden_weight": Table(has_heads=False),
        "hidden_bias": Table(has_heads=False),
        "output_weight": Table(neutral=0.0),
    }

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Create the weights of f: `hidden_weight`, `hidden_bias` (W,), and `output_weight` (heads|1, W)."""
        super().__init__(shape, options)
        width, uniform = options.cpb_width, options.cpb_form == "dynamic"
        std = 3**-0.5 if uniform else 0.02  # U(-1, 1), torch's for one input
        self.hidden_weight = self.draw(width, std=std, uniform=uniform)
        self.hidden_bias = self.draw(width, std=std if uniform else 0.0, uniform=uniform)
        self.output_weight = self.draw(
            self.table_heads, width, std=(3 * width) ** -0.5 if uniform else std, uniform=uniform
        )

    def prepare(self, positions: Positions) -> tuple[Clipped, Tensor]:
        """Return the relation over the distances that occur, and the biases (heads|1, R)."""
        relation = Clipped.unclipped(positions)
        exact = torch.promote_types(self.hidden_weight.dtype, torch.float32)
        hidden_weight, hidden_bias, output_weight = (
            part.to(exact) for part in (self.hidden_weight, self.hidden_bias, self.output_weight)
        )
        distance = relation.distances(positions.device).to(exact)
        x = distance.sign() * distance.abs().log1p()
        hidden = x[:, None] * hidden_weight + hidden_bias  # (R, W)
        if self.options.cpb_form == "dynamic":
            return relation, output_weight @ F.silu(hidden).t()
        return relation, 8 * (output_weight @ hidden.relu().t() / 2).tanh()

    def terms(self, prepared: tuple[Clipped, Tensor], positions: Positions) -> tuple[PositionTerms, ...]:
        """Return the biases."""
        relation, static = prepared
        return (PositionTerms(relation=relation, static=static, reset=self.reset_at(positions)),)
