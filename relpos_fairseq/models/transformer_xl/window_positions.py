"""Absolute positions over memory and segment: attn_type 2 and 3 of Transformer-XL's released code.

    first    h_i = x_i + p(L - 1 - i)      of the first layer's input; p the sinusoids of its R
    every    h_i = x_i + r_(M + i)         of every layer's input; r learned, a table a layer

i counts from the start of a segment of L tokens (--tokens-per-sample); the M tokens of memory
before it have -M .. -1, and further ones read the table's first row.  What is remembered is h: in
the next segment it gets the positions that it has there on top of those that it had.  The released
code counts from a segment's end, so that a shorter segment moves its tokens; here they stay, which
is the same for segments of L tokens, and lets decoding write one token after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.placement import encode_text
from relpos_fairseq.positions import is_exported
from relpos_fairseq.relations import sinusoid_of_distance

KINDS = ("none", "first", "every")


class WindowPositions(nn.Module):
    """What is added to the inputs of layers.

    Args:
        kind: `first` or `every`.
        layers: number of layers.
        mem_len: M.
        segment: L.
        width: E of the model.
        std: standard deviation of the tables' initial values.
    """

    def __init__(self, kind: str, layers: int, mem_len: int, segment: int, width: int, std: float) -> None:
        super().__init__()
        self.mem_len, self.segment, self.width = mem_len, segment, width
        self.table = None
        if kind == "every":
            random = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
            drawn = torch.randn(layers, mem_len + segment, width, generator=random)
            self.table = nn.Parameter(drawn * std)
        # Without it a checkpoint of `first` would load under other flags.
        self.register_buffer("version", encode_text(kind))

    def on_input(self, start: int, stop: int, device: torch.device) -> Tensor | None:
        """Return (1, T, E) for the embedding of the tokens start .. stop - 1 of a segment, or None.

        Raises:
            ValueError: the segment is longer than those of the training.
        """
        if not is_exported() and stop > self.segment:
            raise ValueError(
                f"--window-positions: a segment has {self.segment} positions, got {stop} tokens: "
                f"read them in segments of {self.segment} (--tokens-per-sample)"
            )
        return None if self.table is not None else self._waves(start, stop, device)[None]

    def entering(self, layer: int, x: Tensor, memory: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Return a layer's input x (T, B, E), from token `start` on, and memory (M, B, E)."""
        old, new = memory.size(0), x.size(0)
        if self.table is None:
            waves = self._waves(-old, 0, x.device)[:, None]
            return x, memory if layer else memory + waves.to(x)
        places = torch.arange(start - old, start + new, device=x.device) + self.mem_len
        added = self.table[layer][places.clamp(min=0)][:, None].to(x)  # (M + T, 1, E)
        return x + added[old:], memory + added[:old]

    def _waves(self, start: int, stop: int, device: torch.device) -> Tensor:
        places = torch.arange(start, stop, device=device, dtype=torch.float64)
        return sinusoid_of_distance(self.segment - 1 - places, self.width)


def window_of(cfg: Any, layers: int) -> WindowPositions | None:
    """Return the positions that a decoder's nested config asks for, or None."""
    if cfg.window_positions == KINDS[0]:
        return None
    sizes = (layers, cfg.mem_len, cfg.max_target_positions, cfg.decoder.embed_dim)
    return WindowPositions(cfg.window_positions, *sizes, cfg.init_std)
