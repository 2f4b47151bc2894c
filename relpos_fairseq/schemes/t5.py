"""Raffel et al. 2019, T5 (arXiv:1910.10683), in the form of M4M eq. 4 and Chen2021 eq. 4.

    e_ij = (q_i . k_j + s_bucket(j - i)) / sqrt(d)      s -> `bias_table`

Both papers divide the sum, so --position-scale changes both alike.  The released T5 does not divide
by sqrt(d) at all (its initialisation absorbs the factor); Chen2021 eq. 8, REL-SCALAR, adds its scalars
after the division (`rel_scalar`).  One table, per head, serves all layers, as in T5.  In a causal decoder
all buckets are for the past.

M4M as written has no buckets: 2n - 1 scalars a layer that heads share (its Table 5: 12K), which is
--position-buckets 0 --position-share heads.  Its fine-tuning diverged (M4M section 3.1).

--position-scalar-gain is 1 by default, as in the papers: 50 made a short training of a character
model better at its own lengths, and worse at 4 and 8 times them (examples/comparison/scalars).
"""

from __future__ import annotations

from typing import Any

from relpos_fairseq.core.options import INIT, RESET_CLS, SCALAR_GAIN, SCALE, SHARE, Number
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Bucketed, Clipped
from relpos_fairseq.core.scheme import (
    WITH_BOTH,
    AttentionShape,
    PositionScheme,
    SchemeInfo,
    SchemeOptions,
    Table,
    register_scheme,
)
from relpos_fairseq.core.terms import PositionTerms

BUCKETS = Number(
    name="buckets",
    place=60,
    help="number of buckets; 0: none, a scalar for each distance of the longest input",
    auto=32,
)
MAX_DISTANCE = Number(name="max_distance", place=70, help="distance of the last bucket", auto=128, least=1)


@register_scheme("t5")
class T5(PositionScheme):
    """One scalar per head and logarithmic bucket of distance, added to the logits."""

    info = SchemeInfo(
        80,
        "Raffel 2019; M4M eq. 4",
        "(q·k + s_bucket)/√d",
        "N(0, 0.02)",
        published="12K (M4M Table 5)",
        difference="M4M counts m(2n-1) scalars; T5 has 32 buckets x 12 heads for all layers",
    )
    takes = frozenset({SCALE, SHARE, BUCKETS, MAX_DISTANCE, RESET_CLS, SCALAR_GAIN, INIT})
    default_share = "layers"
    tables = {"bias_table": Table(rows="distance", neutral=0.0, grows=WITH_BOTH)}

    @classmethod
    def check_options(cls, options: SchemeOptions, shape: AttentionShape) -> None:
        """Raise an error for too few buckets, and a largest distance that has a bucket of its own."""
        least = 2 if shape.causal else 4
        if options.buckets < least:
            if options.buckets:
                raise ValueError(f"buckets must be >= {least}, got {options.buckets} ({BUCKETS.flag})")
            return
        exact = options.buckets // (2 if shape.causal else 4)
        if options.max_distance <= exact:
            raise ValueError(
                f"max_distance must exceed the {exact} distances that have a bucket of their own, "
                f"got {options.max_distance} ({MAX_DISTANCE.flag}; or lower {BUCKETS.flag})"
            )

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Create the parameter `bias_table`: (heads|1, buckets), or one scalar for each distance."""
        super().__init__(shape, options)
        self.bias_table = self.draw(self.table_heads, self.relation.size, std=0.02 / self.scalar_gain)

    @property
    def relation(self) -> Bucketed | Clipped:
        """Logarithmic buckets, in a decoder for the past alone; or clipped distances."""
        if not self.options.buckets:
            return self.clipped
        return Bucketed(self.options.buckets, self.options.max_distance, not self.shape.causal)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return s / sqrt(d), in logit units."""
        term = PositionTerms(
            relation=self.relation,
            static=self.bias_table * (self.scale * self.scalar_gain),
            reset=self.reset_at(positions),
        )
        return (term,)
