"""Tell which calls the Triton kernels cannot evaluate, and why."""

from __future__ import annotations

import importlib.util
import os

import torch

from relpos_fairseq.attention import lowering
from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering import Resets, Window, needs_offset_table, rank_of, relations_of_vectors
from relpos_fairseq.attention.triton import selftest_cache
from relpos_fairseq.attention.triton.call_signature import signature_of
from relpos_fairseq.attention.triton.operands import STORED_DISTANCES, has_long_table, windows_of

WIDEST = 128  # head_dim, and rank of static factors
MOST_DISTANCES = 1024  # of a near table: products with each of its vectors are stored
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def interpreted() -> bool:
    """Return whether kernels run in Triton's interpreter: TRITON_INTERPRET when triton was imported."""
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on")


def refusal(inputs: AttentionInputs) -> str | None:
    """Return why these inputs cannot be evaluated, or None."""
    return " and ".join(reasons(inputs)) or None


def reasons(inputs: AttentionInputs) -> list[str]:
    """Return every reason why these inputs cannot be evaluated on this machine."""
    return [*_machine(inputs), *reasons_anywhere(inputs)]


def refusal_anywhere(inputs: AttentionInputs) -> str | None:
    """Return why these inputs cannot be evaluated on any machine, or None."""
    return " and ".join(reasons_anywhere(inputs)) or None


def reasons_anywhere(inputs: AttentionInputs) -> list[str]:
    """Return every reason why these inputs cannot be evaluated on any machine."""
    found = _shape(inputs)
    not_lowered = lowering.why_not_lowered(inputs)
    if not inputs.causal and any(term.decay is not None for term in inputs.terms):
        not_lowered = "decay on both sides of a query"  # the sums of one side are no factors
    return [*found, not_lowered] if not_lowered else [*found, *_tables(inputs)]


def unproved(inputs: AttentionInputs) -> str | None:
    """Return why `auto` does not take the kernels for a call that they do not refuse, or None."""
    said = selftest_cache.switch()
    if said:
        return None if said == "on" else "anything (RELPOS_TRITON=off)"
    reach = Window.visible(inputs)
    long_tables = tuple(has_long_table(term, reach) for term in inputs.terms)
    return selftest_cache.problem(signature_of(inputs, long_tables, torch.backends.cuda.matmul.allow_tf32))


def _machine(inputs: AttentionInputs) -> list[str]:
    """Return what is missing on this machine: Triton, a GPU, a type."""
    if importlib.util.find_spec("triton") is None:
        return ["anything without the package triton"]
    found, device = [], inputs.q.device.type
    if device != "cuda" and not interpreted():
        where = "its kernels run on CUDA, or with TRITON_INTERPRET=1 anywhere"
        found.append(f"tensors on {device} ({where})")
    types = TYPES if device == "cuda" else (*TYPES, torch.float64)
    if inputs.q.dtype not in types:
        found.append(f"inputs of {inputs.q.dtype}")
    if not inputs.q.dtype == inputs.k.dtype == inputs.v.dtype:
        found.append(f"q, k, v of types {inputs.q.dtype}, {inputs.k.dtype}, {inputs.v.dtype}")
    return found


def _shape(inputs: AttentionInputs) -> list[str]:
    """Return which sizes of q, k, v are not served."""
    content = inputs.content_q if inputs.rotated else inputs.q
    found, dim, value_dim = [], content.size(-1), inputs.v.size(-1)
    if dim != value_dim:
        found.append(f"values of another width ({value_dim}) than queries ({dim})")
    if dim > WIDEST:
        found.append(f"head_dim {dim} (the largest is {WIDEST})")
    if max(inputs.q.numel(), inputs.k.numel()) >= 1 << 31:
        found.append("queries or keys of 2^31 elements or more")
    return found


def _tables(inputs: AttentionInputs) -> list[str]:
    """Return which tables of vectors and factors are not served."""
    found = []
    reach, vectors, _ = windows_of(inputs)
    long = [t for t in inputs.terms if t.query_vectors is not None and has_long_table(t, reach)]
    if len(long) > 1 and any(term.query_offset is not None for term in long):
        # A kernel multiplies one matrix of queries with the sum of all long tables; an offset makes a second matrix.
        found.append(f"{len(long)} terms of query_vectors over more than {STORED_DISTANCES} distances with an offset")
    given = relations_of_vectors(inputs, lambda term: has_long_table(term, reach))
    if (given or needs_offset_table(inputs)) and vectors.width > MOST_DISTANCES:
        found.append(f"vectors of {vectors.width} distances (it keeps products with each, at most {MOST_DISTANCES})")
    rank = sum(rank_of(term, inputs.q.dtype) for term in inputs.terms)
    if Resets(inputs).mixes_tables:
        rank += 2  # what `Resets.kept` adds
    if rank > WIDEST:
        found.append(f"static_factors of rank {rank} (the largest is {WIDEST})")
    return found
