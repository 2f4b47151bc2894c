"""Where a tile stands, and its diagonals as views of its logits.

The diagonals of a row-major matrix (n, S) are strided by S + 1, so row t's keys at the distances
lowest + 1 .. lowest + W are the view with strides (S + 1, 1).  Where such a key does not exist the
view shows a neighbouring cell: whoever writes adds 0 there, and whoever reads replaces it by 0 (the
band's mask).  Cells before the first and after the last row are guards of the buffer.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from relpos_fairseq.attention.tiles.bands import Band

_STORAGE = threading.local()


@dataclass(frozen=True)
class Tile:
    """Rows [start, stop) of some heads of some rows of the batch.

    Args:
        start: first query row.
        stop: query row after the last.
        slot: least key slot of a query row: the first one's, or the last one's where rows fall.
        keys: how many keys, from the first, the rows may see.
        batch: (first, last + 1) row of the batch.
        heads: (first, last + 1) head.
        num_heads: heads H of the call.
    """

    start: int
    stop: int
    slot: int
    keys: int
    batch: tuple[int, int]
    heads: tuple[int, int]
    num_heads: int

    @property
    def rows(self) -> int:
        """Number of query rows n."""
        return self.stop - self.start

    @property
    def count(self) -> int:
        """Number of matrices: heads times rows of the batch."""
        return (self.batch[1] - self.batch[0]) * (self.heads[1] - self.heads[0])

    @property
    def matrices(self) -> slice:
        """The tile's place in a tensor (B * H, ...)."""
        first = self.batch[0] * self.num_heads + self.heads[0]
        return slice(first, first + self.count)

    @property
    def query(self) -> tuple[slice, slice]:
        """The tile's place in a tensor (B * H, T, ...)."""
        return self.matrices, slice(self.start, self.stop)

    @property
    def key(self) -> tuple[slice, slice]:
        """The keys' place in a tensor (B * H, S, ...)."""
        return self.matrices, slice(0, self.keys)

    def apart(self, matrices: Tensor) -> Tensor:
        """(count, n, S) as (batch, heads, n, S)."""
        return matrices.view(-1, self.heads[1] - self.heads[0], *matrices.shape[1:])

    def of_heads(self, table: Tensor) -> Tensor:
        """(H|1, ...) as (1|count, ...)."""
        if table.size(0) == 1:
            return table
        table = table[slice(*self.heads)]
        repeats = self.batch[1] - self.batch[0]
        return table if repeats == 1 else table.repeat(repeats, *(1,) * (table.dim() - 1))


class Buffer:
    """Storage of a tile's logits, with guard cells before and after.

    On a CPU fresh memory of this size is paid for page by page, so a thread keeps what it had.

    Args:
        elements: the largest tile's.
        guard: cells at either end.
        like: tensor whose type and device it has.
        name: buffers in use at the same time have different names.
    """

    def __init__(self, elements: int, guard: int, like: Tensor, name: str) -> None:
        """Take the thread's storage, or allocate."""
        self.guard = guard
        self._key = name, like.dtype, like.device
        kept = vars(_STORAGE).setdefault("cells", {}).pop(self._key, None)
        if kept is None or kept.numel() < elements + 2 * guard:
            with torch.inference_mode(False):  # whose tensors no later training could write
                kept = like.new_empty(elements + 2 * guard)
        self.cells = kept

    def give_back(self) -> None:
        """Leave the storage to the thread's next call."""
        if self.cells.device.type == "cpu":
            _STORAGE.cells[self._key] = self.cells

    def of(self, tile: Tile) -> Tensor:
        """(count, n, S) for a tile."""
        size = tile.count * tile.rows * tile.keys
        return self.cells[self.guard : self.guard + size].view(tile.count, tile.rows, tile.keys)

    def diagonals(self, tile: Tile, band: Band, columns: slice) -> Tensor:
        """View (count, n, w): row t's keys at the distances of some columns of a band."""
        rows, keys, width = tile.rows, tile.keys, columns.stop - columns.start
        first = self.guard + tile.slot + band.lowest + columns.start
        return self.cells.as_strided((tile.count, rows, width), (rows * keys, keys + 1, 1), first)


def scratch(like: Tensor, name: str, *shape: int) -> Tensor:
    """Storage of a shape, type and device for use within one tile; its cells hold anything."""
    size = math.prod(shape)
    if like.device.type != "cpu":
        return like.new_empty(shape)
    kept, key = vars(_STORAGE).setdefault("cells", {}), (name, like.dtype, like.device)
    if key not in kept or kept[key].numel() < size:
        with torch.inference_mode(False):
            kept[key] = like.new_empty(size)
    return kept[key][:size].view(shape)


def products(x: Tensor, table: Tensor) -> Tensor:
    """X (N, n, D) by vectors (1|N, W, D): (N, n, W)."""
    if table.size(0) == 1:
        return (x.reshape(-1, x.size(-1)) @ table[0].t()).view(*x.shape[:2], -1)
    return torch.bmm(x, table.transpose(1, 2))


def products_back(grad: Tensor, table: Tensor) -> Tensor:
    """Gradient (N, n, D) of `products` by x."""
    if table.size(0) == 1:
        return (grad.reshape(-1, grad.size(-1)) @ table[0]).view(*grad.shape[:2], -1)
    return torch.bmm(grad, table)


def add_products(
    total: Tensor, x: Tensor, table: Tensor, scale: float = 1.0, beta: float = 1.0
) -> None:
    """Add to beta times total (N, n, E) the products of x (N, n, W) with a table (1|N, W, E)."""
    if table.size(0) == 1 and x.is_contiguous() and total.is_contiguous():
        flat = total.view(-1, total.size(-1))
        flat.addmm_(x.view(-1, x.size(-1)), table[0], alpha=scale, beta=beta)
    else:
        total.baddbmm_(x, table.expand(x.size(0), -1, -1), alpha=scale, beta=beta)


def add_table_gradient(total: Tensor, grad: Tensor, x: Tensor, tile: Tile) -> None:
    """Add the gradient of `products` by its table to total (H|1, W, D)."""
    # A product over all rows of all matrices at once would be slower, and rounds far worse.
    found = torch.bmm(grad.transpose(1, 2), x)
    if total.size(0) == 1:
        total[0] += found.sum(0)
    else:
        total[slice(*tile.heads)] += tile.apart(found).sum(0)
