"""The content of a tile where terms multiply it.

A gate and the products with queries are a number for every query and distance, the products with
keys one for every key and distance.  A tile's content is multiplied by both: in the tails, where
the distance does not matter, row by row and column by column, and between them along diagonals.
Both kinds of numbers are formed by ordinary autograd, whose tensors (N, n, W) are small.  A
trilinear term makes another content to be multiplied (`trilinear`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from relpos_fairseq.attention.banded import diagonals
from relpos_fairseq.attention.tiles.geometry import Tile, products, scratch
from relpos_fairseq.attention.tiles.split import Near
from relpos_fairseq.attention.tiles.trilinear import Trilinear
from relpos_fairseq.terms import PositionTerms

if TYPE_CHECKING:
    from relpos_fairseq.attention.tiles.forward import Forward


@dataclass
class Graph:
    """What autograd formed, and its leaves: queries or keys, then tables that want a gradient."""

    x: Tensor
    terms: list[PositionTerms]
    places: list[int]
    tables: list[Tensor]
    formed: Tensor | None = None


class Multiplied:
    """One pass over the content of all tiles.

    Args:
        run: the pass.
    """

    def __init__(self, run: Forward) -> None:
        """Meet the keys with their vectors."""
        self.run, self.split, self.training = run, run.plan.split, run.wanted is not None
        everything = Tile(0, 0, 0, 0, (0, run.batch), (0, run.heads), run.heads)
        self.keys = self._form("key_vectors", run.k, everything)
        self.by_key = None
        if self.keys.formed is not None:
            self.by_key = self._guarded()
            self._inner(self.by_key).copy_(self.keys.formed.detach())
            self.tails = self.keys.formed.detach()[..., [0, -1]].permute(2, 0, 1).contiguous()
            if self.training:
                self.by_key_grad = self._guarded()
                self.tails_grad = torch.zeros_like(self.tails)
        named = [named for _, named in self.split.terms]
        self.multiplies = any(len(names) > ("trilinear" in names) for names in named)
        self.trilinear = None
        for bare, names in self.split.terms:
            if "trilinear" in names:
                self.trilinear = Trilinear(run, bare.relation, names["trilinear"])
        self._near: dict[int, Near] = {}

    # --- numbers of queries and keys ------------------------------------------------------------

    def _form(self, vectors: str, x: Tensor, tile: Tile) -> Graph:
        """Products (N, L, W + 2) of queries or keys with all terms' vectors, from tail to tail.

        Gates go with the queries.  None is formed where no term has any.
        """
        run, split = self.run, self.split
        with torch.set_grad_enabled(self.training):
            graph = Graph(x.detach().contiguous().requires_grad_(self.training), [], [], [])
            for bare, named in split.terms:
                for name in (vectors, *(["gate"] if vectors == "query_vectors" else [])):
                    if name not in named:
                        continue
                    place = named[name]
                    table = run.tables[place].detach()
                    if self.training and run.wanted[place]:
                        graph.places.append(place)
                        graph.tables.append(table.requires_grad_())
                    ids = bare.relation.window(split.low, split.high, table.device)
                    rows = tile.of_heads(table[:, ids])
                    found = rows[:, None] if name == "gate" else products(graph.x, rows)
                    graph.formed = found if graph.formed is None else graph.formed * found
            if graph.formed is not None:
                graph.formed = graph.formed.expand(tile.count, x.size(1), -1)
        return graph

    def _back(self, graph: Graph, grad: Tensor, to: Tensor) -> None:
        """Add a graph's gradients to those of its tables, and to its queries' or keys'."""
        leaves = [graph.x, *graph.tables]
        found = torch.autograd.grad(graph.formed, leaves, grad, allow_unused=True)
        for place, part in zip(graph.places, found[1:], strict=True):
            self.run.totals[place] += part
        if found[0] is not None:
            to += found[0]

    def _guarded(self) -> Tensor:
        """(N, S + guards, W + 2) zeros for numbers of keys."""
        k, split = self.run.k, self.split
        rows = k.size(1) + max(-split.low, 0) + max(split.high, 0)
        return k.new_zeros(k.size(0), rows, split.width + 2)

    def _inner(self, numbers: Tensor) -> Tensor:
        """The rows of real keys."""
        start = max(-self.split.low, 0)
        return numbers[:, start : start + self.run.k.size(1)]

    def _along(self, numbers: Tensor, tile: Tile) -> Tensor:
        """View (N, n, W) of numbers of keys along a tile's diagonals."""
        part, width = numbers[tile.matrices], self.split.width
        row = tile.slot + self.split.low + 1 + max(-self.split.low, 0)
        first = part.storage_offset() + row * (width + 2) + 1
        shape, strides = (tile.count, tile.rows, width), (part.stride(0), width + 2, width + 3)
        return part.as_strided(shape, strides, first)

    # --- a tile -----------------------------------------------------------------------------------

    def near(self, tile: Tile) -> Near:
        """A tile's keys near the diagonal."""
        if tile.start not in self._near:
            self._near = {tile.start: Near.of(self.split, tile)}
        return self._near[tile.start]

    def _content(self, tile: Tile) -> Tensor:
        """(N, n, S) storage of the content before it is multiplied."""
        if self.training and self.multiplies:
            return scratch(self.run.q, "content", tile.count, tile.rows, tile.keys)
        return self.run.buffer.of(tile)

    def fill(self, tile: Tile) -> None:
        """Write the content of a tile into the pass' buffer."""
        run, content = self.run, self._content(tile)
        if self.trilinear is not None:
            self.trilinear.fill(tile, self.near(tile), content)
        else:
            q, k = run.q[tile.query], run.k[tile.key].transpose(1, 2)
            torch.baddbmm(content, q, k, beta=0, alpha=run.scale, out=content)
        if self.multiplies:
            self.queries = self._form("query_vectors", run.q[tile.query], tile)
            self._multiply(tile, content, run.buffer.of(tile))

    def _multiply(self, tile: Tile, content: Tensor, out: Tensor) -> None:
        near, by_query = self.near(tile), self.queries.formed.detach()
        rows = {side: by_query[..., side, None] for side in (0, -1)}
        for side, keys in near.far(tile):
            torch.mul(content[:, :, keys], rows[side], out=out[:, :, keys])
            if self.by_key is not None:
                out[:, :, keys] *= self.tails[side, tile.matrices, None, keys]
        matrix = self._matrix(tile, "factors")
        inner = matrix[:, :, near.inner]
        for side, top, keys in near.sides():
            part = inner[:, top, keys.start - near.keys.start : keys.stop - near.keys.start]
            if self.by_key is None:
                part.copy_(rows[side][:, top].expand_as(part))
            else:
                column = self.tails[side, tile.matrices, None, keys]
                torch.mul(rows[side][:, top], column, out=part)
        band = by_query[..., 1:-1]
        if self.by_key is not None:
            band = band * self._along(self.by_key, tile)
        diagonals(matrix).copy_(band)
        torch.mul(content[:, :, near.keys], inner, out=out[:, :, near.keys])

    def _matrix(self, tile: Tile, name: str) -> Tensor:
        """Storage (N, n, n + W - 1) for all columns near the diagonal."""
        columns = tile.rows + self.split.width - 1
        return scratch(self.run.q, name, tile.count, tile.rows, columns)

    def back(self, tile: Tile, grads: Tensor, to: Tensor) -> None:
        """From the gradient of a tile's content (overwritten); add to its queries' (N, n, D)."""
        run = self.run
        found = self._through_factors(tile, grads) if self.multiplies else None
        if self.trilinear is not None:
            self.trilinear.back(tile, self.near(tile), grads, to)
        else:
            to.baddbmm_(grads, run.k[tile.key], alpha=run.scale)
            q = run.q[tile.query]
            run.dk[tile.key].baddbmm_(grads.transpose(1, 2), q, alpha=run.scale)
        if found is not None:
            self._back(self.queries, found, to)

    def _through_factors(self, tile: Tile, grads: Tensor) -> Tensor:
        """Leave the gradient of the content in `grads`; returns that of numbers of queries."""
        near, by_query = self.near(tile), self.queries.formed.detach()
        found = torch.zeros_like(by_query, memory_format=torch.contiguous_format)
        content = self._content(tile).mul_(grads)  # the gradient of the factors
        matrix = self._matrix(tile, "of factors")
        inner = matrix[:, :, near.inner]
        if inner.size(2) < matrix.size(2):
            matrix.zero_()
        inner.copy_(content[:, :, near.keys])
        band = diagonals(matrix).clone()
        diagonals(matrix).zero_()
        if self.by_key is None:
            found[..., 1:-1] = band
        else:
            torch.mul(band, self._along(self.by_key, tile), out=found[..., 1:-1])
            self._along(self.by_key_grad, tile).addcmul_(band, by_query[..., 1:-1])
        for side, top, keys in near.sides():
            part = inner[:, top, keys.start - near.keys.start : keys.stop - near.keys.start]
            self._through_tail(tile, side, top, keys, part, found)
        for side, keys in near.far(tile):
            self._through_tail(tile, side, slice(0, tile.rows), keys, content[:, :, keys], found)
            grads[:, :, keys] *= by_query[..., side, None]
            if self.by_key is not None:
                grads[:, :, keys] *= self.tails[side, tile.matrices, None, keys]
        grads[:, :, near.keys] *= self._matrix(tile, "factors")[:, :, near.inner]
        return found

    def _through_tail(
        self, tile: Tile, side: int, rows: slice, keys: slice, grad: Tensor, found: Tensor
    ) -> None:
        """From the gradient of factors in a tail to its numbers of queries and of keys."""
        if self.by_key is None:
            found[:, rows, side] += grad.sum(-1)
            return
        column = self.tails[side, tile.matrices, None, keys]
        found[:, rows, side] += torch.bmm(column, grad.transpose(1, 2))[:, 0]
        row = self.queries.formed.detach()[:, None, rows, side]
        self.tails_grad[side, tile.matrices, None, keys] += torch.bmm(row, grad)

    def finish(self) -> None:
        """From the numbers of keys to the keys and their vectors, once for all tiles."""
        if self.by_key is not None:
            grad = self._inner(self.by_key_grad)
            grad[..., 0], grad[..., -1] = self.tails_grad
            self._back(self.keys, grad, self.run.dk)
