"""Describe an attention call without its numbers: all that decides which kernels are compiled for it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.core.relations import Relation
from relpos_fairseq.core.terms import PositionTerms

TABLES = (
    "query_vectors",
    "query_offset",
    "key_vectors",
    "content_offset",
    "gate",
    "trilinear",
    "static",
    "value_vectors",
)


@dataclass(frozen=True)
class TermSignature:
    """A `PositionTerms` without its numbers.

    Args:
        relation: the term's relation.
        product: the term's `product`.
        tables: of each table name, heads, channels (0: none), and whether it learns.
        factors: whether queries' factors differ by batch row and by head, and keys' likewise; rank; whether they learn.
        reset: whether it differs by head, whether each batch row has a first token of its own, whether it learns.
        decay: whether it differs by head, and whether it learns.
    """

    relation: Relation | None
    product: bool
    tables: tuple[tuple[str, int, int, bool], ...]
    factors: tuple[tuple[bool, bool, bool, bool], int, bool] | None
    reset: tuple[bool, bool, bool] | None
    decay: tuple[bool, bool] | None


@dataclass(frozen=True)
class CallSignature:
    """A call without its numbers; two calls that differ only in device and length have equal signatures.

    Args:
        dtype: of q, k and v.
        dim: channels of q and k before any rotation, and of values.
        heads: 1, or 2 for any larger number.
        terms: signatures of the terms.
        scale: of q.k.
        masks: whether the call is causal, has key_padding, has documents; its window.
        dropout: of probabilities.
        rotated: channels of the queries of q.k where rotated ones are given apart, else 0.
        grads: whether q, k and v want gradients.
        long_tables: of each term, whether its vectors are a long table (see `operands`).
        tf32: whether products of fp32 are computed in TF32.
        device: where it runs; not compared.
        length: T, slot of the first query, and number of keys after the last query; not compared.
    """

    dtype: torch.dtype
    dim: tuple[int, int]
    heads: int
    terms: tuple[TermSignature, ...]
    scale: float
    masks: tuple[bool, bool, bool, int]
    dropout: float
    rotated: int
    grads: tuple[bool, bool, bool]
    long_tables: tuple[bool, ...]
    tf32: bool
    device: str = field(compare=False, repr=False)
    length: tuple[int, int, int] = field(compare=False, repr=False)


def signature_of(inputs: AttentionInputs, long_tables: tuple[bool, ...], tf32: bool) -> CallSignature:
    """Return the signature of a call; `CallSignature` explains the arguments."""
    positions, graph = inputs.positions, torch.is_grad_enabled()
    masks = (inputs.causal, inputs.key_padding is not None, inputs.documents is not None)
    return CallSignature(
        inputs.q.dtype,
        (inputs.q.size(-1), inputs.v.size(-1)),
        min(inputs.q.size(1), 2),
        tuple(_term_signature(term, graph) for term in inputs.terms),
        float(inputs.scale),
        (*masks, inputs.window or 0),
        inputs.dropout,
        inputs.content_q.size(-1) if inputs.rotated else 0,
        tuple(graph and x.requires_grad for x in (inputs.q, inputs.k, inputs.v)),
        long_tables,
        tf32,
        str(inputs.q.device),
        (positions.tgt_len, positions.query_start, positions.src_len - positions.query_stop),
    )


def _term_signature(term: PositionTerms, graph: bool) -> TermSignature:
    tables, factors, reset = [], None, None
    for name in TABLES:
        if (table := getattr(term, name)) is not None:
            channels = table.size(-1) if name not in ("gate", "static") else 0
            tables.append((name, min(table.size(0), 2), channels, graph and table.requires_grad))
    if term.static_factors is not None:
        query, key = term.static_factors
        many = tuple(x.size(axis) > 1 for x in (query, key) for axis in (0, 1))
        factors = (many, query.size(-1), graph and (query.requires_grad or key.requires_grad))
    if (given := term.reset) is not None:
        reset = (given.row.numel() > 1, given.first.numel() > 1, graph and given.row.requires_grad)
    decay = None
    if term.decay is not None:  # of a causal call, which reads the past's sums alone
        past, weight = term.decay.past, term.decay.weight
        learns = past.requires_grad or weight is not None and weight.requires_grad
        decay = (past.size(1) > 1, graph and learns)
    return TermSignature(term.relation, term.product, tuple(tables), factors, reset, decay)
