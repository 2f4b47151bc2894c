"""Rotate pairs of channels of queries and keys by angles that grow with the slot.

Pair c turns by theta_c = b^(-2c/d) from slot to slot, d the number of rotated channels.  Inputs longer
than the L tokens of training may have other angles, where s is --position-rope-factor (auto: n / L for
an input of n > L tokens, else 1: dynamic scaling):

    linear    theta_c / s                             Chen 2023 (2306.15595), position interpolation
    ntk       b' = b s^(d/(d-2))                      bloc97 2023, "NTK-aware"
    dynamic   b' = b (s n / L - (s - 1))^(d/(d-2))    emozilla 2023, as transformers has it; s: 1
    yarn      theta_c (r_c / s + 1 - r_c), q and k multiplied by 0.1 ln s + 1
                                                      Peng 2023 (2309.00071), eq. 21-23 and 26

r_c rises from 0 to 1 between the pair that turns 32 times over L tokens and the pair that turns once; the
released code rounds the numbers of both outwards.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.options import Choice, Factor, Number, SchemeOptions
from relpos_fairseq.positions import is_captured

FAST, SLOW = 32, 1  # YaRN's beta: turns over the trained length
SHORTEST = 2  # tokens of a training input
SCALING = Choice(
    name="rope_scaling",
    place=110,
    help="other angles for inputs longer than in training: none, linear, ntk, yarn or dynamic",
    auto="none",
    choices=("none", "linear", "ntk", "yarn", "dynamic"),
    afterwards=True,
)
FACTOR = Factor(
    name="rope_factor",
    place=111,
    help=f"how many times longer than in training inputs are, for {SCALING.flag}",
    auto=None,
    auto_help="that of the input at hand (dynamic: 1)",
    afterwards=True,
)
LENGTH = Number(
    name="rope_length",
    place=112,
    help="tokens of an input in training, which other angles and temperatures count from",
    auto=None,
    auto_help="what the checkpoint remembers; in training the longest input",
    least=SHORTEST,
    afterwards=True,
)
LOG_N = Choice(
    name="rope_log_n",
    place=113,
    help="on: queries that see more keys than in training are multiplied by log n / log n_trained",
    auto="off",
    afterwards=True,
)
BASE = Factor(name="rope_base", place=114, help="base b of the angles b^(-2c/d)", auto=10000.0, later=True)
SHARE_OF_CHANNELS = Factor(
    name="rope_share", place=115, help="share of each head's channels that are rotated, the first", auto=1.0, later=True
)
PAIRS = Choice(
    name="rope_pairs",
    place=116,
    help="which channels are rotated together: interleaved (2c, 2c + 1), or halves (c, c + d/2), as GPT-NeoX and Llama",
    auto="interleaved",
    choices=("interleaved", "halves"),
    later=True,
)


def rotate(x: Tensor, turn: Tensor, halves: bool = False) -> Tensor:
    """Multiply pairs of channels by complex numbers; channels beyond the last pair stay.

    Args:
        x: (B, H, L, D).
        turn: (L, P) or (B, 1, L, P) complex numbers in at least single precision, 2P <= D; or their
            real and imaginary parts (..., P, 2), under torch.compile and torch.export, whose graphs
            have no complex numbers.
        halves: True: channels (c, c + P) are a pair (GPT-NeoX, Llama); False: (2c, 2c + 1).

    Returns:
        (B, H, L, D) in x's type.
    """
    even = 2 * turn.size(-1 if turn.is_complex() else -2)
    exact = turn.dtype.to_real() if turn.is_complex() else turn.dtype
    part = x[..., :even].to(torch.promote_types(x.dtype, exact))
    pairs = part.unflatten(-1, (2, -1)).transpose(-1, -2) if halves else part.unflatten(-1, (-1, 2))
    turned = _Turned.apply(pairs, turn) if turn.is_complex() else _by_parts(pairs, turn)
    turned = (turned.transpose(-1, -2) if halves else turned).flatten(-2).to(x.dtype)
    return turned if even == x.size(-1) else torch.cat([turned, x[..., even:]], dim=-1)


def _by_parts(pairs: Tensor, turn: Tensor) -> Tensor:
    """Multiply pairs (..., L, P, 2) as complex numbers, by real arithmetic."""
    (real, imaginary), (cos, sin) = pairs.unbind(-1), turn.unbind(-1)
    return torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)


class _Turned(torch.autograd.Function):
    """Multiply pairs (..., L, P, 2) by complex numbers.

    Its backward pass reads memory once, where autograd's own reads it four times.
    """

    @staticmethod
    def forward(ctx, pairs: Tensor, turn: Tensor) -> Tensor:
        ctx.save_for_backward(turn)
        *strides, inner = pairs.stride()  # torch views pairs as complex numbers only at even places
        if inner != 1 or any(step % 2 for step in (*strides, pairs.storage_offset())):
            pairs = pairs.clone(memory_format=torch.contiguous_format)
        return torch.view_as_real(torch.view_as_complex(pairs) * turn)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (turn,) = ctx.saved_tensors
        return _Turned.apply(grad, turn.conj()), None


class Turns:
    """The complex factor size (cos + i sin) of every slot and pair, computed in fp64 for any length.

    Args:
        angle: (S, P) or (B, 1, S, P) in fp64.
        size: absolute values, of a shape that broadcasts with the angles'; None: 1.
    """

    def __init__(self, angle: Tensor, size: Tensor | None = None) -> None:
        size = torch.ones_like(angle) if size is None else size.expand_as(angle)
        self._parts: Tensor | None = None
        self._by_type: dict[torch.dtype, Tensor] = {}
        if is_captured():
            self._parts = torch.stack([size * angle.cos(), size * angle.sin()], dim=-1)
        else:
            self._by_type[torch.complex128] = torch.polar(size, angle)

    def of(self, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """Return the factors of slots [start, stop) for tensors of a type, in at least single precision.

        All layers are given the same tensor.
        """
        if self._parts is not None:
            exact = torch.promote_types(dtype, torch.float32)
            return self._parts[..., start:stop, :, :].to(exact)
        kind = torch.complex128 if dtype == torch.float64 else torch.complex64
        if kind not in self._by_type:
            self._by_type[kind] = self._by_type[torch.complex128].to(kind)
        return self._by_type[kind][..., start:stop, :]


@dataclass(frozen=True)
class Rotary:
    """A rotation as other libraries have it: slot m turns pair c by m base^(-2c/channels) / slower.

    Args:
        base: base of the frequencies.
        channels: how many of the first channels are rotated.
        adjacent: True: pairs are (2c, 2c + 1); False: (c, channels / 2 + c).
        slower: factor of linear scaling.
    """

    base: float
    channels: int
    adjacent: bool
    slower: float


def frequencies(
    options: SchemeOptions, pairs: int, length: int, tokens: Tensor | None, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return theta (P,) or (B|1, 1, 1, P), and the factor of q and k, or None.

    Args:
        options: options of the scheme.
        pairs: number of pairs of channels that are rotated, P.
        length: length in training, L.
        tokens: (B|1,) number of tokens of each row, where the angles depend on it, else None.
        device: device of the results.
    """
    dim, base, given = 2 * pairs, options.rope_base, options.rope_factor
    exponent = -2 * torch.arange(pairs, device=device, dtype=torch.float64) / dim
    if options.rope_scaling == "none":
        return base**exponent, None
    factor = torch.tensor(given or 1.0, dtype=torch.float64, device=device)
    if tokens is not None and scales_by_length(options):
        times = (tokens.double() / length).clamp(min=1)[:, None, None, None]
        factor = factor * times - (factor - 1)
    if options.rope_scaling in ("ntk", "dynamic"):
        longer = factor ** (dim / (dim - 2)) if pairs > 1 else factor  # theta_0 = 1 in any case
        return (base * longer) ** exponent, None
    if options.rope_scaling == "linear":
        return base**exponent / factor, None
    slowed = _ramp(pairs, base, length).to(device)
    return base**exponent * (slowed / factor + 1 - slowed), 0.1 * factor.log() + 1


def scales_by_length(options: SchemeOptions) -> bool:
    """Tell whether angles are rescaled only beyond the training length."""
    if options.rope_scaling == "none":
        return False
    return options.rope_factor is None or options.rope_scaling == "dynamic"


def _ramp(pairs: int, base: float, length: int) -> Tensor:
    """Return r_c: (P,), 0 for pairs that turn often over the trained length, 1 for slow ones."""
    first, last = (pairs * math.log(length / (turns * 2 * math.pi)) / math.log(base) for turns in (FAST, SLOW))
    first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * pairs - 1)
    channel = torch.arange(pairs, dtype=torch.float64)
    return ((channel - first) / (last - first or 0.001)).clamp(0, 1)
