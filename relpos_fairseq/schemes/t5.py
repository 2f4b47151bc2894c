"""Raffel et al. 2019, T5 (arXiv:1910.10683), in the form of 003 eq. 4 (004 eq. 4).

    e_ij = (q_i . k_j + s_bucket(j - i)) / sqrt(d)      s -> `bias_table`

The released T5 does not divide by sqrt(d) at all (its initialisation absorbs the factor), and 004
adds s after the division: 003's form is the contract; --position-scale changes both alike.  One
table, per head, serves all layers, as in T5.  A causal decoder spends all buckets on the past.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from relpos_fairseq.options import RESET_CLS, SCALE, SHARE, Number
from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import Bucketed
from relpos_fairseq.scheme import (
    AttentionShape,
    PositionScheme,
    SchemeCard,
    SchemeOptions,
    register_scheme,
)
from relpos_fairseq.tables import WITH_BOTH, Table
from relpos_fairseq.terms import PositionTerms

BUCKETS = Number(
    name="buckets",
    place=60,
    help="number of buckets",
    auto=32,
    auto_help="32",
    least=lambda shape: 2 if shape.causal else 4,
)
MAX_DISTANCE = Number(
    name="max_distance",
    place=70,
    help="distance of the last bucket",
    auto=128,
    auto_help="128",
    least=1,
)


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
    takes = frozenset({SCALE, SHARE, BUCKETS, MAX_DISTANCE, RESET_CLS})
    default_share = "layers"
    tables = {"bias_table": Table(rows="distance", neutral=0.0, grows=WITH_BOTH)}
    fitted = "bias_table"

    @classmethod
    def check_options(cls, options: SchemeOptions, shape: AttentionShape) -> None:
        """Refuse a last bucket that begins before the first of several distances."""
        exact = options.buckets // (2 if shape.causal else 4)
        if options.max_distance <= exact:
            raise ValueError(
                f"max_distance must exceed the {exact} distances that have a bucket of their own, "
                f"got {options.max_distance} ({MAX_DISTANCE.flag}; or lower {BUCKETS.flag})"
            )

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """`bias_table`: (heads|1, buckets)."""
        super().__init__(shape, options)
        self.bias_table = self.draw(self.table_heads, options.buckets, std=0.02)

    @property
    def relation(self) -> Bucketed:
        """Logarithmic buckets; a decoder's are of the past alone."""
        return Bucketed(self.options.buckets, self.options.max_distance, not self.shape.causal)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """S / sqrt(d), in logit units."""
        term = PositionTerms(
            relation=self.relation,
            static=self.bias_table * self.scale,
            reset=self.reset_at(positions),
        )
        return (term,)

    def factor(self, q: Tensor, k: Tensor) -> Tensor:
        """1 / sqrt(d)."""
        return q.new_full((*q.shape[:-1], 1), self.scale)
