"""Terms that multiply the content: a centre of columns around the diagonal, and constant sides.

Left of a tile's centre all rows read the left tails of all tables, right of it the right tails.
There a gate is a factor, a product of three is (q (q.a)) . (k (k.b)), and a trilinear term is
(q w) . k: plain products of other queries and keys, which are made here under autograd.  The centre
is formed by the formula itself, as a small call of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relpos_fairseq.attention.formula import logits
from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.sheared import Sheared
from relpos_fairseq.attention.tiles.geometry import Tile
from relpos_fairseq.positions import Positions
from relpos_fairseq.terms import PositionTerms

FIELDS = ("query_vectors", "key_vectors", "gate", "trilinear")


@dataclass(frozen=True)
class Split:
    """Where tails begin, and the queries and keys of the sides; numbers are places of tables.

    Args:
        lowest: at and below this distance all tables read their left tails.
        highest: at and above it their right ones.
        sides: (query, key) places of the left and of the right side, (B, H, T|S, D).
        terms: multiplying terms, bare, with the places of their fields.
    """

    lowest: int
    highest: int
    sides: tuple[tuple[int, int], tuple[int, int]]
    terms: tuple[tuple[PositionTerms, dict[str, int]], ...]

    def columns(self, tile: Tile) -> tuple[slice, slice, slice]:
        """The keys left of the centre, in it, and right of it."""
        left = min(max(tile.slot + self.lowest + 1, 0), tile.slot)
        right = max(tile.slot + tile.rows - 1 + self.highest, tile.slot + tile.rows)
        right = min(right, tile.keys)
        return slice(0, left), slice(left, right), slice(right, tile.keys)


def multiplies(term: PositionTerms) -> bool:
    """Whether a term multiplies or replaces the content by more than a gate."""
    return term.product or term.trilinear is not None


def make_split(inputs: AttentionInputs, keep: Callable[[Tensor], int]) -> Split:
    """The split of a call with multiplying terms.

    Args:
        inputs: the call.
        keep: keeps a table and returns its place.
    """
    terms = [_bare(term) for term in inputs.terms if multiplies(term) or term.gate is not None]
    sides = []
    for tail in ("lowest", "highest"):
        q, k = inputs.q.to(inputs.exact) * inputs.scale, inputs.k.to(inputs.exact)
        for term in terms:
            q, k = _at_tail(term, q, k, inputs, getattr(term.relation, tail))
        sides.append((keep(q), keep(k)))
    places = [
        {name: keep(getattr(term, name)) for name in FIELDS if getattr(term, name) is not None}
        for term in terms
    ]
    return Split(
        min(term.relation.lowest for term in terms),
        max(term.relation.highest for term in terms),
        tuple(sides),
        tuple(zip(terms, places, strict=True)),
    )


def _bare(term: PositionTerms) -> PositionTerms:
    """What of a term multiplies."""
    kept = PositionTerms(term.relation, gate=term.gate, trilinear=term.trilinear)
    if not term.product:
        return kept
    vectors = {"query_vectors": term.query_vectors, "key_vectors": term.key_vectors}
    return replace(kept, product=True, **vectors)


def _at_tail(
    term: PositionTerms, q: Tensor, k: Tensor, inputs: AttentionInputs, distance: int
) -> tuple[Tensor, Tensor]:
    """Queries and keys whose product is the content at a distance where the term is constant."""
    row = int(term.relation.window(distance, distance, inputs.positions.device))

    def of(table: Tensor) -> Tensor:
        return table[:, row].to(inputs.exact)

    if term.gate is not None:
        q = q * of(term.gate)[:, None, None]
    if term.trilinear is not None:
        q = q * of(term.trilinear)[:, None]
    if term.product:
        plain_q, plain_k = inputs.q.to(inputs.exact), inputs.k.to(inputs.exact)
        q = q * (plain_q @ of(term.query_vectors)[..., None])
        k = k * (plain_k @ of(term.key_vectors)[..., None])
    return q, k


@dataclass
class Centre:
    """A tile's centre, and how to go back from it.

    Args:
        values: (batch, heads, n, w).
        leaves: the tile's queries and keys, then tables that want a gradient.
        places: those tables' places.
    """

    values: Tensor
    leaves: list[Tensor]
    places: list[int]


def make_centre(
    split: Split, scale: float, tile: Tile, q: Tensor, k: Tensor, tables: list, wanted: list[bool]
) -> Centre:
    """Form the centre of a tile by the formula.

    Args:
        split: the call's.
        scale: the call's.
        tile: which tile.
        q: (N, n, D) its queries.
        k: (N, w, D) the centre's keys.
        tables: the plan's tables.
        wanted: which tables want a gradient; none: the centre keeps no graph.
    """
    keeps = wanted is not None
    leaves = [tile.apart(part).detach().requires_grad_(keeps) for part in (q, k)]
    places, terms = [], []
    with torch.set_grad_enabled(keeps):
        for bare, named in split.terms:
            given = {}
            for name, place in named.items():
                table = tables[place].detach()
                if keeps and wanted[place]:
                    places.append(place)
                    leaves.append(table.requires_grad_())
                given[name] = table if table.size(0) == 1 else table[slice(*tile.heads)]
            terms.append(replace(bare, **given))
        first = split.columns(tile)[1].start
        positions = Positions(tile.rows, k.size(1), tile.slot - first, device=q.device)
        call = AttentionInputs(leaves[0], leaves[1], leaves[1], tuple(terms), positions, scale)
        return Centre(logits(Sheared(call)), leaves, places)
