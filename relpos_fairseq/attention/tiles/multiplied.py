"""The content of a tile where terms multiply it.

In a tail a gate is a factor, a product of three is (q (q.a)) . (k (k.b)), and a trilinear term is
(q w) . k: plain products of other queries and keys.  Between the tails stands a band of diagonals.
The tile's queries of both tails and its band are small, (N, n, D) and (N, n, W): they are formed
by ordinary autograd, and their gradients go back the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.attention.banded import content_band, diagonals, key_band
from relpos_fairseq.attention.tiles.geometry import Tile, products, scratch
from relpos_fairseq.attention.tiles.split import Near
from relpos_fairseq.attention.toeplitz import trilinear_band
from relpos_fairseq.terms import PositionTerms

if TYPE_CHECKING:
    from relpos_fairseq.attention.tiles.forward import Forward


@dataclass
class Graph:
    """Leaves of what autograd forms: parts of queries and keys, and tables that want a gradient."""

    parts: list[Tensor]
    places: list[int]
    tables: list[Tensor]
    terms: list[PositionTerms]


class Multiplied:
    """One pass over the content of all tiles.

    Args:
        run: the pass.
    """

    def __init__(self, run: Forward) -> None:
        """Meet the keys with the tails' vectors."""
        self.run, self.split = run, run.plan.split
        self.back_and_forth = run.wanted is not None
        self._near: dict[int, Near] = {}
        with torch.set_grad_enabled(self.back_and_forth):
            self.of_keys = self._open(run.k)
            self.factors = self._key_factors()
        if self.back_and_forth:  # gradients of the sides' keys, which may be the keys themselves
            apart = self.factors is not None
            self.grads = [torch.zeros_like(run.dk) if apart else run.dk for _ in range(2)]

    def _open(self, *parts: Tensor) -> Graph:
        run = self.run
        parts = [part.detach().requires_grad_(self.back_and_forth) for part in parts]
        graph = Graph(parts, [], [], [])
        for bare, named in self.split.terms:
            given = {name: run.tables[place].detach() for name, place in named.items()}
            for name, place in named.items():
                if self.back_and_forth and run.wanted[place]:
                    graph.places.append(place)
                    graph.tables.append(given[name].requires_grad_())
            graph.terms.append(replace(bare, product="key_vectors" in given, **given))
        return graph

    def _close(self, graph: Graph, outputs: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Gradients of a graph's parts; those of its tables are added to the totals."""
        leaves = [*graph.parts, *graph.tables]
        found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
        for place, grad in zip(graph.places, found[len(graph.parts) :], strict=True):
            if grad is not None:
                self.run.totals[place] += grad
        return list(found[: len(graph.parts)])

    def _key_factors(self) -> Tensor | None:
        """(N, S, 2): what the keys are multiplied by in the left and in the right tail."""
        run, factors = self.run, None
        everything = Tile(0, 0, 0, 0, (0, run.batch), (0, run.heads), run.heads)
        for term in self.of_keys.terms:
            if term.product:
                device = run.k.device
                tails = torch.tensor([self.split.lowest, self.split.highest], device=device)
                table = term.key_vectors[:, term.relation.of_distance(tails)]
                found = products(self.of_keys.parts[0], everything.of_heads(table))
                factors = found if factors is None else factors * found
        return factors

    def _keys(self, tile: Tile, side: int, keys: slice) -> Tensor:
        """(N, keys, D): the keys as a side's queries meet them."""
        found = self.run.k[tile.matrices, keys]
        if self.factors is None:
            return found
        factor = self.factors.detach()[tile.matrices, keys, side, None]
        return torch.mul(found, factor, out=scratch(found, "keys", *found.shape))

    def _near_of(self, tile: Tile) -> Near:
        if tile.start not in self._near:
            causal = self.run.inputs.causal
            self._near = {tile.start: Near.of(self.split, tile, causal, self.run.q)}
        return self._near[tile.start]

    def _form(self, graph: Graph, tile: Tile, near: Near) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the left and of the right tail (N, n, D), and the band (N, n, W)."""
        q, keys = graph.parts
        columns = tile.rows + near.width - 1
        k = F.pad(keys, (0, 0, near.inner.start, columns - near.inner.stop))
        left = right = q * self.run.scale
        band, inner = None, slice(1, -1)
        for term in graph.terms:
            if term.trilinear is not None:
                w = self._rows(term.trilinear, term, tile, near)
                band = trilinear_band(left[None], k[None], w[:, inner], tile.rows - 1)[0]
                left, right = left * w[:, :1], right * w[:, -1:]
        if band is None:
            band = content_band(left, k)
        for term in graph.terms:
            if term.gate is not None:
                gate = self._rows(term.gate[..., None], term, tile, near).transpose(1, 2)
                left, right = left * gate[..., :1], right * gate[..., -1:]
                band = band * gate[..., inner]
            if term.product:
                a = products(q, self._rows(term.query_vectors, term, tile, near))
                b = products(k, self._rows(term.key_vectors, term, tile, near)[:, inner])
                left, right = left * a[..., :1], right * a[..., -1:]
                band = band * a[..., inner] * key_band(b, tile.rows)
        return left, right, band

    def _rows(self, table: Tensor, term: PositionTerms, tile: Tile, near: Near) -> Tensor:
        """(1|N, W + 2, ...): a table's rows from the left tail over the band to the right tail."""
        ids = term.relation.window(near.low, near.low + near.width + 1, table.device)
        return tile.of_heads(table[:, ids])

    def fill(self, tile: Tile) -> None:
        """Write the content of a tile into the pass' buffer."""
        run, near = self.run, self._near_of(tile)
        logits, start, stop = run.buffer.of(tile), near.keys.start, near.keys.stop
        with torch.set_grad_enabled(self.back_and_forth):
            self.graph = self._open(run.q[tile.query], run.k[tile.matrices, near.keys])
            self.formed = self._form(self.graph, tile, near)
        left, right, band = (part.detach() for part in self.formed)
        keys = self._keys(tile, 0, slice(0, stop))
        torch.bmm(left, keys.transpose(1, 2), out=logits[:, :, :stop])
        matrix = _matrix(tile, near, logits)
        inner = matrix[:, :, near.inner]
        if self.split.right:
            keys = self._keys(tile, 1, slice(start, tile.keys)).transpose(1, 2)
            torch.bmm(right, keys[:, :, : stop - start], out=inner)
            torch.bmm(right, keys[:, :, stop - start :], out=logits[:, :, stop:])
        diagonals(matrix).copy_(band)
        cells = logits[:, :, near.keys]
        torch.where(near.taken, inner, cells, out=cells)

    def back(self, tile: Tile, grads: Tensor) -> Tensor:
        """From the gradient of a tile's content (overwritten) to its queries' (N, n, D)."""
        near, stop = self._near_of(tile), self._near_of(tile).keys.stop
        left, right, _ = (part.detach() for part in self.formed)
        matrix, cells = _matrix(tile, near, grads), grads[:, :, near.keys]
        inner = matrix[:, :, near.inner]
        if inner.size(2) < matrix.size(2):
            matrix.zero_()
        torch.mul(cells, near.weight, out=inner)
        cells.sub_(inner)
        of_band = diagonals(matrix).clone()
        found = [self._side(0, tile, slice(0, stop), left, grads[:, :, :stop])]
        if self.split.right:
            diagonals(matrix).zero_()
            of_right = self._side(1, tile, near.keys, right, inner)
            of_right += self._side(1, tile, slice(stop, tile.keys), right, grads[:, :, stop:])
            found.append(of_right)
        outputs = [*self.formed[: len(found)], self.formed[2]]
        queries, keys = self._close(self.graph, outputs, [*found, of_band])
        self.run.dk[tile.matrices, near.keys] += keys
        self.graph = self.formed = None
        return queries

    def _side(self, side: int, tile: Tile, keys: slice, queries: Tensor, grad: Tensor) -> Tensor:
        """Through one side's products: its keys' gradient is added, its queries' returned."""
        self.grads[side][tile.matrices, keys].baddbmm_(grad.transpose(1, 2), queries)
        return torch.bmm(grad, self._keys(tile, side, keys))

    def finish(self) -> None:
        """From the sides' keys to the keys and the tails' vectors, once for all tiles."""
        if self.factors is None:
            return
        upstream = torch.empty_like(self.factors)
        for side, grad in enumerate(self.grads):
            self.run.dk.addcmul_(grad, self.factors.detach()[..., side, None])
            upstream[..., side] = grad.mul_(self.run.k).sum(-1)
        (keys,) = self._close(self.of_keys, [self.factors], [upstream])
        self.run.dk += keys


def _matrix(tile: Tile, near: Near, like: Tensor) -> Tensor:
    """Storage (N, n, n + W - 1) for all columns near the diagonal."""
    return scratch(like, "near", tile.count, tile.rows, tile.rows + near.width - 1)
