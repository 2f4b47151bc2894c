"""Choosing a backend by fixed rules, and calling it.

`auto` looks at terms, device and shape only, never at a clock: a resumed run chooses the same.
On a GPU it takes triton where that does not refuse and has proved itself (`triton/proof.py`), and
SDPA where there are no terms (none, input schemes, rope).  On a CPU it takes native, and where
there are few tokens SDPA (no terms) or the reference, whose gathers cost less than the kernel's
passes.

Where no kernel serves (no compiler, probabilities asked for, a refusal), SDPA evaluates calls
without terms.  Others go to blocked, but on a CPU to the reference as long as one slice of blocked
holds all queries: up to 362 tokens for 16 heads of the whole batch, 128 for 128.  In training the
reference takes 0.5 to 0.9 of the time of blocked, which evaluates every slice twice (m4 0.64 at 256
tokens and 0.55 at 512, t5 0.93 and 0.75, shaw 0.49 and 0.64; at 1024 tokens both take the same, as
they do without gradients).  A trilinear term goes to blocked: the reference takes 18 times as long
at 512 tokens.

How many tokens are few says the table in `thresholds`.
"""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from relpos_fairseq.attention import blocked, native, reference, sdpa, thresholds, triton
from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.positions import is_captured, is_exported

BACKENDS = ("auto", "reference", "sdpa", "blocked", "native", "triton")
WITHOUT_PROBABILITIES = ("sdpa", "native", "triton")
_MODULES = {module.name: module for module in (reference, sdpa, blocked, native, triton)}
logger = logging.getLogger(__name__)


def attend(inputs: AttentionInputs, backend: str = "auto", need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
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
    if backend == "auto" and _is_native_step(inputs, need_weights):
        with _full_precision(inputs.q.device.type):
            return native.step.attend(inputs), None  # it alone reads factors by position
    inputs = inputs.placed()
    if backend == "auto":
        chosen = choose(inputs, need_weights)  # what refuses nothing of this
    else:
        chosen = backend
        problem = _MODULES[chosen].refusal(inputs)
        if chosen in WITHOUT_PROBABILITIES and need_weights:
            problem = "attention probabilities (need_weights)"
        if problem:
            raise ValueError(
                f"attention backend {chosen} cannot evaluate {problem}: use --attention-backend auto or blocked"
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


def refuse_terms(backend: str, name: str, inputs: AttentionInputs) -> None:
    """Refuse a backend for what it can serve on no machine, before a model is built with it.

    Args:
        backend: one of BACKENDS but `auto`.
        name: the position scheme's, for the message.
        inputs: a call of few tokens with the scheme's terms.

    Raises:
        ValueError: names backend and scheme.
    """
    module = _MODULES[backend]
    problem = getattr(module, "refusal_anywhere", module.refusal)(inputs)
    if problem:
        raise ValueError(
            f"--attention-backend {backend} cannot evaluate {problem} of position scheme {name}: leave it at auto"
        )


def _full_precision(device: str) -> AbstractContextManager:
    """Autocast would take logits to half precision, where a product of three overflows."""
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


def choose(inputs: AttentionInputs, need_weights: bool = False) -> str:
    """The backend that `auto` means for these inputs."""
    if is_exported():
        return "reference"
    if _is_native_step(inputs, need_weights):
        return "native"
    on_cpu = inputs.q.device.type == "cpu"
    with_terms = _has_terms(inputs)
    if on_cpu and inputs.positions.is_step and not need_weights and not with_terms:
        return "blocked" if thresholds.many_keys(inputs, "blocked") else "sdpa"
    short = on_cpu and _is_short(inputs)
    if with_terms:
        if on_gpu(inputs) and not need_weights and _is_triton(inputs):
            return "triton"
        short |= blocked.refusal(inputs) is not None
    elif not need_weights:
        # With dropout, SDPA on a CPU holds all probabilities.
        if short and not inputs.dropout or not on_cpu:
            return "sdpa"
    if short:
        return "reference"
    instead = "sdpa"
    if with_terms or need_weights or inputs.dropout:
        instead = "reference" if _is_one_slice(inputs) else "blocked"
    return "native" if not need_weights and _is_native(inputs, instead) else instead


def _has_terms(inputs: AttentionInputs) -> bool:
    return any(term.present for term in inputs.terms)


def _is_native_step(inputs: AttentionInputs, need_weights: bool) -> bool:
    """Whether the kernel is to evaluate a step of decoding."""
    if need_weights or not inputs.positions.is_step or inputs.q.device.type != "cpu" or is_exported():
        return False
    return (_has_terms(inputs) or thresholds.many_keys(inputs, "native")) and native.serves_step(inputs)


def _is_one_slice(inputs: AttentionInputs) -> bool:
    """Whether blocked would hold as much as the reference, and evaluate it twice."""
    if inputs.positions.is_step or on_gpu(inputs) or _is_trilinear(inputs):
        return False
    if is_captured():
        return True  # slices' own way back would break the graph
    return inputs.positions.tgt_len <= blocked.slice_rows(inputs)


def _is_triton(inputs: AttentionInputs) -> bool:
    """Whether the kernels serve the inputs, and have proved themselves on this GPU."""
    if triton.refusal(inputs) is not None:
        return False
    problem = triton.unproved(inputs)
    if problem is not None:
        _warn("triton", problem, "blocked")
    return problem is None


def _is_native(inputs: AttentionInputs, instead: str) -> bool:
    """Whether the kernel serves the inputs, and this machine has one."""
    if inputs.positions.is_step or native.refusal_anywhere(inputs) is not None:
        return False  # a step of decoding that `serves_step` refuses has nothing to tile
    problem = native.problem(inputs)
    if problem is not None:
        _warn("native", problem, instead)
    return problem is None


def _warn(backend: str, problem: str, instead: str) -> None:
    """Say once why attention is slower than it could be."""
    _said(backend, problem, instead)


_warn._dynamo_marked_constant = True  # see native/build.py


@functools.cache
def _said(backend: str, problem: str, instead: str) -> None:
    logger.warning("attention backend %s is used, since %s cannot evaluate %s", instead, backend, problem)


def on_gpu(inputs: AttentionInputs) -> bool:
    """Whether fused kernels run rather than are interpreted."""
    return inputs.q.device.type == "cuda"


def _is_short(inputs: AttentionInputs) -> bool:
    """Whether explicit products and gathers are the fastest way on a CPU."""
    positions, short = inputs.positions, thresholds.of(inputs)
    if positions.is_step or positions.tgt_len >= short or positions.src_len >= 2 * short:
        return False
    return not _is_trilinear(inputs)


def _is_trilinear(inputs: AttentionInputs) -> bool:
    """Whether the reference would weigh the channels of every pair."""
    return any(term.trilinear is not None for term in inputs.terms)
