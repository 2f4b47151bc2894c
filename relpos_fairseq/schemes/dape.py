"""Zheng et al. 2024, DAPE: Data-Adaptive Positional Encoding for Length Extrapolation (arXiv:2405.14722).

    e_ij = a_ij + b_ij + f(a_ij, b_ij),   f(x) = W_2 leaky_relu(W_1 x + c_1) + c_2

a_ij and b_ij hold content q_i . k_j / sqrt(d) and position logits of all H heads, so that f reads 2 H numbers
and gives H.  W_1, c_1 -> `hidden_weight`, `hidden_bias`, W_2, c_2 -> `output_weight`, `output_bias`.  b is that
of the schemes with which it is joined: `dape+kerple`; alone b = 0.  The sum, the width of 32, the slope of
leaky_relu (0.01) and the initial values are the released code's.
"""

from __future__ import annotations

from typing import Any

from relpos_fairseq.core.options import SCALE
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.scheme import AttentionShape, PositionScheme, SchemeInfo, SchemeOptions, Table, register_scheme
from relpos_fairseq.core.terms import Mixing, PositionTerms

WIDTH = 32


@register_scheme("dape")
class Dape(PositionScheme):
    """A perceptron over the logits of all heads, content and positions, of each pair."""

    info = SchemeInfo(248, "Zheng 2024", "a + b + f(a, b), over heads", "as torch's Linear")
    takes = frozenset({SCALE})
    default_share = "none"
    uses_positions = False
    tables = {
        "hidden_weight": Table(has_heads=False),
        "hidden_bias": Table(has_heads=False),
        "output_weight": Table(neutral=0.0),
        "output_bias": Table(neutral=0.0),
    }

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Create f's parameters, each uniform as in torch's Linear."""
        super().__init__(shape, options)
        heads = shape.num_heads
        for name, size, fan_in in (
            ("hidden_weight", (WIDTH, 2 * heads), 2 * heads),
            ("hidden_bias", (WIDTH,), 2 * heads),
            ("output_weight", (heads, WIDTH), WIDTH),
            ("output_bias", (heads,), WIDTH),
        ):
            setattr(self, name, self.draw(*size, std=(3 * fan_in) ** -0.5, uniform=True))

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return f."""
        parts = (getattr(self, name) for name in self.tables)
        return (PositionTerms(mixing=Mixing(*parts)),)
