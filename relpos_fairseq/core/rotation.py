"""Rotate pairs of channels of queries and keys by angles that grow with the slot.

Pair c turns by theta_c = b^(-2c/d) from slot to slot, d the number of rotated channels.  Inputs longer
than the L tokens of training may have other angles, where s is --position-rope-factor (auto: n / L for
an input of n > L tokens, else 1: dynamic scaling):

    linear    theta_c / s                             Chen 2023 (2306.15595), position interpolation
    ntk       b' = b s^(d/(d-2))                      bloc97 2023, "NTK-aware"
    dynamic   b' = b (s n / L - (s - 1))^(d/(d-2))    emozilla 2023, as transformers has it; s: 1
    yarn      theta_c (r_c / s + 1 - r_c), q and k multiplied by 0.1 ln s + 1
                                                      Peng 2023 (2309.00071), eq. 21-23 and 26
    llama3    theta_c (r_c / s + 1 - r_c)             Llama 3.1 (2407.21783, its released code)
    longrope  theta_c / f_c, q and k multiplied by sqrt(1 + ln s / ln L)
                                                      Ding 2024 (2402.13753), as Phi-3 has it

r_c rises from 0 to 1 between the pair that turns 32 times (llama3: 4 times) over L tokens and the pair that turns
once: linearly with c, the numbers of both pairs rounded outwards as in YaRN's released code, or (llama3) with the
turns.  f_c are numbers that were searched for the model, others where an input is longer than L.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.core.options import Choice, Factor, Factors, Number, SchemeOptions
from relpos_fairseq.core.positions import is_captured

FAST, SLOW = {"yarn": 32.0, "llama3": 4.0}, 1.0  # turns over the trained length: YaRN's beta, Llama's frequency factors
SHORTEST = 2  # tokens of a training input
SCALING = Choice(
    name="rope_scaling",
    place=110,
    help="other angles for inputs longer than in training: none, linear, ntk, yarn, dynamic, llama3 or longrope",
    auto="none",
    choices=("none", "linear", "ntk", "yarn", "dynamic", "llama3", "longrope"),
    afterwards=True,
)
FACTOR = Factor(
    name="rope_factor",
    place=111,
    help="how many times longer than in training inputs are, for other angles",
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
SLOW_TURNS = Factor(
    name="rope_slow_turns",
    place=117,
    help="yarn, llama3: pairs that turn less often over the training's length are slowed in full",
    auto=None,
    auto_help="1",
    afterwards=True,
)
FAST_TURNS = Factor(
    name="rope_fast_turns",
    place=118,
    help="yarn, llama3: pairs that turn more often over the training's length are not slowed",
    auto=None,
    auto_help="32, llama3: 4",
    afterwards=True,
)
SHORT = Factors(
    name="rope_short_factor",
    place=121,
    help="longrope: how much slower each pair turns in inputs of up to the training's length, joined by commas",
    auto=None,
    auto_help="",
    afterwards=True,
)
LONG = Factors(
    name="rope_long_factor", place=122, help="the same in longer inputs", auto=None, auto_help="", afterwards=True
)
ATTENTION = Factor(
    name="rope_attention_factor",
    place=123,
    help="yarn, longrope: what queries and keys are multiplied by",
    auto=None,
    auto_help="by the factor",
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


SCALINGS = frozenset({SCALING, FACTOR, LENGTH, SLOW_TURNS, FAST_TURNS, SHORT, LONG, ATTENTION})
OF_SCALING = {  # what belongs to some scalings alone
    SLOW_TURNS: ("yarn", "llama3"),
    FAST_TURNS: ("yarn", "llama3"),
    SHORT: ("longrope",),
    LONG: ("longrope",),
    ATTENTION: ("yarn", "longrope"),
}


def check_scaling(options: SchemeOptions, pairs: int) -> None:
    """Raise a ValueError for options of another scaling, and for what longrope lacks.

    Args:
        options: options of the scheme.
        pairs: number of pairs of channels that are rotated.
    """
    scaling = options.rope_scaling
    for option, scalings in OF_SCALING.items():
        if getattr(options, option.name) is not None and scaling not in scalings:
            raise ValueError(f"{option.flag} belongs to {SCALING.flag} {' and '.join(scalings)}, not to {scaling}")
    slow, fast = options.rope_slow_turns or SLOW, options.rope_fast_turns or FAST.get(scaling, math.inf)
    if slow >= fast:
        raise ValueError(f"{SLOW_TURNS.flag} must be below {FAST_TURNS.flag}, got {slow:g} and {fast:g}")
    if scaling != "longrope":
        return
    for option in (SHORT, LONG):
        given = getattr(options, option.name) or ()
        if len(given) != pairs:
            raise ValueError(
                f"{option.flag} of longrope must have a number for each of {pairs} pairs, got {len(given)}"
            )
    if options.rope_factor is None and options.rope_attention_factor is None:
        raise ValueError(f"longrope needs {FACTOR.flag} (longest input / training's) or {ATTENTION.flag}")


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

    def of(self, dtype: torch.dtype, start: int, stop: int | None) -> Tensor:
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
    if tokens is not None and scales_by_length(options) and options.rope_scaling != "longrope":
        times = (tokens.double() / length).clamp(min=1)[:, None, None, None]
        factor = factor * times - (factor - 1)
    if options.rope_scaling in ("ntk", "dynamic"):
        longer = factor ** (dim / (dim - 2)) if pairs > 1 else factor  # theta_0 = 1 in any case
        return (base * longer) ** exponent, None
    if options.rope_scaling == "linear":
        return base**exponent / factor, None
    theta, size = base**exponent, 0.1 * factor.log() + 1
    if options.rope_scaling == "longrope":
        assert tokens is not None
        short, long = (torch.tensor(one).to(exponent) for one in (options.rope_short_factor, options.rope_long_factor))
        theta = theta / torch.where((tokens > length)[:, None, None, None], long, short)
        size = (1 + factor.log() / math.log(length)).sqrt()
    else:
        slowed = _slowed(options, pairs, length).to(device)
        theta = theta * (slowed / factor + 1 - slowed)
    if options.rope_scaling == "llama3":
        return theta, None
    own = options.rope_attention_factor
    return theta, size if own is None else torch.full_like(size, own)


def scales_by_length(options: SchemeOptions) -> bool:
    """Tell whether angles are rescaled only beyond the training length."""
    if options.rope_scaling == "none":
        return False
    return options.rope_factor is None or options.rope_scaling in ("dynamic", "longrope")


def _slowed(options: SchemeOptions, pairs: int, length: int) -> Tensor:
    """Return r_c: (P,), 0 for pairs that turn often over the trained length, 1 for slow ones."""
    fast, slow = options.rope_fast_turns or FAST[options.rope_scaling], options.rope_slow_turns or SLOW
    channel, base = torch.arange(pairs, dtype=torch.float64), options.rope_base
    if options.rope_scaling == "llama3":
        turns = length * base ** (-channel / pairs) / (2 * math.pi)
        return ((fast - turns) / (fast - slow)).clamp(0, 1)
    first, last = (pairs * math.log(length / (turns * 2 * math.pi)) / math.log(base) for turns in (fast, slow))
    first, last = max(math.floor(first), 0), min(math.ceil(last), 2 * pairs - 1)
    return ((channel - first) / (last - first or 0.001)).clamp(0, 1)
