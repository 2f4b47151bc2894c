"""Terms that multiply the content: where their band stands between two constant tails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.tiles.geometry import Tile
from relpos_fairseq.terms import PositionTerms

STRIP = 32  # rows of a tile whose band has a common column, at least
FIELDS = ("query_vectors", "key_vectors", "gate", "trilinear")


@dataclass(frozen=True)
class Split:
    """Which terms multiply, and where their tails begin.

    Args:
        low: at and below this distance all tables read their left tails.
        high: at and above it their right ones.
        right: whether any query sees a key so far to its right.
        terms: multiplying terms, bare, with the places of their fields in the plan's tables.
    """

    low: int
    high: int
    right: bool
    terms: tuple[tuple[PositionTerms, dict[str, int]], ...]

    @property
    def width(self) -> int:
        """Distances W of the band."""
        return self.high - self.low - 1


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
    low = min(term.relation.lowest for term in terms)
    low = max(low, inputs.positions.lowest_distance - 1)
    high = max(term.relation.highest for term in terms)
    high = min(high, 0 if inputs.causal else inputs.positions.highest_distance) + 1
    right = not inputs.causal and inputs.positions.highest_distance >= high - 1
    # A strip of rows has one column left of which no cell is in a right tail, and right of which
    # none is in a left one, if the band is as wide: its last columns may repeat the right tail.
    high = max(high - 1 if right else high, low + (STRIP if right else 2))
    return Split(
        low,
        high,
        right,
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
        first: key slot of the first of n + W - 1 columns, which may be no key.
        keys: those columns that are keys.
        edges: for strips of rows, (start, stop, edge): keys before the edge are in no row's right
            tail, and keys from the edge on are in no row's left tail.
    """

    first: int
    keys: slice
    edges: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, split: Split, tile: Tile) -> Near:
        """A tile's."""
        first, stop = tile.slot + split.low + 1, tile.slot + tile.rows - 1 + split.high
        start, stop = (min(max(edge, 0), tile.keys) for edge in (first, stop))
        rows = split.high - split.low if split.right else tile.rows
        edges = []
        for top in range(0, tile.rows, rows):
            edge = tile.slot + top + split.high if split.right else stop
            bottom = min(top + rows, tile.rows)
            edges.append((top, bottom, min(max(edge, start), stop)))
        return cls(first, slice(start, stop), tuple(edges))

    @property
    def inner(self) -> slice:
        """The columns of `keys` among all columns."""
        return slice(self.keys.start - self.first, self.keys.stop - self.first)

    def sides(self) -> Iterator[tuple[int, slice, slice]]:
        """Where each tail is read: 0 or -1, rows, and keys near the diagonal."""
        for top, bottom, edge in self.edges:
            for side, keys in (
                (0, slice(self.keys.start, edge)),
                (-1, slice(edge, self.keys.stop)),
            ):
                if keys.start < keys.stop:
                    yield side, slice(top, bottom), keys

    def far(self, tile: Tile) -> Iterator[tuple[int, slice]]:
        """The keys that are in one tail of all rows: 0 or -1, and which."""
        for side, keys in ((0, slice(0, self.keys.start)), (-1, slice(self.keys.stop, tile.keys))):
            if keys.start < keys.stop:
                yield side, keys
