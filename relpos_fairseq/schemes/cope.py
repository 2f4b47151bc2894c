"""Golovneva et al. 2024, Contextual Position Encoding (CoPE; arXiv:2405.18719), eq. 3-5.

    g_ij = sigmoid(q_i . k_j / sqrt(d)),   p_ij = sum_{l = j..i} g_il
    e_ij = q_i . (k_j + e[p_ij]) / sqrt(d)

e -> `table`, whose rows stand for p = 0, 1, .., n - 1; e is interpolated between them, and p beyond
n - 1 reads the last row.  As in the released code e starts at 0, with one table a layer for all its
heads; n is --position-contexts (auto: max_positions + 1).  Keys that a query must not see are not
counted.

A query counts back from itself, so that only decoders can use the scheme.  A position needs all logits
of its row first: no kernel serves it, and a call holds several (T, S) matrices a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from relpos_fairseq.options import SCALE, SHARE, Number
from relpos_fairseq.positions import Positions
from relpos_fairseq.scheme import (
    WITH_K,
    AttentionShape,
    PositionScheme,
    SchemeInfo,
    SchemeOptions,
    Table,
    register_scheme,
)
from relpos_fairseq.terms import PositionTerms

CONTEXTS = Number(
    name="contexts",
    place=135,
    help="number of contextual positions with a vector of their own",
    auto=lambda shape: shape.max_positions + 1,
    auto_help="the longest input + 1",
    least=2,
)


@register_scheme("cope")
class Cope(PositionScheme):
    """Vectors read at contextual positions, which are sums of gates of the query's logits."""

    info = SchemeInfo(250, "Golovneva 2024 eq. 3-5", "(q·k + q·e[Σ_{l=j..i} σ(q·k_l/√d)])/√d", "0")
    takes = frozenset({SCALE, SHARE, CONTEXTS})
    default_share = "heads"
    uses_positions = False
    causal_only = True
    tables = {"table": Table(neutral=0.0, grows=WITH_K)}

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Create the parameter `table`: (heads|1, n, D)."""
        super().__init__(shape, options)
        size = (self.table_heads, options.contexts, shape.head_dim)
        self.table = nn.Parameter(torch.zeros(size))

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return q.e at contextual positions."""
        return (PositionTerms(contextual=self.table),)
