"""Segment encodings (`--segment-encoding`), which may be combined with any scheme.

    head    S_ij = Seg_{segment(i) segment(j)}, in logit units     Seg -> `pair_table`
    input   x_i = t_i + e_segment(i)                               e -> `table`

`head` is Chen et al. 2021, eq. 9; `input` is Devlin et al. 2018 (BERT).  Both start at zero.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.core.options import SHARE
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Segments
from relpos_fairseq.core.scheme import ConversionSource, PositionScheme, Table
from relpos_fairseq.core.terms import PositionTerms


def _another_number(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from another number of segments: new ones start at zero, the loss of others is reported."""
    return {"table": _resized(source, source.params["table"], axis=0)}


def _pairs_of_another_number(source: ConversionSource) -> dict[str, Tensor]:
    """Convert a table of pairs from another number of segments: (heads, segments^2)."""
    count = source.old.options.num_segments
    table = source.params["pair_table"].unflatten(1, (count, count))
    for axis in (1, 2):
        table = _resized(source, table, axis)
    return {"pair_table": table.flatten(1)}


def _resized(source: ConversionSource, table: Tensor, axis: int) -> Tensor:
    has, wants = table.size(axis), source.new.options.num_segments
    kept = table.narrow(axis, 0, min(has, wants))
    if table.narrow(axis, kept.size(axis), has - kept.size(axis)).any():
        source.report.lose(f"{source.new.name}: {has} segments become {wants}")
    shape = list(kept.shape)
    shape[axis] = wants - kept.size(axis)
    return torch.cat([kept, kept.new_zeros(shape)], dim=axis)


class SegmentHead(PositionScheme):
    """One scalar per head and ordered pair of segments, added to the logits."""

    name = "segment_head"
    takes = frozenset({SHARE})
    default_share = "none"
    tables = {"pair_table": Table("table_heads distances", neutral=0.0)}
    convert_from = {"segment_head": _pairs_of_another_number}
    pair_table: nn.Parameter  # (heads|1, segments²)

    @property
    def relation(self) -> Segments:
        """Ordered pairs of segments."""
        return Segments(self.options.num_segments)

    def terms(self, prepared: Any, positions: Positions) -> tuple[PositionTerms, ...]:
        """Return S."""
        return (PositionTerms(relation=self.relation, static=self.pair_table),)


class SegmentInput(PositionScheme):
    """BERT's segment embedding, added to the input; starts at zero."""

    name = "segment_input"
    takes = frozenset()
    own_scale = None
    tables = {"table": Table("num_segments embed_dim", neutral=0.0)}
    convert_from = {"segment_input": _another_number}
    table: nn.Parameter  # (segments, E)

    def embed(self, positions: Positions) -> Tensor:
        """Return the vector of each query's segment: (B, T, E).

        Raises:
            ValueError: if the task supplies no segments.
        """
        if positions.segments is None:
            raise ValueError(
                "segment encoding needs segments, and this task supplies none: use "
                "--segment-encoding none or a task with sentence pairs"
            )
        return self.table[positions.query_rows(positions.segments)]
