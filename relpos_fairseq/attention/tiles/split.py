"""Terms that multiply the content: where their band stands between two constant tails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.tiles.geometry import Tile
from relpos_fairseq.terms import PositionTerms

FIELDS = ("query_vectors", "key_vectors", "gate", "trilinear")


@dataclass(frozen=True)
class Split:
    """Which terms multiply, and where their tails begin.

    Args:
        lowest: at and below this distance all tables read their left tails.
        highest: at and above it their right ones.
        right: whether any query sees a key so far to its right.
        terms: multiplying terms, bare, with the places of their fields in the plan's tables.
    """

    lowest: int
    highest: int
    right: bool
    terms: tuple[tuple[PositionTerms, dict[str, int]], ...]


def multiplies(term: PositionTerms) -> bool:
    """Whether a term multiplies or replaces the content by more than a gate."""
    return term.product or term.trilinear is not None


def make_split(inputs: AttentionInputs, keep: Callable[[Tensor], int]) -> Split:
    """The split of a call with multiplying terms.

    Args:
        inputs: the call.
        keep: keeps a table and returns its place.
    """
    terms = [term for term in inputs.terms if multiplies(term) or term.gate is not None]
    highest = max(term.relation.highest for term in terms)
    return Split(
        min(term.relation.lowest for term in terms),
        highest,
        not inputs.causal and inputs.positions.highest_distance >= highest,
        tuple((PositionTerms(term.relation), _kept(term, keep)) for term in terms),
    )


def _kept(term: PositionTerms, keep: Callable[[Tensor], int]) -> dict[str, int]:
    """Places of what of a term multiplies."""
    fields = FIELDS if term.product else FIELDS[2:]
    given = {name: getattr(term, name) for name in fields}
    return {name: keep(table) for name, table in given.items() if table is not None}


@dataclass(frozen=True)
class Near:
    """The keys of a tile that are neither in all rows' left tails nor in all rows' right ones.

    Args:
        low: distance before the band's first.
        width: distances W of the band.
        first: key slot of the first column, which may be no key.
        keys: those columns that are keys.
        taken: (n, keys) True where a cell is not in its row's left tail.
        weight: the same as 1 and 0.
    """

    low: int
    width: int
    first: int
    keys: slice
    taken: Tensor
    weight: Tensor

    @classmethod
    def of(cls, split: Split, tile: Tile, causal: bool, like: Tensor) -> Near:
        """A tile's."""
        last = tile.slot + tile.rows - 1
        low = max(split.lowest, -last - 1)
        high = max(min(split.highest, 1 if causal else tile.keys - tile.slot), low + 2)
        first, stop = tile.slot + low + 1, last + high
        keys = slice(*(min(max(edge, 0), tile.keys) for edge in (first, stop)))
        column = torch.arange(keys.start, keys.stop, device=like.device)
        row = torch.arange(tile.slot, last + 1, device=like.device)[:, None]
        taken = column - row > low
        if not split.right:
            taken &= column - row < high
        return cls(low, high - low - 1, first, keys, taken, taken.to(like.dtype))

    @property
    def inner(self) -> slice:
        """The columns of `keys` among all columns."""
        return slice(self.keys.start - self.first, self.keys.stop - self.first)
