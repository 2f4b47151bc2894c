"""Every candidate against the papers' formula in fp64, before it is timed.

Twice: all of a small call of odd length, and, at the shape that is timed, some rows of the output
with all gradients that flow from them (the formula then needs those rows only, so that 16384 tokens
can be checked too).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from relpos_fairseq.attention import attend
from relpos_fairseq.benchmarks.candidates import Candidate, NoPositions
from relpos_fairseq.benchmarks.flex import Flex
from relpos_fairseq.benchmarks.scheme_candidate import SchemeCandidate
from relpos_fairseq.benchmarks.settings import AttentionSetting, draw, draw_heads
from relpos_fairseq.schemes import parse_hybrid

ODD_LENGTH = 130
MOST = 2.0  # errors, in units of what the formula in the same precision errs
FEW = 64  # numbers whose largest error is a draw of chance: they may err as much as other results
OTHERS_MOST = 100.0  # of FlexAttention, whose captured tensors are rounded to half precision
ELEMENTS = 1 << 26  # of the formula's largest tensor
ROWS = 16

RowRanges = Sequence[tuple[int, int]]


def check(candidate: Candidate, gradients: bool = True) -> float:
    """Hold a candidate against fp64: values, and gradients where it has them.

    Returns:
        Its largest error, in units of what the formula errs in the same precision (with rounding).

    Raises:
        ValueError: it errs more than MOST, FlexAttention more than OTHERS_MOST.
    """
    if isinstance(candidate, NoPositions):
        return 0.0
    setting = candidate.setting
    small = replace(setting, batch=2, heads=min(setting.heads, 3), length=ODD_LENGTH)
    worst = _error(candidate, some_rows(candidate.name, setting), gradients)
    if isinstance(candidate, Flex):  # whose every shape is compiled
        return worst
    whole = _error(SchemeCandidate(candidate.name, small), [(0, ODD_LENGTH)], gradients)
    return max(worst, whole)


def check_step(candidate: Candidate) -> float:
    """The same of a step of decoding: values alone."""
    if isinstance(candidate, NoPositions):
        return 0.0
    setting = replace(candidate.setting, causal=True)
    q, k, v = draw_heads(setting, queries=1)
    last = [(setting.length - 1, setting.length)]
    whole = q.expand(-1, -1, setting.length, -1)
    truth, eager = (
        _formula(candidate.name, setting, dtype, (whole, k, v), last, gradients=False)
        for dtype in (torch.float64, setting.dtype)
    )
    with torch.no_grad():
        found = [candidate.decoder(q, k, v)()]
    return _compared(candidate.label, truth, eager, found, setting)


def some_rows(name: str, setting: AttentionSetting) -> RowRanges:
    """The first rows, some in the middle, and the last."""
    trilinear = any(member.replaces_content for member in parse_hybrid(name))
    width = setting.head_dim if trilinear else 1
    pairs = setting.batch * setting.heads * setting.length * width
    count = max(1, min(ROWS, ELEMENTS // pairs))
    if 3 * count >= setting.length:
        return [(0, setting.length)]
    middle, last = setting.length // 2 + 3, setting.length
    middle = min(middle, last - 2 * count)
    return [(0, count), (middle, middle + count), (last - count, last)]


def _error(candidate: SchemeCandidate, rows: RowRanges, gradients: bool) -> float:
    setting = candidate.setting
    given = draw_heads(setting)
    gradients = gradients and candidate.refusal("train") is None
    truth, eager = (
        _formula(candidate.name, setting, dtype, given, rows, gradients) for dtype in (torch.float64, setting.dtype)
    )

    def outputs(leaves: list[Tensor]) -> list[Tensor]:
        out = candidate(*leaves)
        return [out[:, :, start:stop] for start, stop in rows]

    found = _results(candidate, given, outputs, gradients)
    most = OTHERS_MOST if isinstance(candidate, Flex) else MOST
    return _compared(candidate.label, truth, eager, found, setting, most)


def _formula(
    name: str,
    setting: AttentionSetting,
    dtype: torch.dtype,
    given: tuple[Tensor, ...],
    rows: RowRanges,
    gradients: bool,
) -> list[Tensor]:
    """Rows and gradients by the formula, in a precision."""
    scheme = SchemeCandidate(name, setting, "reference", dtype)

    def outputs(leaves: list[Tensor]) -> list[Tensor]:
        inputs = scheme.call(*leaves)
        return [attend(inputs.rows(*pair), "reference")[0] for pair in rows]

    return _results(scheme, [part.to(dtype) for part in given], outputs, gradients)


def _results(
    candidate: Candidate, given: Sequence[Tensor], outputs: Callable[[list[Tensor]], list[Tensor]], gradients: bool
) -> list[Tensor]:
    """Rows of the output, then gradients of the inputs and parameters where asked."""
    with torch.set_grad_enabled(gradients):
        leaves = [part.detach().requires_grad_(gradients) for part in given]
        found = outputs(leaves)
    if not gradients:
        return found
    setting = candidate.setting
    upstream = [draw(setting, *part.shape, seed=99).to(part.dtype) for part in found]
    wanted = [*leaves, *candidate.parameters()]
    back = torch.autograd.grad(found, wanted, upstream, allow_unused=True)
    filled = (torch.zeros_like(leaf) if part is None else part for part, leaf in zip(back, wanted, strict=True))
    return [part.detach() for part in (*found, *filled)]


def _compared(
    label: str,
    truth: list[Tensor],
    eager: list[Tensor],
    found: list[Tensor],
    setting: AttentionSetting,
    most: float = MOST,
) -> float:
    worst, place = 0.0, 0
    sizes = [float(exact.abs().max()) + 1e-30 for exact in truth]
    errors = [float((one.double() - e).abs().max()) for one, e in zip(eager, truth, strict=True)]
    epsilon = torch.finfo(setting.dtype).eps
    usual = max(error / size for error, size in zip(errors, sizes, strict=True))
    usual = min(usual, 64 * epsilon)  # what is zero but for rounding errs by many times its size
    for number, (exact, other) in enumerate(zip(truth, found, strict=True)):
        chance = usual * sizes[number] if exact.numel() < FEW else 0.0
        allowed = max(errors[number], chance) + 4 * epsilon * sizes[number]
        error = float((other.double() - exact).abs().max()) / allowed
        if not error <= worst:  # NaN is no number that is smaller
            worst, place = error, number
    if not worst <= most:
        raise ValueError(
            f"{label} at length {setting.length}: result {place + 1} of {len(found)} (rows of the "
            f"output, then gradients of q, k, v, parameters) errs {worst:.1f} times what the "
            f"formula errs in the same precision, held against fp64; it is not timed"
        )
    return worst
