"""What `--segment-encoding` adds; it goes with any scheme.

    head    S_ij = Seg_{segment(i) segment(j)}, in logit units     Seg -> `pair_table`
    input   x_i = t_i + e_segment(i)                               e -> `table`

`head` is Chen et al. 2021 (004), eq. 9; `input` is Devlin et al. 2018 (BERT).  Both start at zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import Segments
from relpos_fairseq.scheme import AttentionShape, PositionScheme, SchemeOptions
from relpos_fairseq.terms import PositionTerms


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
