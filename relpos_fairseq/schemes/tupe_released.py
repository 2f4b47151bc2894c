"""TUPE as Ke et al. released it (arXiv:2006.15595, guolinke/TUPE): the rows "Ke et al." of 004.

    e_ij = q_i . k_j / sqrt(2d) + reset( Q_i . K_j / sqrt(2d) + s_bucket(j - i) , i, j)
    Q_i = W_Q norm(p_i) + b_Q,  K_j = W_K norm(p_j) + b_K

    p -> `position_table`, norm -> `norm_weight`, `norm_bias`, W_Q, b_Q -> `query_projection`,
    `query_bias`, W_K, b_K -> `key_projection`, `key_bias`, s -> `bias_table`, reset -> `theta`

What differs from 003's form (`tupe`): p has the width of the model and a layer norm, the
projections have biases, s has T5's 32 buckets up to 128, and one of each serves all layers.  The
code writes the reset as p.p + s of rows that nothing else reads; `theta` is that sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from relpos_fairseq.options import INIT, RESET_CLS, SCALE
from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import Bucketed
from relpos_fairseq.scheme import AttentionShape, PositionScheme, SchemeCard, SchemeOptions, register_scheme
from relpos_fairseq.tables import WITH_BOTH, Table
from relpos_fairseq.terms import PositionTerms

BUCKETS, MAX_DISTANCE = 32, 128  # rel_pos_bins and max_rel_pos
EPSILON = 1e-5


@register_scheme("tupe_released")
class TupeReleased(PositionScheme):
    """Normalised absolute positions apart from the content, and bucketed scalars."""

    card = SchemeCard(
        165, "Ke 2020, released code", "q·k/√(2d) + reset_θ(Q(pᵢ)·K(pⱼ)/√(2d) + s_bucket)", "p, W, s N(0, 0.02); b, θ 0"
    )
    takes = frozenset({SCALE, RESET_CLS, INIT})
    own_scale = 2.0
    absolute = True
    table_limited = True
    resets_by_default = True
    tables = {
        "position_table": Table(rows="position", has_heads=False),
        "norm_weight": Table(has_heads=False),
        "norm_bias": Table(has_heads=False),
        "query_projection": Table(neutral=0.0, grows=WITH_BOTH, flat_heads=True),
        "query_bias": Table(neutral=0.0, grows=WITH_BOTH, flat_heads=True),
        "key_projection": Table(flat_heads=True),
        "key_bias": Table(flat_heads=True),
        "bias_table": Table(rows="distance", neutral=0.0),
    }

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """`position_table`: (max_positions, E); projections: (E, E); `bias_table`: (H, buckets)."""
        super().__init__(shape, options)
        width = shape.embed_dim
        self.position_table = self.draw(shape.max_positions, width, std=0.02)
        self.norm_weight = nn.Parameter(torch.ones(width))
        self.norm_bias = nn.Parameter(torch.zeros(width))
        for name in ("query", "key"):
            setattr(self, f"{name}_projection", self.draw(width, width, std=0.02))
            setattr(self, f"{name}_bias", nn.Parameter(torch.zeros(width)))
        self.bias_table = self.draw(shape.num_heads, BUCKETS, std=0.02)

    @property
    def relation(self) -> Bucketed:
        """T5's buckets."""
        return Bucketed(BUCKETS, MAX_DISTANCE, not self.shape.causal)

    def prepare(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Q / sqrt(2d) and K of every position that may occur: (H, S, D)."""
        used = self.position_table[: positions.stop]
        used = F.layer_norm(used, used.shape[1:], self.norm_weight, self.norm_bias, EPSILON)
        query = F.linear(used, self.query_projection, self.query_bias) * self.scale
        key = F.linear(used, self.key_projection, self.key_bias)
        heads = (self.shape.num_heads, -1)
        return tuple(part.unflatten(1, heads).transpose(0, 1) for part in (query, key))

    def terms(self, prepared: tuple[Tensor, Tensor], positions: Positions) -> tuple[PositionTerms, ...]:
        """Return the product and s, reset together."""
        self.check_length(positions)
        reset = self.reset_at(positions)
        return (PositionTerms(self.relation, static=self.bias_table, position_factors=prepared, reset=reset),)
