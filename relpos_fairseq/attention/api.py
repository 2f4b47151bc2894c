"""Choosing a backend by fixed rules, and calling it.

`auto` looks at terms, device and shape only, never at a clock: a resumed run chooses the same.

- no terms to evaluate (none, input schemes, rope): SDPA, except where SDPA's dropout on a CPU would
  hold all probabilities;
- few tokens on a CPU, tables shorter than the distances that occur: reference, whose gathers then
  cost less than matrices over all distances (0.6-0.95 of blocked's time, 16 to 95 tokens; without
  vectors 0.7-0.95 at 128, and the same at 192);
- anything else: on a GPU triton, on a CPU native, where they do not refuse; otherwise blocked.
  A CPU without a C compiler is told so once, in a warning.
"""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from relpos_fairseq.attention import blocked, native, reference, sdpa, triton
from relpos_fairseq.attention.inputs import AttentionInputs

BACKENDS = ("auto", "reference", "sdpa", "blocked", "native", "triton")
WITHOUT_PROBABILITIES = ("sdpa", "native", "triton")
NATIVE_WITHOUT_TERMS = False  # whether native rather than SDPA evaluates calls without terms
SHORT = 96  # queries; tiles begin there
SHORT_SCALARS = 160  # where no term has vectors
_MODULES = {module.name: module for module in (reference, sdpa, blocked, native, triton)}
logger = logging.getLogger(__name__)


def attend(
    inputs: AttentionInputs, backend: str = "auto", need_weights: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Attend, with positions.

    Args:
        inputs: the call.
        backend: one of BACKENDS.
        need_weights: return probabilities too.

    Returns:
        (B, H, T, Dv) output, and (B, H, T, S) probabilities after dropout or None.

    Raises:
        ValueError: an unknown backend, or one that cannot evaluate a term or give probabilities;
            names both.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}: choose one of {BACKENDS}")
    chosen = choose(inputs, need_weights) if backend == "auto" else backend
    problem = _MODULES[chosen].refusal(inputs)
    if chosen in WITHOUT_PROBABILITIES and need_weights:
        problem = "attention probabilities (need_weights)"
    if problem:
        raise ValueError(
            f"attention backend {chosen} cannot evaluate {problem}: use --attention-backend auto "
            f"or blocked"
        )
    if chosen == "sdpa":
        return sdpa.attend(inputs)
    with _full_precision(inputs.q.device.type):
        if chosen == "reference":
            out, probs = reference.attend(inputs)
            return out, probs if need_weights else None
        if chosen in WITHOUT_PROBABILITIES:
            return _MODULES[chosen].attend(inputs), None
        return blocked.attend(inputs, need_weights)


def _full_precision(device: str) -> AbstractContextManager:
    """Autocast would take logits to half precision, where a product of three overflows."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def choose(inputs: AttentionInputs, need_weights: bool = False) -> str:
    """The backend that `auto` means for these inputs."""
    if any(term.present for term in inputs.terms):
        if on_gpu(inputs) and not need_weights and triton.refusal(inputs) is None:
            return "triton"
        if blocked.refusal(inputs) or _is_short(inputs):
            return "reference"
        return "native" if not need_weights and _is_native(inputs) else "blocked"
    needs_more = need_weights or inputs.dropout and inputs.q.device.type == "cpu"
    if (needs_more or NATIVE_WITHOUT_TERMS) and not need_weights and _is_native(inputs):
        return "native"
    return "blocked" if needs_more else "sdpa"


def _is_native(inputs: AttentionInputs) -> bool:
    """Whether the kernel serves the inputs, and this machine has one."""
    if inputs.positions.is_step or native.refusal_anywhere(inputs) is not None:
        return False  # a step of decoding has nothing to tile
    problem = native.problem(inputs)
    if problem is not None:
        _warn(problem)
    return problem is None


@functools.cache
def _warn(problem: str) -> None:
    """Say once why attention is slower than it could be."""
    logger.warning("attention backend blocked is used, since native cannot evaluate %s", problem)


def on_gpu(inputs: AttentionInputs) -> bool:
    """Whether fused kernels run rather than are interpreted."""
    return inputs.q.device.type == "cuda"


def _is_short(inputs: AttentionInputs) -> bool:
    """Whether explicit products and gathers are the fastest way."""
    positions = inputs.positions
    tgt_len, src_len = positions.tgt_len, positions.src_len
    short = SHORT if any(term.has_vectors for term in inputs.terms) else SHORT_SCALARS
    if inputs.q.device.type != "cpu" or tgt_len >= short or src_len >= 2 * short:
        return False
    if positions.is_step:
        return False
    # The reference weighs channels pair by pair, and meets every row of a table of vectors.
    return all(
        term.trilinear is None
        and (not term.has_vectors or term.relation.size < tgt_len + src_len - 1)
        for term in inputs.terms
    )
