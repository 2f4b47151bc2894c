"""Choose an attention backend by fixed rules, and call it."""

from __future__ import annotations

import functools
import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.attention import blocked, native, reference, sdpa, triton
from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.positions import is_captured, is_exported
from relpos_fairseq.relations import Segments

# ---- From how many tokens on the kernel in C is the faster way on a CPU: one table, with its grounds.
# Below, explicit products and gathers cost less than the kernel's passes: SDPA where there are no
# terms, else the reference.  Numbers are times relative to SDPA without positions (fp32, heads of 64
# channels, clip 16), first the way without the kernel, then the kernel, on a processor with AVX2 and
# on one with AVX-512.  One number serves both, so that a run resumes elsewhere alike; where they
# differ it lies where neither loses much.  Vectors were measured by m4, factors by tupe, scalars by
# t5, and nothing by none.


AVX2, AVX512 = "AVX2", "AVX-512"


@dataclass(frozen=True)
class Measured:
    """Two times relative to SDPA's.

    Args:
        processor: what it has.
        tokens: queries, and keys.
        without: time of the reference, or SDPA where there are no terms.
        kernel: time of the kernel.
    """

    processor: str
    tokens: int
    without: float
    kernel: float


@dataclass(frozen=True)
class Least:
    """From how many tokens on the kernel is taken, and why."""

    tokens: int
    grounds: tuple[Measured, ...]


def _least(tokens: int, *rows: tuple) -> Least:
    return Least(tokens, tuple(Measured(*row) for row in rows))


VECTORS = _least(  # in every pass, the same: all but a single query
    2,
    (AVX2, 2, 3.88, 2.39),
    (AVX2, 4, 3.26, 2.28),
    (AVX2, 32, 2.65, 2.02),
    (AVX512, 2, 3.52, 2.56),
    (AVX512, 4, 3.19, 2.51),
    (AVX512, 32, 2.4, 2.1),
)
# kind of the dearest term; whether half of the pairs are left out; whether anything learns
CROSSOVER_LENGTHS: dict[tuple[str, bool, bool], Least] = {
    **{("vectors", half, learns): VECTORS for half in (False, True) for learns in (False, True)},
    ("factors", False, True): _least(
        256, (AVX2, 192, 1.08, 1.34), (AVX2, 256, 1.28, 1.22), (AVX512, 128, 1.10, 1.26), (AVX512, 512, 2.58, 1.06)
    ),
    ("factors", True, True): _least(
        96, (AVX2, 64, 1.16, 1.18), (AVX2, 96, 1.22, 1.17), (AVX512, 64, 1.16, 1.21), (AVX512, 96, 1.29, 1.11)
    ),
    ("factors", False, False): _least(48, (AVX2, 16, 1.36, 1.43), (AVX2, 48, 1.37, 1.21), (AVX512, 128, 1.48, 1.35)),
    ("factors", True, False): _least(
        48, (AVX2, 16, 1.31, 1.32), (AVX2, 48, 1.45, 1.20), (AVX512, 32, 1.41, 1.43), (AVX512, 48, 1.32, 1.23)
    ),
    ("scalars", False, True): _least(
        128, (AVX2, 64, 1.01, 1.02), (AVX2, 128, 1.09, 0.99), (AVX512, 96, 1.0, 1.1), (AVX512, 128, 1.2, 1.1)
    ),
    ("scalars", True, True): _least(
        64, (AVX2, 32, 1.12, 1.15), (AVX2, 64, 1.12, 1.00), (AVX512, 48, 1.0, 1.3), (AVX512, 96, 1.3, 1.1)
    ),
    ("scalars", False, False): _least(
        64, (AVX2, 16, 1.16, 1.21), (AVX2, 64, 1.31, 1.09), (AVX512, 48, 1.1, 1.5), (AVX512, 128, 1.4, 1.0)
    ),
    ("scalars", True, False): _least(48, (AVX2, 48, 1.39, 0.99), (AVX512, 32, 1.5, 2.2), (AVX512, 96, 1.7, 1.2)),
    ("nothing", False, True): _least(
        128, (AVX2, 32, 1.0, 1.07), (AVX2, 128, 1.0, 0.95), (AVX512, 48, 1.0, 1.1), (AVX512, 128, 1.0, 1.0)
    ),
    ("nothing", True, True): _least(
        48, (AVX2, 32, 1.0, 1.10), (AVX2, 48, 1.0, 0.90), (AVX512, 32, 1.0, 1.07), (AVX512, 48, 1.0, 0.93)
    ),
    ("nothing", False, False): _least(
        64, (AVX2, 32, 1.0, 1.08), (AVX2, 64, 1.0, 0.99), (AVX512, 48, 1.0, 1.1), (AVX512, 128, 1.0, 0.9)
    ),
    ("nothing", True, False): _least(
        64, (AVX2, 32, 1.0, 1.08), (AVX2, 64, 1.0, 0.96), (AVX512, 48, 1.0, 1.04), (AVX512, 96, 1.0, 0.95)
    ),
}


KEYS_OF_A_STEP = {"native": 1536, "blocked": 8192}  # in all pairs of row and head


def beats_sdpa_on_step(inputs: AttentionInputs, backend: str) -> bool:
    """Tell whether a backend evaluates a step of decoding without terms faster than SDPA.

    The kernel takes 1.1 of SDPA's time for 1 row of 12 heads and 32 keys (384), 0.95 for 5 of 8 and
    24 (960), 0.98 for 1 of 12 and 128 (1,536), 0.9 for 4 of 12 and 32, 0.8 for 4 of 12 and 64 and for
    1 of 12 and 512 (6,144), 0.7 for 16 of 12 and 32 and for 1 of 12 and 2048: one thread, AVX-512 and
    AVX2 alike.  Two products, where there is no kernel, take 1.3 for 1 of 12 and 128 and for 1 of 12
    and 512, 0.9 for 16 of 12 and 32, 0.95 for 1 of 12 and 2048.
    """
    rows, heads, keys, _ = inputs.k.shape
    exact = inputs.q.dtype == inputs.exact  # the products would convert all keys
    return exact and rows * heads * keys >= KEYS_OF_A_STEP[backend] and not torch.is_grad_enabled()


def crossover_length(inputs: AttentionInputs) -> int:
    """Return the number of queries from which the kernel is taken, and half that of keys."""
    # Dropped pairs cost the other ways as much as left out ones save the kernel.  With dropout all
    # passes are alike: a layer that is formed again in the backward pass must drop the same.
    dropped = bool(inputs.dropout)
    learns = torch.is_grad_enabled() or dropped
    return CROSSOVER_LENGTHS[_costliest_kind(inputs), inputs.causal or dropped, learns].tokens


def _costliest_kind(inputs: AttentionInputs) -> str:
    """Return what costs most of the terms."""
    found = "nothing"
    for term in inputs.terms:
        if term.has_vectors:
            return "vectors"
        if term.static_factors is not None or term.decay is not None:
            found = "factors"
        elif isinstance(term.relation, Segments):
            found = "factors"
        elif found == "nothing" and term.present:
            found = "scalars"
    return found


# ---- Choosing a backend by fixed rules, and calling it.
# `auto` looks at terms, device and shape only, never at a clock: a resumed run chooses the same.
# On a GPU it takes triton where that does not refuse and has proved itself (`triton/proof.py`), and
# SDPA where there are no terms (none, input schemes, rope).  On a CPU it takes native, and where
# there are few tokens SDPA (no terms) or the reference, whose gathers cost less than the kernel's
# passes.
#
# Where no kernel serves (no compiler, probabilities asked for, a refusal), SDPA evaluates calls
# without terms.  Others go to blocked, but on a CPU to the reference as long as one slice of blocked
# holds all queries: up to 362 tokens for 16 heads of the whole batch, 128 for 128.  In training the
# reference takes 0.5 to 0.9 of the time of blocked, which evaluates every slice twice (m4 0.64 at 256
# tokens and 0.55 at 512, t5 0.93 and 0.75, shaw 0.49 and 0.64; at 1024 tokens both take the same, as
# they do without gradients).  A trilinear term goes to blocked: the reference takes 18 times as long
# at 512 tokens.
#
# How many tokens are few says the table in `thresholds`.


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
        return "blocked" if beats_sdpa_on_step(inputs, "blocked") else "sdpa"
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
    return (_has_terms(inputs) or beats_sdpa_on_step(inputs, "native")) and native.serves_step(inputs)


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
    positions, short = inputs.positions, crossover_length(inputs)
    if positions.is_step or positions.tgt_len >= short or positions.src_len >= 2 * short:
        return False
    return not _is_trilinear(inputs)


def _is_trilinear(inputs: AttentionInputs) -> bool:
    """Whether the reference would weigh the channels of every pair."""
    return any(term.trilinear is not None for term in inputs.terms)
