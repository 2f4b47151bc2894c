"""He et al. 2020, DeBERTa (arXiv:2006.03654), in the form of 003 eq. 7.

    e_ij = (q_i . k_j + q_i . (a_r W^R) + k_j . (a_r W^T)) / sqrt(3d),  r = clip(j - i, -k, k)

    a -> `table`, W^R -> `query_projection`, W^T -> `key_projection`

He's paper gathers the position-to-content term by delta(j, i); its released code by delta(i, j).
003 uses the same a_r in both terms, which is our default; --position-p2c-index mirrored takes
a_{-r} in the key term, as He's paper writes it.  In 003 heads share a (of size d) and one W of
d x d (its Table 5 counts one; eq. 7 has two, and so have we).  Released DeBERTa drops the content
projection's biases and shares W with them: not taken over.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.options import CLIP_DISTANCE, RESET_CLS, SCALE, SHARE, Choice
from relpos_fairseq.positions import Positions
from relpos_fairseq.scheme import (
    AttentionShape,
    PositionScheme,
    SchemeCard,
    SchemeOptions,
    register_scheme,
)
from relpos_fairseq.tables import WITH_K, WITH_Q, Table
from relpos_fairseq.takeover import Takeover, identity
from relpos_fairseq.terms import PositionTerms

P2C_INDEX = Choice(
    name="p2c_index",
    place=90,
    help="paper or mirrored",
    auto="paper",
    auto_help="paper",
    choices=("paper", "mirrored"),
)


def _from_keys_alone(source: Takeover) -> dict[str, Tensor]:
    """Take W^R = 1, W^T = 0."""
    table = source.across("key_table")
    one = identity(table, source.new.shape.head_dim)
    made = {"table": table, "query_projection": one, "key_projection": one * 0}
    return source.reset() | made


def _from_one_table(source: Takeover) -> dict[str, Tensor]:
    """Take W^R = W^T = 1, with the paper's p2c index."""
    table = source.across("table")
    one = identity(table, source.new.shape.head_dim)
    if source.new.options.p2c_index == "mirrored" and not torch.equal(table, table.flip(1)):
        source.report.lose("deberta: the mirrored key term reads a_{-r}, where m4 reads a_r")
    return source.params | {"table": table, "query_projection": one, "key_projection": one}


def _other_options(source: Takeover) -> dict[str, Tensor]:
    """Say that another p2c index reads the key term's table in the other direction."""
    old, new = source.old.options.p2c_index, source.new.options.p2c_index
    table = source.params["table"]
    if old != new and not torch.equal(table, table.flip(1)):
        source.report.lose(
            f"deberta: p2c index {old} -> {new} reads the key term's table in the other direction"
        )
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
    takes = frozenset({SCALE, SHARE, CLIP_DISTANCE, RESET_CLS, P2C_INDEX})
    own_scale = 3.0
    default_share = "heads"
    clip = "vectors"
    # Neutral by a = 0 alone, so that gradients still reach every table.
    tables = {
        "table": Table(rows="distance", neutral=0.0),
        "query_projection": Table(grows=WITH_K),
        "key_projection": Table(grows=WITH_Q),
    }
    takes_over = {
        "shaw_keys": _from_keys_alone,
        "m4": _from_one_table,
        "deberta": _other_options,
    }
    fitted = "table"

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """`table`: (heads|1, R, D); the projections: (heads|1, D, D)."""
        super().__init__(shape, options)
        heads, dim = self.table_heads, shape.head_dim
        self.table = self.draw(heads, self.clipped.size, dim, std=0.02)
        self.query_projection = self.draw(heads, dim, dim, std=dim**-0.5)
        self.key_projection = self.draw(heads, dim, dim, std=dim**-0.5)

    def prepare(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return A W^R and A W^T (mirrored where asked): (heads|1, R, D) each."""
        to_key = self.table @ self.key_projection
        if self.options.p2c_index == "mirrored":
            to_key = to_key.flip(1)
        return self.table @ self.query_projection, to_key

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """q.(a_r W^R) + k.(a_r W^T)."""
        to_query, to_key = prepared
        term = PositionTerms(
            relation=self.clipped,
            query_vectors=to_query,
            key_vectors=to_key,
            reset=self.reset_at(positions),
        )
        return (term,)

    def factor(self, q: Tensor, k: Tensor) -> Tensor:
        """Return (W^R q + W^T k) / sqrt(3d)."""
        if self.options.p2c_index != "paper":
            raise ValueError(f"--init fit: deberta is fitted with {P2C_INDEX.flag} paper")
        query = q @ self.query_projection.transpose(-1, -2)
        return (query + k @ self.key_projection.transpose(-1, -2)) * self.scale
