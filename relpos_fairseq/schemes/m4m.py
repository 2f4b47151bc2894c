"""M4M: Multiplicative Position-aware Transformer Models, eq. 11.

    e_ij = (q_i . k_j) (q_i . a_r) (k_j . a_r) / sqrt(d),  r = clip(j - i, -k, k)     a -> `table`

The paper gives no initial values.  a ~ N(0, 0.02) makes attention uniform, and its gradients vanish.
Here every a_r starts at the same vector a, and the projections' biases make q . a = k . a = 1: b_q = 1
on the even channels, b_k = 1 on the odd ones, a_c = 2/d.  Then (q.a)(k.a) is 1 up to noise of order
1/sqrt(d), and since b_q . b_k = 0 the biases add no constant to q.k: near-plain attention.
--position-init paper leaves the biases unchanged and draws a from N(0, 0.02), as BERT's tables start.
The three factors and their product are computed in at least fp32 (the product exceeds 65504).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from relpos_fairseq.core.options import CLIP_DISTANCE, INIT, SCALE, SHARE
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.scheme import AttentionShape, PositionScheme, SchemeInfo, SchemeOptions, Table, register_scheme
from relpos_fairseq.core.terms import PositionTerms


@register_scheme("m4m")
class M4M(PositionScheme):
    """The terms of M4, multiplied."""

    info = SchemeInfo(
        130,
        "M4M eq. 11",
        "(q·k)(q·aᵣ)(k·aᵣ)/√d",
        "aᵣ = 2/d, biases of q, k so that q·a ≈ k·a ≈ 1",
        published="785K (M4M Table 5)",
    )
    takes = frozenset({SCALE, SHARE, CLIP_DISTANCE, INIT})
    default_share = "heads"
    clip = "vectors"
    tables = {"table": Table(rows="distance", grows=(-0.5, -0.5))}
    never_neutral = "it multiplies q.k by (q.a)(k.a), which is 1 for no table"

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Create the parameter `table`: (heads|1, R, D)."""
        super().__init__(shape, options)
        size = (self.table_heads, self.clipped.size, shape.head_dim)
        if options.init == "paper":
            self.table = self.draw(*size, std=0.02)
            return
        even = (shape.head_dim + 1) // 2
        neutral = torch.full(size, 1.0 / even)
        if shape.head_dim > 1:
            neutral[..., 1::2] = 1.0 / (shape.head_dim - even)
        self.table = nn.Parameter(neutral)

    def start_neutral(self) -> None:
        """Keep the default initialisation: no values are exactly neutral, and it is the closest to neutral."""

    def initialize_projections(self, q_proj: nn.Linear, k_proj: nn.Linear) -> None:
        """Set the biases of q and k so that q.a and k.a start near 1."""
        if self.options.init == "paper":
            return
        channel = torch.arange(self.shape.embed_dim) % self.shape.head_dim
        odd = channel % 2 if self.shape.head_dim > 1 else torch.ones_like(channel)
        even = 1 - odd if self.shape.head_dim > 1 else odd
        with torch.no_grad():
            q_proj.bias.copy_(even)
            k_proj.bias.copy_(odd)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return (q.a_r)(k.a_r), which multiplies the content."""
        term = PositionTerms(relation=self.clipped, query_vectors=self.table, key_vectors=self.table, product=True)
        return (term,)
