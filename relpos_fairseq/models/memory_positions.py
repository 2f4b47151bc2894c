"""Positions over the memory and the segment of Transformer-XL.

`memory_positions` builds relative schemes, which tell remembered tokens from new ones.  `WindowPositions`
are absolute positions over memory and segment: attn_type 2 and 3 of Transformer-XL's released code.

    first    h_i = x_i + p(L - 1 - i)      of the first layer's input; p the sinusoids of its R
    every    h_i = x_i + r_(M + i)         of every layer's input; r learned, one table for each layer

i counts from the start of a segment of L tokens (--tokens-per-sample); the M tokens of memory before it
have -M .. -1, and tokens before these read the table's first row.  Memory holds h: in the next segment it
receives its new positions on top of the earlier ones.  The released code counts from a segment's end,
so that a shorter segment moves its tokens; here they stay, which is the same for segments of L tokens,
and lets decoding write one token after the other.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.core.placement import Placement
from relpos_fairseq.core.plan import encode_text
from relpos_fairseq.core.positions import is_exported
from relpos_fairseq.core.relations import sinusoid_of_distance
from relpos_fairseq.models.decoder import decoder_positions


def memory_positions(cfg: Any) -> Placement:
    """Return the placement of a config, whose tables cover memory and segment.

    Raises:
        ValueError: a scheme that reads absolute positions, or random ones.
    """
    flags = "--tokens-per-sample and --mem-len"
    placement = decoder_positions(cfg, "language_model", sides=(), length_flag=flags, memory=cfg.mem_len)
    absolute = [m.scheme for m in placement.plan.members if m.scheme.absolute]
    on_input = all(scheme.own_scale is None for scheme in absolute)
    if absolute and not (cfg.absolute_memory and on_input):
        raise ValueError(
            f"position scheme {' and '.join(scheme.name for scheme in absolute)} cannot carry "
            f"memory: it numbers tokens from the start of each segment, so the tokens of a "
            f"remembered segment would have the same positions as those of the current one and "
            f"could not be told apart (temporal confusion, Dai 2019 section 3.3); choose a "
            f"relative scheme, or --arch relpos_transformer_lm (--absolute-memory shows what it "
            f"costs, with positions on the input alone)"
        )
    if placement.plan.random_range:
        raise ValueError(
            f"--position-random-range {placement.plan.random_range} cannot carry memory: a "
            f"segment draws its positions among L, and those of the remembered tokens, which "
            f"go on without end, would be drawn anew in every segment; leave it out, or "
            f"choose --arch relpos_transformer_lm"
        )
    return placement


KINDS = ("none", "first", "every")


class WindowPositions(nn.Module):
    """Positions that are added to the inputs of layers.

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
    """Return the `WindowPositions` of a decoder's nested config, or None."""
    if cfg.window_positions == KINDS[0]:
        return None
    sizes = (layers, cfg.mem_len, cfg.max_target_positions, cfg.decoder.embed_dim)
    return WindowPositions(cfg.window_positions, *sizes, cfg.init_std)
