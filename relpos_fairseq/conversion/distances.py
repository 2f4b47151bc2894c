"""Tables over distances, read again by another relation (see `exact`)."""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.relations import DistanceRelation
from relpos_fairseq.scheme import PositionScheme


def relation_of(scheme: PositionScheme) -> DistanceRelation:
    """The relation that a scheme's table over distances is read by."""
    return scheme.relation if hasattr(scheme, "relation") else scheme.clipped


def reread(
    table: Tensor, source: DistanceRelation, target: DistanceRelation, length: int
) -> tuple[Tensor, float, float]:
    """A table over distances for another relation.

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
