"""What the kernels cannot serve, said by name."""

from __future__ import annotations

import importlib.util
import os

import torch

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowered import (
    VECTORS,
    folds_offset,
    is_segments,
    reset_kinds,
    several_firsts,
    unserved_terms,
)
from relpos_fairseq.attention.triton.lowering import NARROW, is_wide, windows_of
from relpos_fairseq.attention.windows import Reach
from relpos_fairseq.relations import DistanceRelation

WIDEST = 128  # head_dim, and rank of static factors
MOST_DISTANCES = 1024  # with vectors of their own: products with all of them are kept
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Whether Triton's kernels are interpreted, as decided when triton was imported."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on")


def all_distances(inputs: AttentionInputs) -> bool:
    """Whether every relation is one of distances."""
    relations = (term.relation for term in inputs.terms if term.relation is not None)
    return all(isinstance(relation, DistanceRelation) for relation in relations)


def refusal(inputs: AttentionInputs) -> str | None:
    """Why these inputs cannot be evaluated, or None."""
    return _machine(inputs) or refusal_anywhere(inputs)


def refusal_anywhere(inputs: AttentionInputs) -> str | None:
    """Why these inputs cannot be evaluated on any machine, or None."""
    return _shape(inputs) or _terms(inputs)


def _machine(inputs: AttentionInputs) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "anything without the package triton"
    device = inputs.q.device.type
    if device != "cuda" and not interpreted():
        return f"tensors on {device} (its kernels run on CUDA, or with TRITON_INTERPRET=1 anywhere)"
    types = TYPES if device == "cuda" else (*TYPES, torch.float64)
    if inputs.q.dtype not in types:
        return f"inputs of {inputs.q.dtype}"
    if not inputs.q.dtype == inputs.k.dtype == inputs.v.dtype:
        return f"q, k, v of types {inputs.q.dtype}, {inputs.k.dtype}, {inputs.v.dtype}"
    return None


def _shape(inputs: AttentionInputs) -> str | None:
    dim, value_dim = inputs.q.size(-1), inputs.v.size(-1)
    if dim != value_dim:
        return f"values of another width ({value_dim}) than queries ({dim})"
    if dim > WIDEST:
        return f"head_dim {dim} (the largest is {WIDEST})"
    if max(inputs.q.numel(), inputs.k.numel()) >= 1 << 31:
        return "queries or keys of 2^31 elements or more"
    return None


def _terms(inputs: AttentionInputs) -> str | None:
    return (
        unserved_terms(inputs)
        or _wide(inputs)
        or _band(inputs)
        or _factors(inputs)
        or _reset(inputs)
    )


def _wide(inputs: AttentionInputs) -> str | None:
    reach = Reach.of(inputs)
    met = [t for t in inputs.terms if t.query_vectors is not None and is_wide(t, reach)]
    if len(met) > 1 and any(term.query_offset is not None for term in met):
        return f"{len(met)} terms of query_vectors over more than {NARROW} distances with an offset"
    return None


def _band(inputs: AttentionInputs) -> str | None:
    reach = Reach.of(inputs)
    given = [
        term
        for term in inputs.terms
        if any(getattr(term, name) is not None for name in VECTORS[2:])
        or (
            any(getattr(term, name) is not None for name in VECTORS[:2])
            and not is_wide(term, reach)
        )
    ]
    offset = any(term.content_offset is not None for term in inputs.terms)
    if not given and (not offset or folds_offset(inputs)):
        return None
    vectors = windows_of(inputs)[1]
    if vectors.width > MOST_DISTANCES:
        return (
            f"vectors of {vectors.width} distances (it keeps products with each, at most "
            f"{MOST_DISTANCES})"
        )
    return None


def _factors(inputs: AttentionInputs) -> str | None:
    rank = sum(t.static_factors[0].size(-1) for t in inputs.terms if t.static_factors is not None)
    rank += sum(term.relation.count for term in inputs.terms if is_segments(term))
    return f"static_factors of rank {rank} (the largest is {WIDEST})" if rank > WIDEST else None


def _reset(inputs: AttentionInputs) -> str | None:
    held, free = reset_kinds(inputs)
    if held & free:
        return "a reset beside the same kind of term without one"
    return several_firsts(inputs)
