"""Li et al. 2024, Functional Interpolation for Relative Positions, FIRE (arXiv:2310.04418), eq. 7.

    e_ij = q_i . k_j / sqrt(d) + f_h( psi(|j - i|) / psi(max(L, i)) ),   psi(x) = log(|c x| + 1)

f is a network with one input, `WIDTH` rectified units and an output a head; i counts from 0.

    c -> `rate`, from 0.1;  L = |m| --position-fire-threshold: m -> `stretch`, from 1;
    f -> `hidden_weight`, `hidden_bias`, `output_weight`, with the initial values of torch's Linear

The released code adds 1e-6 to the denominator, as here.  Its f has a last bias, which would be added to
all logits of a row, where softmax ignores it: it is left out.  The paper is causal, so that i is the
largest distance that a query sees; in an encoder of n tokens that is max(i, n - 1 - i).

While no distance exceeds L the logits are a table over distances, which every backend reads.  With
longer distances they depend on the row: kernels refuse them, and `blocked` computes them for each block.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from relpos_fairseq.core.options import RESET_CLS, SCALE, SHARE, Factor
from relpos_fairseq.core.positions import Positions, is_captured
from relpos_fairseq.core.relations import Clipped
from relpos_fairseq.core.scheme import AttentionShape, PositionScheme, SchemeInfo, SchemeOptions, Table, register_scheme
from relpos_fairseq.core.terms import DenseBias, PositionTerms

WIDTH, EPSILON = 32, 1e-6
THRESHOLD = Factor(
    name="fire_threshold",
    place=120,
    help="distance from which on distances are measured by the longest that a query sees, before it is learned",
    auto=512.0,
)


@register_scheme("fire")
class Fire(PositionScheme):
    """A learned function of the distance relative to the longest."""

    info = SchemeInfo(
        220,
        "Li 2024 eq. 7",
        "q·k/√d + f(ψ(|j-i|)/ψ(max(L, i))), ψ(x) = log(cx + 1)",
        "c 0.1, L 512, f as torch's Linear",
    )
    takes = frozenset({SCALE, SHARE, RESET_CLS, THRESHOLD})
    default_share = "none"
    tables = {
        "rate": Table(has_heads=False),
        "stretch": Table(has_heads=False),
        "hidden_weight": Table(has_heads=False),
        "hidden_bias": Table(has_heads=False),
        "output_weight": Table(neutral=0.0),
    }

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Create the scalars `rate` and `stretch`, and the weights of f; `output_weight` is (heads|1, WIDTH)."""
        super().__init__(shape, options)
        self.rate = nn.Parameter(torch.full((1,), 0.1))
        self.stretch = nn.Parameter(torch.ones(1))
        self.hidden_weight, self.hidden_bias = self._uniform(WIDTH), self._uniform(WIDTH)
        self.output_weight = nn.Parameter(self._uniform(self.table_heads, WIDTH) * WIDTH**-0.5)

    def _uniform(self, *size: int) -> nn.Parameter:
        """Draw from U(-1, 1)."""
        return nn.Parameter(2 * torch.rand(*size, generator=self._generator()) - 1)

    @classmethod
    def counts_tokens(cls, options: SchemeOptions) -> bool:
        """Return True: rows beyond the threshold depend on the largest distance that they see."""
        return True

    def prepare(self, positions: Positions) -> PositionTerms:
        """Return the term without its reset: a table over distances, or dense logits beyond the threshold."""
        exact = torch.promote_types(self.rate.dtype, torch.float32)
        parts = tuple(p.to(exact) for name, p in self.named_parameters() if name != "theta")
        threshold = self.options.fire_threshold
        relation = Clipped.unclipped(positions)
        # A captured graph computes dense logits, which are right for any length.
        if is_captured() or max(relation.past, relation.future) > threshold * abs(float(self.stretch.detach())):
            return PositionTerms(dense_bias=DenseBias(partial(_dense_logits, threshold, self.shape.causal), parts))
        distance = relation.distances(positions.device).abs()
        static = _logits(parts, distance, distance.new_zeros(1), threshold)
        return PositionTerms(relation=relation, static=static.movedim(-1, 0))

    def terms(self, prepared: PositionTerms, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return the prepared term with its reset."""
        return (prepared.with_reset(self.reset_at(positions)),)


def _dense_logits(threshold: float, causal: bool, parts: tuple[Tensor, ...], positions: Positions) -> Tensor:
    """Return the logits (B|1, heads|1, T, S) of the rows of `positions`."""
    longest = positions.query_index()  # (B|1, T)
    if not causal:
        longest = torch.maximum(longest, positions.last_index()[:, None] - longest)
    distance = positions.position_distance().abs()  # (T, S)
    return _logits(parts, distance, longest[..., None], threshold).movedim(-1, 1)


def _logits(parts: tuple[Tensor, ...], distance: Tensor, longest: Tensor, threshold: float) -> Tensor:
    """Return f (..., heads|1) of distances (...), given the longest distance that each query sees."""
    rate, stretch, hidden_weight, hidden_bias, output_weight = parts
    far = torch.maximum((stretch * threshold).abs(), longest.to(rate.dtype))
    x = (rate * distance).abs().log1p() / ((rate * far).abs().log1p() + EPSILON)
    hidden = (x[..., None] * hidden_weight + hidden_bias).relu()
    return hidden @ output_weight.t()
