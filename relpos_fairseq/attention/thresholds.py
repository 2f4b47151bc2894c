"""From how many tokens on the kernel in C is the faster way on a CPU: one table, with its grounds.

Below, explicit products and gathers cost less than the kernel's passes: SDPA where there are no
terms, else the reference.  Numbers are times relative to SDPA without positions (fp32, heads of 64
channels, clip 16), first the way without the kernel, then the kernel, on a processor with AVX2 and
on one with AVX-512.  One number serves both, so that a run resumes elsewhere alike; where they
differ it lies where neither loses much.  Vectors were measured by m4, factors by tupe, scalars by
t5, and nothing by none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.relations import Segments

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
LEAST: dict[tuple[str, bool, bool], Least] = {
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


def many_keys(inputs: AttentionInputs, backend: str) -> bool:
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


def of(inputs: AttentionInputs) -> int:
    """Return the number of queries from which the kernel is taken, and half that of keys."""
    # Dropped pairs cost the other ways as much as left out ones save the kernel.  With dropout all
    # passes are alike: a layer that is formed again in the backward pass must drop the same.
    dropped = bool(inputs.dropout)
    learns = torch.is_grad_enabled() or dropped
    return LEAST[_kind(inputs), inputs.causal or dropped, learns].tokens


def _kind(inputs: AttentionInputs) -> str:
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
