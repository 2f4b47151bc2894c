"""Huang et al. 2020, Improve Transformer Models with Better Relative Position Embeddings (arXiv:2009.13658).

r = clip(j - i, -k, k), or abs(j - i) unclipped for method 1:

    M1  e_ij = (q_i . k_j) w_{|j-i|} / sqrt(d)               eq. 11-12   w -> `gate_table`
    M2  e_ij = (q_i . k_j) w_r / sqrt(d)                     eq. 12-13   w -> `gate_table`
    M3  e_ij = sum_c q_ic k_jc w_rc / sqrt(d)                eq. 14-15   w -> `trilinear_table`
    M4  e_ij = (q_i . k_j + q_i . a_r + k_j . a_r) / sqrt(d) eq. 16      a -> `table`

The paper gives no initial values.  Ones make M1-M3 plain attention: zeros would erase the content, and
N(0, 0.02) makes M3 uniform.  Heads share a table (M4M App. A, its Table 5); --position-share none is
Huang2020's own count.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from relpos_fairseq.core.options import CLIP_DISTANCE, INIT, RESET_CLS, SCALE, SHARE
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped, Folded
from relpos_fairseq.core.scheme import WITH_K, ConversionSource, PositionScheme, SchemeInfo, Table, register_scheme
from relpos_fairseq.core.terms import PositionTerms


@register_scheme("m1")
class Method1(PositionScheme):
    """A scalar gate on the content by absolute distance."""

    info = SchemeInfo(
        90,
        "Huang2020 eq. 11-12",
        "q·k·w/√d, w by |j-i|",
        "1",
        published="74K (Huang2020 Table 1: mhn)",
        difference="Huang2020 gives each head its own (share none); M4M shares",
    )
    takes = frozenset({SCALE, SHARE})
    default_share = "heads"
    tables = {"gate_table": Table("table_heads distances", start=1.0, rows="distance", neutral=1.0)}
    gate_table: nn.Parameter  # (heads|1, R)

    @property
    def relation(self) -> Folded | Clipped:
        """Absolute distance, unclipped: one weight for each distance that occurs in training."""
        return Folded(self.shape.max_positions)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return the gate."""
        return (PositionTerms(relation=self.relation, gate=self.gate_table),)


def _gate_of_m1(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from m1: w_r = w_|r|."""
    return {"gate_table": source.remap_table("gate_table")}


@register_scheme("m2")
class Method2(Method1):
    """A scalar gate on the content by signed distance."""

    info = SchemeInfo(100, "Huang2020 eq. 12-13; M4M eq. 5", "q·k·wᵣ/√d", "1", published="12K (M4M Table 5)")
    takes = frozenset({SCALE, SHARE, CLIP_DISTANCE})
    clip = "scalars"
    convert_from = {"m1": _gate_of_m1}

    @property
    def relation(self) -> Clipped:
        """Signed clipped distance."""
        return self.clipped


def _weights_of_a_gate(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from m1 or m2: w_{r,c} = w_r, so that sum_c q_c k_c w_r = (q.k) w_r."""
    gate = source.remap_table("gate_table")
    return {"trilinear_table": gate[..., None].expand(*gate.shape, source.new.shape.head_dim)}


@register_scheme("m3")
class Method3(PositionScheme):
    """A vector gate: each channel of q and k is weighted by distance."""

    info = SchemeInfo(
        110,
        "Huang2020 eq. 14-15",
        "Σ_c q_c k_c w_{r,c}/√d",
        "1 + N(0, 0.02)",
        published="147K (Huang2020, section 3.6)",
        difference="Huang2020 leaves out d; its formula mh(2n-1)d gives 9.4M, our share none",
    )
    takes = frozenset({SCALE, SHARE, CLIP_DISTANCE, INIT})
    default_share = "heads"
    clip = "vectors"
    replaces_qk = True
    tables = {
        "trilinear_table": Table("table_heads distances head_dim", std=0.02, start=1.0, rows="distance", neutral=1.0)
    }
    convert_from = {"m1": _weights_of_a_gate, "m2": _weights_of_a_gate}
    trilinear_table: nn.Parameter  # (heads|1, R, D)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return the trilinear term."""
        return (PositionTerms(relation=self.clipped, trilinear=self.trilinear_table),)


@register_scheme("m4")
class Method4(PositionScheme):
    """Query and key are both multiplied by the same relative vector."""

    info = SchemeInfo(
        120, "Huang2020 eq. 16; M4M eq. 6", "(q·k + q·aᵣ + k·aᵣ)/√d", "N(0, 0.02)", published="785K (M4M Table 5)"
    )
    takes = frozenset({SCALE, SHARE, CLIP_DISTANCE, RESET_CLS, INIT})
    default_share = "heads"
    clip = "vectors"
    tables = {
        "table": Table(
            "table_heads distances head_dim", std=0.02, rows="distance", neutral=0.0, grows=WITH_K, multiplies_both=True
        )
    }
    elsewhere = {"transformers": "relative_key_query"}
    table: nn.Parameter  # (heads|1, R, D)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return q.a_r + k.a_r."""
        term = PositionTerms(
            relation=self.clipped, query_vectors=self.table, key_vectors=self.table, reset=self.reset_at(positions)
        )
        return (term,)
