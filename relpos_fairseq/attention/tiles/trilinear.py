"""A trilinear term's content of a tile: a band, and two tails that are plain products."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.attention.banded import diagonals
from relpos_fairseq.attention.tiles.geometry import Tile, scratch
from relpos_fairseq.attention.tiles.split import Near
from relpos_fairseq.attention.toeplitz import trilinear_band
from relpos_fairseq.relations import DistanceRelation

if TYPE_CHECKING:
    from relpos_fairseq.attention.tiles.forward import Forward


class Trilinear:
    """One pass over the content of all tiles.

    Args:
        run: the pass.
        relation: that the vectors are read by.
        place: of the vectors (H|1, R, D) in the plan's tables.
    """

    def __init__(self, run: Forward, relation: DistanceRelation, place: int) -> None:
        """Read the vectors from tail to tail."""
        self.run, self.split, self.place = run, run.plan.split, place
        self.ids = relation.window(self.split.low, self.split.high, run.q.device)
        self.training = run.wanted is not None

    def fill(self, tile: Tile, near: Near, out: Tensor) -> None:
        """Write a tile's content (N, n, S)."""
        left, right, band = self._form(tile, near)
        keys, stop = self.run.k[tile.key].transpose(1, 2), near.keys.stop
        torch.bmm(left, keys[:, :, :stop], out=out[:, :, :stop])
        matrix = self._matrix(tile)
        inner = matrix[:, :, near.inner]
        if self.split.right:
            torch.bmm(right, keys[:, :, near.keys], out=inner)
            torch.bmm(right, keys[:, :, stop:], out=out[:, :, stop:])
        else:
            matrix.zero_()
        diagonals(matrix).copy_(band)
        # Exact at weights of 0 and 1.
        cells = out[:, :, near.keys]
        torch.lerp(cells, inner, self._weight(tile, near), out=cells)

    def back(self, tile: Tile, near: Near, grads: Tensor, to: Tensor) -> None:
        """From the content's gradient (overwritten); add to queries' (N, n, D), and keys'."""
        run, stop = self.run, near.keys.stop
        left, right, _ = (part.detach() for part in self.formed)
        matrix, cells = self._matrix(tile), grads[:, :, near.keys]
        inner = matrix[:, :, near.inner]
        if inner.size(2) < matrix.size(2):
            matrix.zero_()
        torch.mul(cells, self._weight(tile, near), out=inner)
        cells.sub_(inner)
        upstream = [diagonals(matrix).clone(), self._side(tile, slice(0, stop), left, grads)]
        if self.split.right:
            diagonals(matrix).zero_()
            of_right = self._side(tile, near.keys, right, inner, 0)
            upstream.append(of_right.add_(self._side(tile, slice(stop, tile.keys), right, grads)))
        outputs = (self.formed[2], *self.formed[: len(upstream) - 1])
        found = torch.autograd.grad(outputs, self.leaves, upstream)
        to += found[0]
        run.dk[tile.matrices, near.keys] += found[1]
        if len(found) > 2:
            run.totals[self.place] += found[2]
        self.formed = self.leaves = None

    def _form(self, tile: Tile, near: Near) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of the left and of the right tail (N, n, D), and the band (N, n, W)."""
        run, columns = self.run, tile.rows + self.split.width - 1
        self.leaves = [run.q[tile.query].contiguous(), run.k[tile.matrices, near.keys]]
        table = run.tables[self.place].detach()
        with torch.set_grad_enabled(self.training):
            self.leaves = [x.detach().requires_grad_(self.training) for x in self.leaves]
            if self.training and run.wanted[self.place]:
                self.leaves.append(table.requires_grad_())
            w = tile.of_heads(table[:, self.ids])  # (1|N, W + 2, D)
            k = F.pad(self.leaves[1], (0, 0, near.inner.start, columns - near.inner.stop))
            q = self.leaves[0] * run.scale
            band = trilinear_band(q[None], k[None], w[:, 1:-1], tile.rows - 1)[0]
            self.formed = q * w[:, :1], q * w[:, -1:], band
        return tuple(part.detach() for part in self.formed)

    def _side(
        self, tile: Tile, keys: slice, queries: Tensor, grads: Tensor, first: int | None = None
    ) -> Tensor:
        """Through a tail's product: the keys' gradient is added, the queries' returned."""
        grad = grads[:, :, keys] if first is None else grads
        self.run.dk[tile.matrices, keys].baddbmm_(grad.transpose(1, 2), queries)
        return torch.bmm(grad, self.run.k[tile.matrices, keys])

    def _matrix(self, tile: Tile) -> Tensor:
        """Storage (N, n, n + W - 1) for all columns near the diagonal."""
        columns = tile.rows + self.split.width - 1
        return scratch(self.run.q, "near", tile.count, tile.rows, columns)

    def _weight(self, tile: Tile, near: Near) -> Tensor:
        """(n, keys) 1 where a cell is not in its row's left tail, else 0."""
        device = self.run.q.device
        row = torch.arange(tile.slot, tile.slot + tile.rows, device=device)[:, None]
        column = torch.arange(near.keys.start, near.keys.stop, device=device)
        taken = column - row > self.split.low
        if not self.split.right:
            taken &= column - row < self.split.high
        return taken.to(self.run.q.dtype)
