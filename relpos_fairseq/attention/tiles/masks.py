"""Keys that a tile's rows may not see: their logits get a number that no other logit outweighs."""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.tiles.geometry import Tile


def least_logit(dtype: torch.dtype) -> float:
    """What an excluded key gets; a cell that several masks exclude stays finite."""
    return torch.finfo(dtype).min / 8


def visible_keys(inputs: AttentionInputs, stop: int) -> int:
    """How many keys, from the first, queries before row `stop` may see."""
    positions = inputs.positions
    if not inputs.causal:
        return positions.src_len
    return min(positions.src_len, positions.query_start + stop)


def excluding(inputs: AttentionInputs) -> Tensor | None:
    """(1, L) what a causal mask and a window add at each distance, or None without either."""
    if not inputs.causal and inputs.window is None:
        return None
    low, high = inputs.positions.lowest_distance, inputs.positions.highest_distance
    distance = torch.arange(low, high + 1, device=inputs.positions.device)
    hidden = distance > (0 if inputs.causal else high)
    if inputs.window is not None:
        hidden |= distance <= -inputs.window
    return hidden.to(inputs.exact)[None] * least_logit(inputs.exact)


class Masks:
    """One pass over the masks of all tiles.

    Args:
        inputs: the call.
        masked: whether causality and window are added elsewhere; always where rows fall.
        falling: rows stand in falling order.
    """

    def __init__(self, inputs: AttentionInputs, masked: bool, falling: bool) -> None:
        """Look where padding is."""
        self.inputs, self.corner, self.falling = inputs, inputs.causal and not masked, falling
        self.least = least_logit(inputs.exact)
        self._corner: Tensor | None = None
        if inputs.key_padding is not None:
            self.padded = inputs.key_padding.any(1).tolist()
            self.padding = inputs.key_padding.to(inputs.exact)[:, None, None] * self.least

    def add(self, logits: Tensor, tile: Tile) -> Tensor | None:
        """Exclude keys.

        Args:
            logits: (batch, heads, n, S) of the tile.
            tile: the tile.

        Returns:
            (batch, heads, n, 1) True where a row has no key left, or None: there is no such row.
        """
        if self.corner and tile.rows > 1:  # rows see all keys up to the first row's
            logits[..., tile.slot :] += self._corner_of(tile.rows)
        if self.inputs.documents is not None:
            logits += self._other_documents(tile)
        if self.inputs.key_padding is None or not any(self.padded[slice(*tile.batch)]):
            return None  # then every row sees itself
        logits += self.padding[slice(*tile.batch), ..., : tile.keys]
        dead = logits.amax(-1, keepdim=True) <= self.least / 2
        return dead if dead.any() else None

    def _corner_of(self, rows: int) -> Tensor:
        if self._corner is None or self._corner.size(0) != rows:
            full = torch.full((rows, rows), self.least, dtype=self.inputs.exact)
            self._corner = full.triu_(1).to(self.inputs.q.device)
        return self._corner

    def _other_documents(self, tile: Tile) -> Tensor:
        """(batch, 1, n, S)."""
        documents = self.inputs.documents[slice(*tile.batch)]
        ours = documents[:, tile.slot : tile.slot + tile.rows, None]
        other = (ours.flip(1) if self.falling else ours) != documents[:, None, : tile.keys]
        return other[:, None].to(self.inputs.exact) * self.least
