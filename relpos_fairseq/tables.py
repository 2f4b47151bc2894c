"""What conversion must know of a scheme's parameters.

Each scheme declares a `Table` for each of its parameters; `conversion` reads nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from relpos_fairseq.relations import DistanceRelation

# Powers (a, b) of what q and k grow by: a table grows by f_q^a f_k^b.
WITH_Q, WITH_K, WITH_BOTH = (1.0, 0.0), (0.0, 1.0), (1.0, 1.0)


@dataclass(frozen=True)
class Table:
    """One parameter of a scheme.

    Args:
        rows: what a row stands for: a `distance` (read by the scheme's relation), an absolute
            `position`, or None.
        axis: of the positions.
        neutral: the value at which the scheme changes no logit; None: its initial value.
        grows: powers of the factors by which the projections of q and k grow when another scale is
            folded into them (`conversion.scales`), so that every logit stays what it was.
        meets_both: q and k are both multiplied by this table and their products added: they can
            only grow alike.
        head_axis: of the heads.
        flat_heads: the first axis holds the heads' rows of width D one after another.
        has_heads: whether there is an axis of heads; else all heads have the parameter in common.
        meaning: what a reader of a report calls it, if not by its name.
        copies: the parameters that it stands for, where options give each of them its own.
    """

    rows: Literal["distance", "position"] | None = None
    axis: int = 0
    neutral: float | None = None
    grows: tuple[float, float] = (0.0, 0.0)
    meets_both: bool = False
    head_axis: int = 0
    flat_heads: bool = False
    has_heads: bool = True
    meaning: str = ""
    copies: tuple[str, ...] = ()

    def by_head(self, value: Tensor, head_dim: int) -> Tensor:
        """Return the parameter with heads as its first axis."""
        if self.flat_heads:
            return value.unflatten(0, (-1, head_dim))
        return value.movedim(self.head_axis, 0)

    def stored(self, value: Tensor) -> Tensor:
        """Return what `by_head` was given."""
        return value.flatten(0, 1) if self.flat_heads else value.movedim(0, self.head_axis)


# theta of the reset (2, heads), which every scheme with --position-reset-cls has.
RESET_TABLE = Table(neutral=0.0, head_axis=1, meaning="the reset of the first token")


def reread(
    table: Tensor, source: DistanceRelation, target: DistanceRelation, length: int
) -> tuple[Tensor, float, float]:
    """Return a table over distances for another relation.

    A row of the target that several distances read becomes the mean of what the source has for
    them, those that inputs of `length` tokens meet if there are any.

    Args:
        table: (H|1, R, ...) of the source.
        source: the relation that it is read by.
        target: the relation that the result is read by.
        length: longest input that the target is meant for.

    Returns:
        (H|1, R', ...); the largest difference that a distance of such inputs sees (0: exact); and
        the largest that a longer distance sees.
    """
    if source == target:
        return table, 0.0, 0.0
    # One more than any of them knows: what all further distances read.
    reach = max(-source.lowest, source.highest, -target.lowest, target.highest, length) + 1
    distance = torch.arange(-reach, reach + 1, device=table.device)
    old, new = source.of_distance(distance), target.of_distance(distance)
    met = distance.abs() < length
    counted = torch.zeros(target.size, dtype=torch.long, device=table.device)
    counted.index_add_(0, new, met.long())
    weight = (met | (counted[new] == 0)).to(table.dtype)
    total = torch.zeros(target.size, dtype=table.dtype, device=table.device)
    total.index_add_(0, new, weight)
    # Some distance of a row, then the mean of the differences to it: equal rows stay to the bit.
    some = torch.zeros(target.size, dtype=torch.long, device=table.device)
    some[new[weight > 0]] = (weight > 0).nonzero()[:, 0]
    result = table[:, old[some]]
    tail = [1] * (table.dim() - 2)
    apart = (table[:, old] - result[:, new]) * weight.view(1, -1, *tail)
    mean = torch.zeros_like(result).index_add_(1, new, apart)
    result = result + mean / total.clamp(min=1).view(1, -1, *tail)
    error = (table[:, old] - result[:, new]).abs().reshape(table.size(0), len(new), -1)
    beyond = float(error[:, ~met].max()) if not bool(met.all()) else 0.0
    return result, float(error[:, met].max()), beyond
