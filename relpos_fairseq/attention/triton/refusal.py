"""What the Triton kernels cannot evaluate, beside the terms that no kernel has a form for."""

from __future__ import annotations

import importlib.util
import os

import torch

from relpos_fairseq.attention import lowering
from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering.factors import rank_of
from relpos_fairseq.attention.lowering.resets import Resets
from relpos_fairseq.attention.lowering.tables import needs_offset_table, relations_of_vectors
from relpos_fairseq.attention.triton.operands import NARROW, is_wide, windows_of
from relpos_fairseq.relations import DistanceRelation

WIDEST = 128  # head_dim, and rank of static factors
MOST_DISTANCES = 1024  # with vectors of their own: products with all of them are kept
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Return whether Triton's kernels are interpreted, as decided when triton was imported."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on")


def all_distances(inputs: AttentionInputs) -> bool:
    """Return whether every relation is one of distances."""
    relations = (term.relation for term in inputs.terms if term.relation is not None)
    return all(isinstance(relation, DistanceRelation) for relation in relations)


def refusal(inputs: AttentionInputs) -> str | None:
    """Return why these inputs cannot be evaluated, or None."""
    return _machine(inputs) or refusal_anywhere(inputs)


def refusal_anywhere(inputs: AttentionInputs) -> str | None:
    """Return why these inputs cannot be evaluated on any machine, or None."""
    return _shape(inputs) or lowering.refusal(inputs) or _tables(inputs)


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


def _tables(inputs: AttentionInputs) -> str | None:
    reach, vectors, _ = windows_of(inputs)
    wide = [t for t in inputs.terms if t.query_vectors is not None and is_wide(t, reach)]
    if len(wide) > 1 and any(term.query_offset is not None for term in wide):
        # Their queries differ, and a kernel multiplies one matrix of queries with their sum.
        return (
            f"{len(wide)} terms of query_vectors over more than {NARROW} distances with an offset"
        )
    given = relations_of_vectors(inputs, lambda term: is_wide(term, reach))
    if (given or needs_offset_table(inputs)) and vectors.width > MOST_DISTANCES:
        return (
            f"vectors of {vectors.width} distances (it keeps products with each, at most "
            f"{MOST_DISTANCES})"
        )
    rank = sum(map(rank_of, inputs.terms))
    if any(term.reset is not None for term in inputs.terms) and Resets(inputs).mixes_tables:
        rank += 2  # what `Resets.kept` adds
    return f"static_factors of rank {rank} (the largest is {WIDEST})" if rank > WIDEST else None
