"""Chen et al. 2021, Demystifying the Better Performance of Position Encoding Variants for Transformer.

    abs_scalar  A_ij = q_i . k_j / sqrt(d) + P_i . P_j + S_ij       eq. 7    P -> `position_table`
    rel_scalar  A_ij = q_i . k_j / sqrt(d) + R_{i-j} + S_ij         eq. 11   R -> `bias_table`

S is `--segment-encoding head`, which goes with any scheme (`segments.py`).  R is indexed by j - i
here as everywhere (a mirrored table, the same model).  The paper neither clips nor buckets R:
--position-clip-distance 0.  P has rank d a head by default (Chen2021 section 2.4; Table 12 raises it).
The paper gives no initial values: R starts at zero, P small.  Its eq. 2, 7, 8 and 11 divide by the
root of the hidden size d of the model; we divide by that of a head's, as Vaswani and BERT do.
--position-scalar-gain is 1 by default, as in the papers, though every short training of rel_scalar
was better with a gain: 50 on characters (equal at 8 times their lengths) and on the built-in corpus,
10 there and on Multi30k, which had no part in the choice (examples/comparison: scalars, late,
multi30k).  Trainings to convergence have not been compared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.core.options import CLIP_DISTANCE, RESET_CLS, SCALAR_GAIN, SCALE, SHARE, Number
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.scheme import ConversionSource, PositionScheme, SchemeInfo, Table, register_scheme
from relpos_fairseq.core.terms import PositionTerms

RANK = Number(name="rank", place=50, help="rank of P", auto=lambda shape: shape.head_dim, auto_help="head_dim", least=1)


def _other_rank(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from another rank: cut the channels of P, or fill new ones with zeros."""
    table, wants = source.params["position_table"], source.new.options.rank
    has = table.size(-1)
    if has > wants and bool(table[..., wants:].any()):
        source.report.lose(f"{source.new.name}: rank {has} cut to {wants}")
    return source.params | {"position_table": torch.nn.functional.pad(table, (0, wants - has))}


@register_scheme("abs_scalar")
class AbsScalar(PositionScheme):
    """A symmetric low-rank bias between absolute positions."""

    info = SchemeInfo(170, "Chen2021 eq. 7", "q·k/√d + (PᵀP)ᵢⱼ", "N(0, 0.02)")
    takes = frozenset({SCALE, SHARE, RANK, RESET_CLS})
    default_share = "none"
    absolute = True
    table_limited = True
    tables = {"position_table": Table("table_heads max_positions rank", std=0.02, rows="position", axis=1)}
    never_neutral = "P = 0 is neutral, but no gradient leaves it"
    convert_from = {"abs_scalar": _other_rank}
    position_table: nn.Parameter  # (heads|1, max_positions, rank)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return P twice, as the factors of queries and of keys."""
        self.check_length(positions)
        factors = (self.position_table, self.position_table)
        return (PositionTerms(position_factors=factors, reset=self.reset_at(positions)),)


def _from_buckets(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from t5: s'_r = s_bucket(r) / sqrt(C d)."""
    return source.params | {"bias_table": source.remap_table("bias_table") * source.new.scale}


@register_scheme("rel_scalar")
class RelScalar(PositionScheme):
    """One scalar per head, layer and distance, added to the logits."""

    info = SchemeInfo(180, "Chen2021 eq. 8, 11", "q·k/√d + s_{j-i}", "0")
    takes = frozenset({SCALE, SHARE, CLIP_DISTANCE, RESET_CLS, SCALAR_GAIN})
    default_share = "none"
    clip = "scalars"
    tables = {"bias_table": Table("table_heads distances", rows="distance", neutral=0.0)}
    convert_from = {"t5": _from_buckets}
    bias_table: nn.Parameter  # (heads|1, R)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return s_r."""
        gain = self.scalar_gain  # 1: the table itself, which kernels read without a copy
        static = self.bias_table if gain == 1 else self.bias_table * gain
        reset = self.reset_at(positions)
        return (PositionTerms(relation=self.clipped, static=static, reset=reset),)
