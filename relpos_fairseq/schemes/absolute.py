"""Absolute positions at the input: none, sinusoidal, learned, sentence.

Vaswani et al. 2017, Attention Is All You Need (arXiv:1706.03762), section 3.5; Devlin et al. 2018
(Huang2020 eq. 6); positions counted from the start of each packed sentence: M4M App. B.

    x_i = t_i + w_i                      w -> `table` (learned, sentence) or the sinusoid
    sinusoid: [sin(i f_0..), cos(i f_0..)], f_m = 10000^(-m / (E/2 - 1))

The paper interleaves sine and cosine and takes f_m = 10000^(-2m/E); the form here is that of
tensor2tensor and fairseq (which are the same up to the order of channels), so that fairseq's own
sinusoidal transformer is reproduced to the bit.  Positions count from 0 at the first real token;
fairseq's offset of padding_idx + 1 = 2 in its tables is kept for the sinusoid alone.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from relpos_fairseq.core.positions import Positions, is_captured
from relpos_fairseq.core.scheme import ConversionSource, PositionScheme, SchemeInfo, Table, register_scheme

FAIRSEQ_OFFSET = 2  # fairseq counts the first token as padding_idx + 1, and padding_idx is 1


def sinusoid(position: Tensor, dim: int) -> Tensor:
    """Return the sinusoidal embedding of positions in fairseq's layout.

    Args:
        position: (...) positions, of any integer type.
        dim: width; an odd one ends in a zero.

    Returns:
        (..., dim) in fp32.
    """
    half = dim // 2
    step = math.log(10000) / max(half - 1, 1)
    frequency = torch.exp(torch.arange(half, device=position.device).float() * -step)
    angle = position.float()[..., None] * frequency
    wave = torch.cat([angle.sin(), angle.cos()], dim=-1)
    return torch.nn.functional.pad(wave, (0, dim - 2 * half))


@register_scheme("none")
class NoPosition(PositionScheme):
    """No position at all: the transformer sees a bag of tokens (a decoder sees prefixes)."""

    info = SchemeInfo(10, "M4M App. B", "q·k/√d", "-")
    uses_positions = False


@register_scheme("sinusoidal")
class Sinusoidal(PositionScheme):
    """Fixed sine and cosine waves added to the input."""

    info = SchemeInfo(20, "Vaswani 2017 §3.5", "input + sin/cos", "fixed")
    takes = frozenset()
    own_scale = None
    absolute = True
    never_neutral = "it has no parameter, and adds its waves to the input"

    def embed(self, positions: Positions) -> Tensor:
        """Return the waves at each query's position: (B|1, T, E) in fp32."""
        return sinusoid(positions.query_index() + FAIRSEQ_OFFSET, self.shape.embed_dim)


def _from_waves(source: ConversionSource) -> dict[str, Tensor]:
    """Convert from sinusoidal: w_i = the sinusoid at i, up to the table's length."""
    length = source.new.shape.max_positions
    source.report.limit(length, f"the table of {source.new.name}")
    index = torch.arange(length) + FAIRSEQ_OFFSET
    return {"table": sinusoid(index, source.new.shape.embed_dim)}


@register_scheme("learned")
class Learned(PositionScheme):
    """A learned vector for every position, added to the input."""

    info = SchemeInfo(30, "Devlin 2018; Huang2020 eq. 6", "input + wᵢ", "N(0, 0.02)", published="393K (M4M Table 5)")
    takes = frozenset()
    own_scale = None
    absolute = True
    table_limited = True
    tables = {"table": Table("max_positions embed_dim", std=0.02, rows="position", neutral=0.0)}
    convert_from = {"sinusoidal": _from_waves}
    elsewhere = {"fairseq": "encoder_learned_pos", "transformers": "absolute"}
    table: nn.Parameter  # (max_positions, E)

    def embed(self, positions: Positions) -> Tensor:
        """Return the row of each query's position: (B|1, T, E)."""
        self.check_length(positions)
        return self.table[positions.query_index()]


@register_scheme("sentence")
class Sentence(Learned):
    """Learned positions counted from each sentence's start in a packed block."""

    info = SchemeInfo(40, "M4M App. B", "learned, counted from each sentence's start", "N(0, 0.02)")
    counts_sentences = True
    convert_from = {}
    elsewhere = {}

    def embed(self, positions: Positions) -> Tensor:
        """Return the row of each query's position in its sentence: (B|1, T, E).

        Only a sentence, not the block, must fit the table.
        """
        index = positions.sentence_index
        index = positions.query_index() if index is None else positions.query_rows(index)
        longest = 0 if is_captured() else int(index.max()) + 1
        if longest > self.shape.max_positions:
            raise ValueError(
                f"position scheme {self.name} has a table of {self.shape.max_positions} positions "
                f"and a sentence has {longest}: train with a larger {self.shape.length_flag}, "
                f"split the sentence, or choose a relative scheme, which takes any length"
            )
        return self.table[index]
