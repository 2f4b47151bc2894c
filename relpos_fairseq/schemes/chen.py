"""Chen et al. 2021, Demystifying the Better Performance of Position Encoding Variants (004).

    abs_scalar  A_ij = q_i . k_j / sqrt(d) + P_i . P_j + S_ij       eq. 7    P -> `position_table`
    rel_scalar  A_ij = q_i . k_j / sqrt(d) + R_{i-j} + S_ij         eq. 11   R -> `bias_table`
    segments    S_ij = Seg_{segment(i) segment(j)}                  eq. 9    Seg -> `pair_table`

R is indexed by j - i here as everywhere (a mirrored table, the same model).  The paper neither
clips nor buckets R: --position-clip-distance 0.  P has rank d a head by default (004 section 2.4;
Table 12 raises it).  The paper gives no initial values: R and Seg start at zero, P small.
Segments belong to `--segment-encoding head` and go with any scheme.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import Segments
from relpos_fairseq.scheme import (
    AttentionShape,
    PositionScheme,
    SchemeCard,
    SchemeOptions,
    register_scheme,
)
from relpos_fairseq.schemes.tupe import of_queries, rows_of_keys
from relpos_fairseq.terms import PositionTerms


@register_scheme("abs_scalar")
class AbsScalar(PositionScheme):
    """A symmetric low-rank bias between absolute positions."""

    card = SchemeCard("004 eq. 7", "q·k/√d + (PᵀP)ᵢⱼ", "N(0, 0.02)")
    takes = frozenset({"scale", "share", "rank", "reset_cls"})
    default_share = "none"
    absolute = True
    table_limited = True

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """`position_table`: (heads|1, max_positions, rank)."""
        super().__init__(shape, options)
        rank = options.rank or shape.head_dim
        self.position_table = self.draw(self.table_heads, shape.max_positions, rank, std=0.02)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Both factors are rows of P."""
        self.check_length(positions)
        keys = rows_of_keys(self.position_table, positions)
        factors = (of_queries(keys, positions), keys)
        return (PositionTerms(static_factors=factors, reset=self.reset_at(positions)),)


@register_scheme("rel_scalar")
class RelScalar(PositionScheme):
    """A scalar a head, layer and distance, added to the logits."""

    card = SchemeCard("004 eq. 8, 11", "q·k/√d + s_{j-i}", "0")
    takes = frozenset({"scale", "share", "clip_distance", "reset_cls"})
    default_share = "none"
    clip = "scalars"

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """`bias_table`: (heads|1, R)."""
        super().__init__(shape, options)
        self.bias_table = nn.Parameter(torch.zeros(self.table_heads, self.clipped.size))

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """s_r."""
        term = PositionTerms(
            relation=self.clipped, static=self.bias_table, reset=self.reset_at(positions)
        )
        return (term,)


class SegmentHead(PositionScheme):
    """A scalar a head and ordered pair of segments, added to the logits."""

    name = "segment_head"
    takes = frozenset({"share"})
    default_share = "none"

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """`pair_table`: (heads|1, segments^2)."""
        super().__init__(shape, options)
        self.relation = Segments(options.num_segments)
        self.pair_table = nn.Parameter(torch.zeros(self.table_heads, self.relation.size))

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """S."""
        return (PositionTerms(relation=self.relation, static=self.pair_table),)


class SegmentInput(PositionScheme):
    """BERT's segment embedding, added to the input; starts at zero."""

    name = "segment_input"
    takes = frozenset()
    own_scale = None

    def __init__(self, shape: AttentionShape, options: SchemeOptions) -> None:
        """`table`: (segments, E)."""
        super().__init__(shape, options)
        self.table = nn.Parameter(torch.zeros(options.num_segments, shape.embed_dim))

    def embed(self, positions: Positions) -> Tensor:
        """(B, T, E).

        Raises:
            ValueError: if the task supplies no segments.
        """
        if positions.segments is None:
            raise ValueError(
                "segment encoding needs segments, and this task supplies none: use "
                "--segment-encoding none or a task with sentence pairs"
            )
        return self.table[positions.of_queries(positions.segments)]
