"""Choose an attention backend by fixed rules, and call it.

`auto` looks at terms, device, shape and whether gradients are on, never at a clock: a resumed run
chooses the same.  On a GPU it takes triton where triton refuses nothing and has passed its self-test
(`triton/selftest.py`), and SDPA where there are no terms (none, input schemes, rope).  On a CPU it
takes native; for few tokens, SDPA (no terms) or the reference, whose gathers cost less than the
passes of the kernel (`CROSSOVER_LENGTHS`).

Where no kernel serves (no compiler, probabilities asked for, a refusal), SDPA evaluates calls
without terms, and blocked the others.  On a CPU the reference stands for blocked as long as one
slice of blocked holds all queries: in training it takes 0.5 to 0.9 of the time of blocked, which
evaluates every slice twice.  A trilinear term always goes to blocked: the reference takes 18 times
as long at 512 tokens.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.attention import blocked, native, reference, sdpa, triton
from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.step import supports_step
from relpos_fairseq.core.positions import is_captured, is_exported, is_transformed
from relpos_fairseq.core.relations import Segments

BACKENDS = ("auto", "reference", "sdpa", "blocked", "native", "triton")
WITHOUT_PROBABILITIES = ("sdpa", "native", "triton")
_MODULES = {module.name: module for module in (reference, sdpa, blocked, native, triton)}
logger = logging.getLogger(__name__)

# The number n of queries from which (or from 2n keys) the kernel in C is faster on a CPU, by the kind of the
# costliest term, whether gradients or dropout are on, and (of each pair) whether a causal mask or dropout is on.
# Below n, SDPA (no terms) or the reference is faster.  Measured with m4 (vectors), tupe (factors), t5 (scalars) and
# none, in fp32 with heads of 64 channels and clip distance 16, on processors with AVX2 and with AVX-512.  One number
# serves both, so that a run resumes elsewhere alike: where they differ, it lies where neither loses much.
CROSSOVER_LENGTHS = {
    "vectors": {True: (2, 2), False: (2, 2)},
    "factors": {True: (256, 96), False: (48, 48)},
    "scalars": {True: (128, 64), False: (64, 48)},
    "nothing": {True: (128, 48), False: (64, 64)},
}
# The number of keys, summed over batch rows and heads, from which a backend evaluates a step of decoding
# without terms faster than SDPA.
CROSSOVER_STEP_KEYS = {"native": 1536, "blocked": 8192}


def attend(inputs: AttentionInputs, backend: str = "auto", need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
    """Evaluate one attention call with a backend.

    Args:
        inputs: the call.
        backend: one of BACKENDS.
        need_weights: return probabilities too.

    Returns:
        (B, H, T, Dv) output, and (B, H, T, S) probabilities after dropout or None.

    Raises:
        ValueError: the backend is unknown, or cannot evaluate a term or return probabilities; names the
            backend and the term.
    """
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}: choose one of {BACKENDS}")
    if backend == "auto" and _is_native_step(inputs, need_weights):
        with _full_precision(inputs.q.device.type):
            return native.step.attend_token(inputs), None  # only this backend reads position_factors itself
    inputs = inputs.gathered().placed()
    if backend == "auto":
        chosen = choose(inputs, need_weights)  # a backend whose refusal() is None
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
    """Raise an error for a backend that cannot evaluate a scheme's terms on any machine, before a model is built.

    Args:
        backend: one of BACKENDS but `auto`.
        name: name of the position scheme, for the message.
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
    """Return a context in which autocast is off.

    Autocast would compute logits in half precision, where a product of three numbers overflows.
    """
    if torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


# ------------------------------------------------------------------------------------------------- Rules


@dataclass(frozen=True)
class _Call:
    """One attention call, as the rows of `RULES` ask about it."""

    inputs: AttentionInputs
    has_terms: bool
    need_weights: bool

    @property
    def on_cpu(self) -> bool:
        return self.inputs.q.device.type == "cpu"

    @property
    def is_plain(self) -> bool:
        """True if the call has no terms and wants no probabilities, as SDPA serves it."""
        return not (self.has_terms or self.need_weights)

    @property
    def is_plain_step(self) -> bool:
        return self.on_cpu and self.inputs.positions.is_step and self.is_plain

    @property
    def is_short(self) -> bool:
        return self.on_cpu and _is_short(self.inputs)


Rules = tuple[tuple[str, Callable[[_Call], bool]], ...]  # a backend, and which calls it gets if no earlier row does
WITHOUT_KERNELS: Rules = (
    ("sdpa", lambda call: call.is_plain and not call.inputs.dropout),  # SDPA on a CPU would hold all probabilities
    ("reference", lambda call: _is_one_slice(call.inputs)),
    ("blocked", lambda call: True),
)
RULES: Rules = (
    ("reference", lambda call: is_exported() or is_transformed()),
    ("native", lambda call: _is_native_step(call.inputs, call.need_weights)),
    ("blocked", lambda call: call.is_plain_step and beats_sdpa_on_step(call.inputs, "blocked")),
    ("sdpa", lambda call: call.is_plain_step),
    ("triton", lambda call: call.has_terms and not call.need_weights and _is_triton(call.inputs)),
    ("sdpa", lambda call: call.is_plain and not call.on_cpu),
    ("sdpa", lambda call: call.is_plain and call.is_short and not call.inputs.dropout),
    ("reference", lambda call: call.is_short or blocked.refusal(call.inputs) is not None),
    ("native", lambda call: not call.need_weights and _is_native(call.inputs, _first(WITHOUT_KERNELS, call))),
    *WITHOUT_KERNELS,
)


def choose(inputs: AttentionInputs, need_weights: bool = False) -> str:
    """Return the name of the backend that `auto` chooses for a call: that of the first row of `RULES` that fits."""
    return _first(RULES, _Call(inputs, _has_terms(inputs), need_weights))


def _first(rules: Rules, call: _Call) -> str:
    return next(backend for backend, fits in rules if fits(call))


def crossover_length(inputs: AttentionInputs) -> int:
    """Return the number n of queries from which (or from 2n keys) `auto` chooses the kernel in C on a CPU."""
    # Dropout costs the other backends about as much time as a causal mask saves the kernel.  With dropout,
    # the answer does not depend on whether gradients are on: a layer that is recomputed in the backward
    # pass must drop the same probabilities.
    dropped = bool(inputs.dropout)
    learns = torch.is_grad_enabled() or dropped
    return CROSSOVER_LENGTHS[_costliest_kind(inputs)][learns][inputs.causal or dropped]


def _costliest_kind(inputs: AttentionInputs) -> str:
    """Return which kind of term in a call costs the most time: vectors, factors, scalars, or nothing without terms."""
    found = "nothing"
    for term in inputs.terms:
        if term.has_vectors or (term.decay is not None and not inputs.causal):  # of few tokens the kernel serves both
            return "vectors"
        if term.static_factors is not None or term.decay is not None or isinstance(term.relation, Segments):
            found = "factors"
        elif found == "nothing" and term.present:
            found = "scalars"
    return found


def beats_sdpa_on_step(inputs: AttentionInputs, backend: str) -> bool:
    """Return whether a backend evaluates a step of decoding without terms faster than SDPA."""
    rows, heads, keys = inputs.q.size(0), *inputs.k.shape[1:3]
    exact = inputs.q.dtype == inputs.exact  # in half precision, the products would first convert all keys
    return exact and rows * heads * keys >= CROSSOVER_STEP_KEYS[backend] and not torch.is_grad_enabled()


def reads_key_rows(inputs: AttentionInputs, backend: str, with_layer: bool = False) -> bool:
    """Return whether a backend reads a step's keys where `key_rows` says, instead of gathering them.

    Args:
        inputs: of the step.
        backend: its name, or auto.
        with_layer: the kernel in C would evaluate the layer around it too, which SDPA cannot.
    """
    return backend == "auto" and _is_native_step(inputs, False, with_layer) and native.step.reads_key_rows(inputs)


def _has_terms(inputs: AttentionInputs) -> bool:
    return any(term.present for term in inputs.terms)


def _is_native_step(inputs: AttentionInputs, need_weights: bool, with_layer: bool = False) -> bool:
    """Return whether a call is a step of decoding that `auto` gives to the kernel in C."""
    if need_weights or not inputs.positions.is_step or inputs.q.device.type != "cpu":
        return False
    if is_exported() or is_transformed():
        return False
    is_faster = with_layer or _has_terms(inputs) or beats_sdpa_on_step(inputs, "native")
    return is_faster and native.serves_step(inputs)


def _is_one_slice(inputs: AttentionInputs) -> bool:
    """Return whether the reference replaces blocked: one slice would hold all queries, or the call is traced."""
    if supports_step(inputs.terms, inputs.positions) or on_gpu(inputs) or _is_trilinear(inputs):
        return False
    if is_captured():
        return True  # the backward pass of slices would break the graph
    return inputs.positions.tgt_len <= blocked.slice_rows(inputs)


def _is_triton(inputs: AttentionInputs) -> bool:
    """Return whether a call is on a GPU, and Triton's kernels can evaluate it and have passed their self-test there."""
    if not on_gpu(inputs) or triton.refusal(inputs) is not None:
        return False
    problem = triton.unproved(inputs)
    if problem is not None:
        _warn("triton", problem, "blocked")
    return problem is None


def _is_native(inputs: AttentionInputs, instead: str) -> bool:
    """Return whether the kernel in C can evaluate a call, other than a step of decoding, and is compiled here."""
    if inputs.positions.is_step or native.refusal_anywhere(inputs) is not None:
        return False  # `serves_step` decides about steps of decoding
    problem = native.problem(inputs)
    if problem is not None:
        _warn("native", problem, instead)
    return problem is None


def _warn(backend: str, problem: str, instead: str) -> None:
    """Log, once for each reason, that the backend `instead` is used because `backend` cannot evaluate `problem`."""
    _warn_once(backend, problem, instead)


_warn._dynamo_marked_constant = True  # type: ignore[attr-defined]  # what dynamo looks for: see native/build.py


@functools.cache
def _warn_once(backend: str, problem: str, instead: str) -> None:
    logger.warning("attention backend %s is used, since %s cannot evaluate %s", instead, backend, problem)


def on_gpu(inputs: AttentionInputs) -> bool:
    """Return whether the tensors are on a GPU, where Triton kernels are compiled rather than interpreted."""
    return inputs.q.device.type == "cuda"


def _is_short(inputs: AttentionInputs) -> bool:
    """Return whether a call is so short that SDPA or the reference is faster on a CPU than the kernel in C."""
    positions, short = inputs.positions, crossover_length(inputs)
    if positions.is_step or positions.tgt_len >= short or positions.src_len >= 2 * short:
        return False
    return not _is_trilinear(inputs)


def _is_trilinear(inputs: AttentionInputs) -> bool:
    """Return whether a call has a trilinear term, for which the reference needs (T, S, D) elements for each head."""
    return any(term.trilinear is not None for term in inputs.terms)
