"""He et al. 2020, DeBERTa (arXiv:2006.03654), in the form of 003 eq. 7.

    e_ij = (q_i . k_j + q_i . (a_r W^R) + k_j . (a_r W^T)) / sqrt(3d),  r = clip(j - i, -k, k)

    a -> `table`, W^R -> `query_projection`, W^T -> `key_projection`

He's text gathers the position-to-content term by delta(j, i), its released code by delta(i, j), as
the content-to-position term.  003 too reads the same a_r in both: --position-p2c-index same, the
default (once called `paper`, after 003); mirrored takes a_{-r} in the key term, as in He's text.
In 003 heads share a (of size d) and one W of d x d (its Table 5 counts one, which is
--position-projections one; eq. 7 has two, and so have we).  Released DeBERTa drops the content
projection's biases and shares W with them: not taken over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.options import CLIP_DISTANCE, INIT, PROJECTIONS, RESET_CLS, SCALE, SHARE, Choice, only
from relpos_fairseq.positions import Positions
from relpos_fairseq.scheme import AttentionShape, PositionScheme, SchemeCard, SchemeOptions, register_scheme
from relpos_fairseq.tables import WITH_K, WITH_Q, Table
from relpos_fairseq.takeover import Takeover, identity
from relpos_fairseq.terms import PositionTerms

P2C_INDEX = Choice(
    name="p2c_index",
    place=90,
    help="row of the key's term: same (a_r as the query's: 003 and DeBERTa's released code) or "
    "mirrored (a_{-r}: the equation in DeBERTa's paper)",
    auto="same",
    auto_help="same",
    choices=("same", "mirrored"),
    older={"paper": "same"},
)


def _from_keys_alone(source: Takeover) -> dict[str, Tensor]:
    """Take W^R = 1, W^T = 0."""
    table = source.across("key_table")
    one = identity(table, source.new.shape.head_dim)
    if source.new.options.projections == "one":
        source.report.lose("deberta: one projection multiplies keys as well as queries")
        return source.reset() | {"table": table, "projection": one}
    made = {"table": table, "query_projection": one, "key_projection": one * 0}
    return source.reset() | made


def _from_one_table(source: Takeover) -> dict[str, Tensor]:
    """Take W^R = W^T = 1, where both read the same row."""
    table = source.across("table")
    one = identity(table, source.new.shape.head_dim)
    if source.new.options.p2c_index == "mirrored" and not torch.equal(table, table.flip(1)):
        source.report.lose("deberta: the mirrored key term reads a_{-r}, where m4 reads a_r")
    names = [name for name, _ in source.new.named_parameters() if "projection" in name]
    return source.params | {"table": table} | dict.fromkeys(names, one)


def _other_options(source: Takeover) -> dict[str, Tensor]:
    """Say that another p2c index reads the key term's table in the other direction."""
    old, new = source.old.options.p2c_index, source.new.options.p2c_index
    table = source.params["table"]
    if old != new and not torch.equal(table, table.flip(1)):
        source.report.lose(f"deberta: p2c index {old} -> {new} reads the key term's table in the other direction")
    return source.params


@register_scheme("deberta")
class Deberta(PositionScheme):
    """Content to position and position to content, each through its own projection."""

    card = SchemeCard(
        140,
        "He 2020; 003 eq. 7",
        "(q·k + q·(aᵣW^R) + k·(aᵣW^T))/√(3d)",
        "a N(0, 0.02), W N(0, 1/d)",
        published="834K (003 Table 5)",
        difference="003 counts one of the two projections of its eq. 7",
    )
    takes = frozenset({SCALE, SHARE, CLIP_DISTANCE, RESET_CLS, P2C_INDEX, INIT, PROJECTIONS})
    own_scale = 3.0
    default_share = "heads"
    clip = "vectors"
    # Neutral by a = 0 alone, so that gradients still reach every table.
    tables = {
        "table": Table(rows="distance", neutral=0.0),
        "query_projection": Table(grows=WITH_K),
        "key_projection": Table(grows=WITH_Q),
        "projection": Table(grows=WITH_K, meets_both=True, copies=("query_projection", "key_projection")),
    }
    takes_over = {"shaw_keys": _from_keys_alone, "m4": _from_one_table, "deberta": _other_options}

    @classmethod
    def check_options(cls, options: SchemeOptions, shape: AttentionShape) -> None:
        """Refuse the content's projections, which vectors of a head's width do not fit."""
        only(PROJECTIONS, options.projections, ("own", "one"), cls.name)

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """`table`: (heads|1, R, D); the projections, or the one: (heads|1, D, D)."""
        super().__init__(shape, options)
        heads, dim = self.table_heads, shape.head_dim
        self.table = self.draw(heads, self.clipped.size, dim, std=0.02)
        one = options.projections == "one"
        for name in ("projection",) if one else ("query_projection", "key_projection"):
            setattr(self, name, self.draw(heads, dim, dim, std=dim**-0.5))

    def _projections(self) -> tuple[Tensor, Tensor]:
        """Return W^R and W^T."""
        if self.options.projections == "one":
            return self.projection, self.projection
        return self.query_projection, self.key_projection

    def prepare(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return A W^R and A W^T (mirrored where asked): (heads|1, R, D) each."""
        to_query, to_key = (self.table @ projection for projection in self._projections())
        if self.options.p2c_index == "mirrored":
            to_key = to_key.flip(1)
        return to_query, to_key

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """q.(a_r W^R) + k.(a_r W^T)."""
        to_query, to_key = prepared
        term = PositionTerms(
            relation=self.clipped, query_vectors=to_query, key_vectors=to_key, reset=self.reset_at(positions)
        )
        return (term,)
