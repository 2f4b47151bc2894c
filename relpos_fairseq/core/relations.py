"""Relations: which row of a table the pair of a query and a key reads.

A relation is structure, not a tensor: a backend sees a clipped table as a few near distances and two
constant ends, and only the reference expands it to the row of every pair (its *id*).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.core.positions import Positions, is_exported


class Relation:
    """A map from every pair of a query and a key to an id in [0, size)."""

    @property
    def size(self) -> int:
        """Number of ids, hence of rows of a table."""
        raise NotImplementedError(f"{type(self).__name__} must define size")

    def ids(self, positions: Positions) -> Tensor:
        """Return the ids of all pairs of the queries and keys of `positions`: (B|1, T, S)."""
        raise NotImplementedError(f"{type(self).__name__} must define ids")


class DistanceRelation(Relation):
    """A relation that depends on the distance j - i alone."""

    @property
    def lowest(self) -> int:
        """The distance at and below which the id no longer changes."""
        raise NotImplementedError(f"{type(self).__name__} must define lowest")

    @property
    def highest(self) -> int:
        """The distance at and above which the id no longer changes."""
        raise NotImplementedError(f"{type(self).__name__} must define highest")

    def of_distance(self, distance: Tensor) -> Tensor:
        """Return the ids of distances, elementwise."""
        raise NotImplementedError(f"{type(self).__name__} must define of_distance")

    def ids(self, positions: Positions) -> Tensor:
        """Return the ids of all pairs: (1, T, S), each row a slice of the ids of all distances."""
        if positions.randomized is not None:
            return self.of_distance(positions.position_distance())[None]
        low, high = positions.lowest_distance, positions.highest_distance
        if is_exported():
            return self.of_distance(positions.distance())[None]
        every = self.window(low, high, positions.device)
        return every.unfold(0, positions.src_len, 1).flip(0)[None]

    def window(self, low: int, high: int, device: torch.device) -> Tensor:
        """Return the ids of the distances low..high in order: (high - low + 1,)."""
        return self.of_distance(torch.arange(low, high + 1, device=device))


@dataclass(frozen=True)
class Clipped(DistanceRelation):
    """clip(j - i, -past, future) + past: Shaw's clipped distance (Shaw2018; Huang2020 eq. 8-9).

    Args:
        past: how many distances into the past have a row of their own.
        future: the same for the future.
    """

    past: int
    future: int

    @classmethod
    def unclipped(cls, positions: Positions) -> Clipped:
        """Return the relation in which every distance of `positions` has a row of its own."""
        lowest, highest = positions.distance_range()
        return cls(-lowest, highest if is_exported() else max(highest, 0))

    def distances(self, device: torch.device) -> Tensor:
        """Return the distance that each row stands for: (R,)."""
        return torch.arange(-self.past, self.future + 1, device=device)

    @property
    def size(self) -> int:
        return self.past + 1 + self.future

    @property
    def lowest(self) -> int:
        return -self.past

    @property
    def highest(self) -> int:
        return self.future

    def of_distance(self, distance: Tensor) -> Tensor:
        return distance.clamp(-self.past, self.future) + self.past


@dataclass(frozen=True)
class Folded(DistanceRelation):
    """min(abs(j - i), rows - 1): Huang's M1 (Huang2020 eq. 11), which does not see the sign.

    Args:
        rows: number of rows; the last serves all further distances.
    """

    rows: int

    @property
    def size(self) -> int:
        return self.rows

    @property
    def lowest(self) -> int:
        return 1 - self.rows

    @property
    def highest(self) -> int:
        return self.rows - 1

    def of_distance(self, distance: Tensor) -> Tensor:
        return distance.abs().clamp(max=self.rows - 1)


@dataclass(frozen=True)
class Bucketed(DistanceRelation):
    """T5's logarithmic buckets (Raffel 2019): near distances have their own, further ones share.

    Args:
        buckets: number of buckets; bidirectional ones give half to each direction.
        max_distance: distances at or beyond it share the last bucket.
        bidirectional: False: the past has all buckets, as in a causal decoder, and the future reads
            the bucket of distance 0.
    """

    buckets: int
    max_distance: int
    bidirectional: bool

    @property
    def size(self) -> int:
        return self.buckets

    @property
    def lowest(self) -> int:
        return -self.max_distance

    @property
    def highest(self) -> int:
        return self.max_distance if self.bidirectional else 0

    def of_distance(self, distance: Tensor) -> Tensor:
        buckets = self.buckets // 2 if self.bidirectional else self.buckets
        away = distance.abs() if self.bidirectional else (-distance).clamp(min=0)
        exact = buckets // 2
        if is_exported():  # compare whole numbers: another library's logarithm may round otherwise
            starts = torch.tensor(self._starts(buckets, exact), device=distance.device)
            coarse = exact + (away[..., None] >= starts).sum(-1)
            bucket = torch.where(away < exact, away, coarse)
            return bucket + (distance > 0).long() * (buckets if self.bidirectional else 0)
        ratio = torch.log(away.clamp(min=1).double() / exact) / math.log(self.max_distance / exact)
        # log(x) / log(y) may land a hair under a whole number: T5 computes in fp32 and truncates;
        # the epsilon keeps a distance that stands exactly on a bucket's edge in that bucket.
        coarse = exact + (ratio * (buckets - exact) + 1e-9).floor().long()
        bucket = torch.where(away < exact, away, coarse.clamp(max=buckets - 1))
        if self.bidirectional:
            bucket = bucket + (distance > 0).long() * buckets
        return bucket

    def _starts(self, buckets: int, exact: int) -> list[int]:
        """Return the distance at which each shared bucket but the first begins."""
        steps = (buckets - exact) / math.log(self.max_distance / exact)
        numbers = [math.floor(math.log(away / exact) * steps + 1e-9) for away in range(exact, self.max_distance + 1)]
        return [
            exact + next(i for i, number in enumerate(numbers) if number >= bucket)
            for bucket in range(1, buckets - exact)
        ]


@dataclass(frozen=True)
class LogClipped(DistanceRelation):
    """DeBERTa's buckets (transformers' make_log_bucket_position), of both signs.

    Distances below rows / 4 have a row of their own, further ones share logarithmic buckets; the
    future has one row more than the past.

    Args:
        rows: number of rows, a multiple of 4.
        max_distance: distances at or beyond it share the last bucket.
    """

    rows: int
    max_distance: int

    @property
    def size(self) -> int:
        return self.rows

    @property
    def lowest(self) -> int:
        return -self.max_distance

    @property
    def highest(self) -> int:
        return self.max_distance

    def of_distance(self, distance: Tensor) -> Tensor:
        """Return the rows in [0, rows) of distances, computed in fp32 as the released code does."""
        half, middle = self.rows // 2, self.rows // 4
        away = distance.abs()
        steps = torch.log(away.clamp(min=1) / middle)
        steps = steps / torch.log(torch.tensor((self.max_distance - 1) / middle))
        coarse = torch.ceil(steps * (middle - 1)) + middle
        bucket = torch.where(away <= middle, distance, (coarse * distance.sign()).long())
        return bucket.clamp(1 - half, half) + half - 1


@dataclass(frozen=True)
class Segments(Relation):
    """segment(i) * count + segment(j): Chen's segment pairs (Chen2021 eq. 9).

    Args:
        count: number of segments.
    """

    count: int

    @property
    def size(self) -> int:
        return self.count * self.count

    def ids(self, positions: Positions) -> Tensor:
        """Return the ids of the pairs of segments: (B, T, S).

        Raises:
            ValueError: if `positions` carries no segments.
        """
        if positions.segments is None:
            raise ValueError(
                "segment encoding needs segments, and this task supplies none: use "
                "--segment-encoding none or a task with sentence pairs"
            )
        query = positions.query_rows(positions.segments)
        return query[:, :, None] * self.count + positions.segments[:, None, :]


def sinusoid_of_distance(offset: Tensor, dim: int) -> Tensor:
    """Return the sinusoids R of offsets i - j (N,), in the layout of Dai2019's code: (N, dim), at least fp32."""
    exact = offset.dtype if offset.dtype == torch.float64 else torch.float32
    channel = torch.arange(0, dim, 2, device=offset.device, dtype=exact)
    angle = offset.to(exact)[:, None] * 10000 ** (-channel / dim)  # (N, ceil(dim/2))
    return torch.cat([angle.sin(), angle.cos()], dim=-1)[:, :dim]


def remap_distances(
    table: Tensor, source: DistanceRelation, target: DistanceRelation, length: int
) -> tuple[Tensor, float, float]:
    """Return a table over distances with the rows of another relation.

    A row of the target that several distances read becomes the mean of the source's rows for those of
    them that occur in inputs of `length` tokens, or of all of them if none occurs.

    Args:
        table: (H|1, R, ...) of the source.
        source: the relation by which it is read.
        target: the relation by which the result is read.
        length: longest input that the target is meant for.

    Returns:
        (H|1, R', ...); the largest change of a value that such inputs read (0: exact); and the largest
        change of a value that longer distances read.
    """
    if source == target:
        return table, 0.0, 0.0
    # The last distance stands for all further ones: no relation tells them apart.
    reach = max(-source.lowest, source.highest, -target.lowest, target.highest, length) + 1
    distance = torch.arange(-reach, reach + 1, device=table.device)
    old, new = source.of_distance(distance), target.of_distance(distance)
    occurs = distance.abs() < length
    counted = torch.zeros(target.size, dtype=torch.long, device=table.device)
    counted.index_add_(0, new, occurs.long())
    weight = (occurs | (counted[new] == 0)).to(table.dtype)
    total = torch.zeros(target.size, dtype=table.dtype, device=table.device)
    total.index_add_(0, new, weight)
    # One of a row's distances, plus the mean difference from it: equal rows stay equal to the bit.
    some = torch.zeros(target.size, dtype=torch.long, device=table.device)
    some[new[weight > 0]] = (weight > 0).nonzero()[:, 0]
    result = table[:, old[some]]
    tail = [1] * (table.dim() - 2)
    apart = (table[:, old] - result[:, new]) * weight.view(1, -1, *tail)
    mean = torch.zeros_like(result).index_add_(1, new, apart)
    result = result + mean / total.clamp(min=1).view(1, -1, *tail)
    error = (table[:, old] - result[:, new]).abs().reshape(table.size(0), len(new), -1)
    beyond = float(error[:, ~occurs].max()) if not bool(occurs.all()) else 0.0
    return result, float(error[:, occurs].max()), beyond
