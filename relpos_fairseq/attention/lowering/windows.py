"""Windows of distances, and tables read over one: a row of a table a distance, ends for all beyond.

A window's first and last distance stand for everything below and above.  Where a relation has no
such tail among the distances that occur, the window reaches one further than they do, so that no
cell counts as a tail.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.positions import Positions, is_captured
from relpos_fairseq.relations import Clipped, DistanceRelation


@dataclass(frozen=True)
class Reach:
    """The distances of visible pairs."""

    lowest: int
    highest: int

    @classmethod
    def of(cls, inputs: AttentionInputs) -> Reach:
        """Those of a call."""
        positions = inputs.positions
        lowest, highest = positions.lowest_distance, positions.highest_distance
        if inputs.causal:
            highest = min(highest, 0)
        if inputs.window is not None:
            lowest = max(lowest, 1 - inputs.window)
        return cls(lowest, highest)


@dataclass(frozen=True)
class Window:
    """Distances low..high; `low` stands for all below, `high` for all above."""

    low: int
    high: int

    @property
    def width(self) -> int:
        """How many distances."""
        return self.high - self.low + 1

    def equals(self, other: Window) -> bool:
        """Compare numbers, which a compiler may know by symbols alone."""
        return self.low == other.low and self.high == other.high

    @classmethod
    def over(cls, relations: Sequence[DistanceRelation], reach: Reach) -> Window:
        """The window outside of which none of the relations changes."""
        lows = [relation.lowest for relation in relations]
        highs = [relation.highest for relation in relations]
        low = min(lows) if lows else reach.lowest
        high = max(highs) if highs else reach.highest
        low = low if low > reach.lowest else reach.lowest - 1
        high = high if high < reach.highest else reach.highest + 1
        return cls(low, max(high, low + 1))


def over_window(table: Tensor, relation: DistanceRelation, window: Window, positions: Positions) -> Tensor:
    """A table (H|1, R, ...) as one row a distance of the window: (H|1, width, ...)."""
    if isinstance(relation, Clipped):
        return _slice(table, relation, window)
    if is_captured():  # only on a CPU, where an index's own gradient has an order
        ids = relation.window(window.low, window.high, positions.device)
        return table.index_select(1, ids)
    ids, sources = positions.once(("rows", relation, window), lambda: _ids_of(relation, window, positions.device))
    return _Rows.apply(table, ids, sources)


def _slice(table: Tensor, relation: Clipped, window: Window) -> Tensor:
    """Rows of a clipped relation follow one another: a slice, its ends repeated."""
    first, last = window.low + relation.past, window.high + relation.past
    top = table.size(1) - 1
    begin, end = min(max(first, 0), top), max(min(last, top), 0) + 1
    before, after = max(-first, 0), max(last - top, 0)
    if begin > 0 or end <= top:
        table = table[:, begin:end]
    return _Extended.apply(table, before, after) if before or after else table


class _Extended(torch.autograd.Function):
    """A table (H|1, R, ...) whose ends are repeated `before` and `after` times.

    Torch's own padding sums a gradient's repeated cells one after another.
    """

    @staticmethod
    def forward(ctx, table: Tensor, before: int, after: int) -> Tensor:
        ctx.ends = before, after
        sides = (before, after) if table.dim() == 2 else (0, 0, before, after)
        return functional.pad(table, sides, mode="replicate")

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        before, after = ctx.ends
        last = grad.size(1) - after - 1  # the table's last row
        if last == before:
            return grad.sum(1, keepdim=True), None, None
        parts = (
            grad[:, : before + 1].sum(1, keepdim=True),
            grad[:, before + 1 : last],
            grad[:, last:].sum(1, keepdim=True),
        )
        return torch.cat(parts, dim=1), None, None


def _ids_of(relation: DistanceRelation, window: Window, device: torch.device) -> tuple[Tensor, Tensor]:
    """(width,) ids of the window's distances; (R, m) the distances of each id, `width` for none."""
    ids = relation.window(window.low, window.high, torch.device("cpu"))
    counts = torch.bincount(ids, minlength=relation.size)
    sources = torch.full((relation.size, int(counts.max())), window.width)
    order = torch.argsort(ids, stable=True)
    rank = torch.arange(window.width) - (counts.cumsum(0) - counts)[ids[order]]
    sources[ids[order], rank] = order
    return ids.to(device), sources.to(device)


class _Rows(torch.autograd.Function):
    """table[:, ids], whose gradient sums in a fixed order: an index's own has atomics."""

    @staticmethod
    def forward(ctx, table: Tensor, ids: Tensor, sources: Tensor) -> Tensor:
        ctx.save_for_backward(sources)
        return table.index_select(1, ids)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        (sources,) = ctx.saved_tensors
        nothing = grad.new_zeros(grad.size(0), 1, *grad.shape[2:])
        return torch.cat([grad, nothing], dim=1)[:, sources].sum(2), None, None
