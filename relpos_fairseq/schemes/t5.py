"""Raffel et al. 2019, T5 (arXiv:1910.10683), in the form of 003 eq. 4 (004 eq. 4).

    e_ij = (q_i . k_j + s_bucket(j - i)) / sqrt(d)      s -> `bias_table`

The released T5 does not divide by sqrt(d) at all (its initialisation absorbs the factor), and 004
adds s after the division: 003's form is the contract; --position-scale changes both alike.  One
table, per head, serves all layers, as in T5.  A causal decoder spends all buckets on the past.
"""

from __future__ import annotations

from typing import Any

from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import Bucketed
from relpos_fairseq.scheme import (
    AttentionShape,
    PositionScheme,
    SchemeCard,
    SchemeOptions,
    register_scheme,
)
from relpos_fairseq.terms import PositionTerms


@register_scheme("t5")
class T5(PositionScheme):
    """A scalar a head and logarithmic bucket of distance."""

    card = SchemeCard(
        80,
        "Raffel 2019; 003 eq. 4",
        "(q·k + s_bucket)/√d",
        "N(0, 0.02)",
        published="12K (003 Table 5)",
        difference="003 counts m(2n-1) scalars; T5 has 32 buckets x 12 heads for all layers",
    )
    takes = frozenset({"scale", "share", "buckets", "max_distance", "reset_cls"})
    default_share = "layers"

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """`bias_table`: (heads|1, buckets)."""
        super().__init__(shape, options)
        self.relation = Bucketed(options.buckets, options.max_distance, not shape.causal)
        self.bias_table = self.draw(self.table_heads, options.buckets, std=0.02)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """S / sqrt(d), in logit units."""
        term = PositionTerms(
            relation=self.relation,
            static=self.bias_table * self.scale,
            reset=self.reset_at(positions),
        )
        return (term,)
