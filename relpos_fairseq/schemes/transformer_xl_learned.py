"""Transformer-XL's released PyTorch code (Dai et al. 2019, arXiv:1901.02860), its attn_type 1.

    e_ij = [ (q_i + u) . k_j + q_i . a_r + s_r ] / sqrt(d),   r = clip(j - i, -k, k)

    r_emb, a -> `key_table`;  r_w_bias, u -> `content_bias`;  r_bias, s -> `bias_table`

Each layer and head has its own; all start from N(0, 0.02).  The released tables reach as far as
segment and memory (--position-clip-distance 0), or to clamp_len, and their oldest row serves what
is further.  They have no rows for future keys, which its decoder never sees.
"""

from __future__ import annotations

from typing import Any

from relpos_fairseq.options import CLIP_DISTANCE, INIT, RESET_CLS, SCALE, SHARE
from relpos_fairseq.positions import Positions
from relpos_fairseq.scheme import AttentionShape, PositionScheme, SchemeCard, SchemeOptions, register_scheme
from relpos_fairseq.tables import WITH_BOTH, WITH_K, WITH_Q, Table
from relpos_fairseq.terms import PositionTerms


@register_scheme("transformer_xl_learned")
class LearnedTransformerXL(PositionScheme):
    """A vector and a scalar a distance, both learned, and a global content bias."""

    card = SchemeCard(75, "Dai 2019, released attn_type 1", "((q+u)·k + q·aᵣ + sᵣ)/√d", "N(0, 0.02)")
    takes = frozenset({SCALE, CLIP_DISTANCE, SHARE, RESET_CLS, INIT})
    default_share = "none"
    clip = "vectors"
    tables = {
        "key_table": Table(rows="distance", neutral=0.0, grows=WITH_K),
        "content_bias": Table(neutral=0.0, grows=WITH_Q, meaning="u"),
        "bias_table": Table(rows="distance", neutral=0.0, grows=WITH_BOTH),
    }
    elsewhere = {"transformer-xl": "attn_type 1"}

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """`key_table`: (heads|1, R, D); `content_bias`: (., D); `bias_table`: (., R)."""
        super().__init__(shape, options)
        heads, rows, dim = self.table_heads, self.clipped.size, shape.head_dim
        self.key_table = self.draw(heads, rows, dim, std=0.02)
        self.content_bias = self.draw(heads, dim, std=0.02)
        self.bias_table = self.draw(heads, rows, std=0.02)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """q.a_r and s_r, and u.k."""
        term = PositionTerms(
            relation=self.clipped,
            query_vectors=self.key_table,
            content_offset=self.content_bias,
            static=self.bias_table * self.scale,
            reset=self.reset_at(positions),
        )
        return (term,)
