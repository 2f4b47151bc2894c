"""Golovneva et al. 2024, Contextual Position Encoding (CoPE; arXiv:2405.18719), eq. 3-5 and the listing.

    g_ij = sigmoid(q_i . k_j / sqrt(d)),   p_ij = sum_{l = j..i} g_il
    e_ij = q_i . k_j / sqrt(d) + q_i . e[p_ij]

e -> `table`, whose rows stand for p = 0, 1, .., n - 1; e is interpolated between them, and p beyond
n - 1 reads the last row.  As in the released code e starts at 0, with one table a layer for all its
heads; n is --position-contexts (auto: max_positions + 1).  Keys that a query must not see are not
counted.

The text leaves open what is divided by sqrt(d): its eq. 5 has no scale, its listing divides q.k alone, and the
released code divides both unless --cope-nodiv is given.  The listing is followed; --position-contexts-scaled on
divides both.  --position-scale C divides all logits by sqrt(C).

A query counts back from itself, so that only decoders can use the scheme.  A position needs all logits
of its row first: no kernel serves it, and a call holds several (T, S) matrices a head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from relpos_fairseq.core.options import SCALE, SHARE, Choice, Number
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.scheme import (
    WITH_K,
    AttentionShape,
    PositionScheme,
    SchemeInfo,
    SchemeOptions,
    Table,
    register_scheme,
)
from relpos_fairseq.core.terms import PositionTerms

CONTEXTS = Number(
    name="contexts",
    place=135,
    help="number of contextual positions with a vector of their own",
    auto=lambda shape: shape.max_positions + 1,
    auto_help="the longest input + 1",
    least=2,
)
SCALED = Choice(
    name="contexts_scaled",
    place=136,
    help="on: products of queries and contextual vectors are divided by sqrt(d) too, as in the released code; "
    "off: they are not, as in the paper's listing",
    auto="off",
)


@register_scheme("cope")
class Cope(PositionScheme):
    """Vectors read at contextual positions, which are sums of gates of the query's logits."""

    info = SchemeInfo(250, "Golovneva 2024 eq. 3-5", "q·k/√d + q·e[Σ_{l=j..i} σ(q·k_l/√d)]", "0")
    takes = frozenset({SCALE, SHARE, CONTEXTS, SCALED})
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
        """Return q.e at contextual positions; attention divides the product by sqrt(d)."""
        divided = self.options.contexts_scaled == "on"
        return (PositionTerms(contextual=self.table if divided else self.table * math.sqrt(self.shape.head_dim)),)
