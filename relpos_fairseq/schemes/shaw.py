"""Shaw et al. 2018, Self-Attention with Relative Position Representations (arXiv:1803.02155).

Equations 3 and 4 (Huang2020 eq. 7-9; M4M eq. 3), r = clip(j - i, -k, k):

    e_ij = q_i . (k_j + a^K_r) / sqrt(d)        a^K -> `key_table`
    z_i  = sum_j alpha_ij (v_j + a^V_r)         a^V -> `value_table`

q is multiplied by a^K, which is therefore the term's query_vectors.  `shaw_keys` drops a^V, as T5,
Huang2020 and M4M do; --position-keys off drops a^K instead.  Tensor2tensor shares the tables among
heads, and so does the default; --position-share none gives each head its own (Huang2020's count).
Tensor2tensor's tables start uniformly in +-sqrt(6 / (2k + 1 + d)), by Glorot's rule (a deviation of
0.14 for k = 16 and d = 64), as all its variables do: --position-init paper, which is ahead early in
training, on the one task where it was tried (examples/comparison/late); the default is that of BERT's
tables.  Translation keeps the paper's k = 16: 4 was no better in the same comparison.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.core.options import CLIP_DISTANCE, INIT, RESET_CLS, SCALE, SHARE, Choice
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.scheme import (
    WITH_K,
    AttentionShape,
    ConversionSource,
    PositionScheme,
    SchemeInfo,
    SchemeOptions,
    Table,
    register_scheme,
)
from relpos_fairseq.core.terms import PositionTerms

KEYS = Choice(
    name="keys", place=105, help="vectors of the keys: on, or off (those of the values alone)", auto="on", later=True
)


@register_scheme("shaw_keys")
class ShawKeys(PositionScheme):
    """Relative vectors added to the keys."""

    info = SchemeInfo(50, "Huang2020 eq. 7; M4M eq. 3", "(q·k + q·aᵣ)/√d", "N(0, 0.02)", published="785K (M4M Table 5)")
    takes = frozenset({SCALE, CLIP_DISTANCE, SHARE, RESET_CLS, INIT})
    default_share = "heads"
    clip = "vectors"
    tables = {"key_table": Table(rows="distance", neutral=0.0, grows=WITH_K)}
    elsewhere = {"transformers": "relative_key"}

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Create the parameter `key_table`: (heads|1, R, D)."""
        super().__init__(shape, options)
        self.key_table = self._start(self.table_heads, self.clipped.size, shape.head_dim)

    def _start(self, *size: int) -> nn.Parameter:
        """Draw a table (heads|1, R, D) as BERT's tables start, or by Glorot's rule as tensor2tensor's do."""
        if self.options.init == "paper":
            return self.draw(*size, std=math.sqrt(2 / sum(size[1:])), uniform=True)
        return self.draw(*size, std=0.02)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return q.a_r."""
        keys = PositionTerms(relation=self.clipped, query_vectors=self.key_table, reset=self.reset_at(positions))
        return (keys,)


def _from_keys_alone(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from shaw_keys: a^V = 0."""
    if source.new.options.keys == "off":
        source.report.lose("shaw: the keys' vectors are dropped")
        return {"value_table": torch.zeros_like(source.new.get_parameter("value_table"))}
    table = source.remap_table("key_table")
    return source.params | {"key_table": table, "value_table": torch.zeros_like(table)}


@register_scheme("shaw")
class Shaw(ShawKeys):
    """Relative vectors added to keys and values."""

    info = SchemeInfo(
        60,
        "Shaw 2018 eq. 3-4",
        "(q·k + q·aᴷᵣ)/√d, values Σ α(v + aⱽᵣ)",
        "N(0, 0.02)",
        published="-",
        difference="M4M counts the keys alone; the values double them",
    )
    tables = ShawKeys.tables | {"value_table": Table(rows="distance", neutral=0.0)}
    takes = ShawKeys.takes | {KEYS}
    convert_from = {"shaw_keys": _from_keys_alone}
    elsewhere = {"OpenNMT-py": "max_relative_positions"}

    @classmethod
    def check_options(cls, options: SchemeOptions, shape: AttentionShape) -> None:
        """Raise an error for a reset if there are no position logits that it could replace."""
        if options.keys == "off" and options.reset_cls:
            raise ValueError(f"{RESET_CLS.flag} on: {KEYS.flag} off leaves no logits to reset")

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """Make `key_table` and `value_table`: (heads|1, R, D) each."""
        super().__init__(shape, options)
        self.value_table = self._start(*self.key_table.shape)
        if options.keys == "off":
            del self.key_table

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return q.a_r, and the vectors added to the values."""
        values = PositionTerms(relation=self.clipped, value_vectors=self.value_table)
        if self.options.keys == "off":
            return (values,)
        return (*super().terms(prepared, positions), values)
