"""Keys that a tile's rows may not see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.tiles.geometry import Tile


@dataclass(frozen=True)
class Exclusion:
    """Excluded keys of a tile.

    Args:
        cells: (batch|1, 1, n, S') True where excluded, for the last S' keys; None: none is.
        dead: (batch|1, 1, n, 1) True where a row has no key left, or None: no such row.
    """

    cells: Tensor | None
    dead: Tensor | None

    def fill(self, logits: Tensor) -> None:
        """Give excluded cells of (batch, heads, n, S) the least logit."""
        if self.cells is not None:
            part = logits[..., logits.size(-1) - self.cells.size(-1) :]
            part.masked_fill_(self.cells, torch.finfo(logits.dtype).min)

    def clear(self, probs: Tensor) -> None:
        """Rows without any key get probability 0 everywhere."""
        if self.dead is not None:
            probs.masked_fill_(self.dead, 0.0)


def visible_keys(inputs: AttentionInputs, stop: int) -> int:
    """How many keys, from the first, queries before row `stop` may see."""
    positions = inputs.positions
    if not inputs.causal:
        return positions.src_len
    return min(positions.src_len, positions.query_start + stop)


def exclusion(inputs: AttentionInputs, tile: Tile) -> Exclusion:
    """What a tile's rows may not see of the keys that the tile has."""
    masks = (inputs.key_padding, inputs.window, inputs.documents)
    if all(mask is None for mask in masks):
        # Causal rows see all keys up to the first row's, so only the last corner is excluded.
        if not inputs.causal or tile.rows == 1:
            return Exclusion(None, None)
        device = inputs.q.device
        row = torch.arange(tile.rows, device=device)[:, None]
        corner = torch.arange(tile.slot, tile.keys, device=device) > tile.slot + row
        return Exclusion(corner[None, None], None)
    cells = inputs.rows(tile.start, tile.stop).excluded()
    if cells is None:  # the last row alone, and a window that reaches the first key
        return Exclusion(None, None)
    cells = cells[..., : tile.keys]
    if cells.size(0) > 1:
        cells = cells[slice(*tile.batch)]
    if inputs.key_padding is None:  # then every row sees itself
        return Exclusion(cells, None)
    dead = cells.all(-1, keepdim=True)
    return Exclusion(cells, dead if dead.any() else None)
