"""Find what beam search reads of the logits of a vocabulary, by the kernel in C with the arguments of candidates.h."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from relpos_fairseq.attention.native import build
from relpos_fairseq.attention.native.layer import LinearArg, Packed

WORK_OF_A_THREAD = 1 << 16  # logits that are worth a thread
_integer, _pointer = ctypes.c_int64, ctypes.c_void_p


class CandidatesCall(ctypes.Structure):
    """candidates.h's struct CandidatesCall, field by field."""

    _fields_ = [
        ("x", _pointer),
        ("linear", LinearArg),
        *((name, _integer) for name in ("is_formed", "rows", "row_stride", "vocabulary", "first", "best", "threads")),
        ("temperature", ctypes.c_double),
        ("log_probs", _pointer),
        ("units", _pointer),
    ]


def serves(logits: Tensor) -> bool:
    """Return whether the kernel can read logits (rows, V)."""
    known = logits.is_cpu and logits.dtype in build.DEFINED and not logits.requires_grad
    return known and logits.stride(-1) == 1 and build.problem(logits.dtype) is None


def candidates(
    x: Tensor, first: int, best: int, temperature: float = 1.0, projection: Packed | None = None
) -> tuple[Tensor, Tensor]:
    """Return log-probabilities (rows, first + best) of logits (rows, V), and the number of each in the vocabulary.

    Args:
        x: the logits (rows, V), or what `projection` forms them of (rows, E); `serves` is True for it.
        first: how many units from the vocabulary's first on each row has, likely or not.
        best: how many of the most likely others it has behind them, in descending order.
        temperature: by which logits are divided.
        projection: whose outputs are the logits, none of which is kept; None: `x` is the logits.

    Raises:
        ValueError: the vocabulary has fewer units, none of the others is asked for, or x is not the projection's.
        MemoryError: there is none for some rows' logits.
    """
    call, log_probs, units = form_candidates(x, first, best, temperature, projection)
    if build.entry(x.dtype, "relpos_candidates", CandidatesCall)(call):
        raise MemoryError(f"a search has no memory for the logits of {len(x)} hypotheses")
    return log_probs, units


def form_candidates(
    x: Tensor, first: int, best: int, temperature: float, projection: Packed | None
) -> tuple[CandidatesCall, Tensor, Tensor]:
    """Return the kernel's arguments for `candidates`, and the room for its two results; they raise the same."""
    rows, vocabulary = len(x), x.size(1) if projection is None else projection.outputs
    if first < 0 or best < 1 or first + best > vocabulary:
        raise ValueError(f"{first} first and {best} best candidates of a vocabulary of {vocabulary} units")
    if projection is not None:
        projection.check(x)
    log_probs = x.new_empty(rows, first + best)
    units = torch.empty(rows, first + best, dtype=torch.long)
    call = CandidatesCall(
        x=x.data_ptr(),
        rows=rows,
        row_stride=x.stride(0),
        vocabulary=vocabulary,
        first=first,
        best=best,
        threads=build.threads_for(rows * vocabulary, WORK_OF_A_THREAD),
        temperature=temperature,
        log_probs=log_probs.data_ptr(),
        units=units.data_ptr(),
    )
    if projection is not None:
        call.linear, call.is_formed = projection.arg, 1
    return call, log_probs, units
