"""Terms over relations as the kernel's operands (call.h), formed under autograd.

Tables of vectors lie over one window of distances: a narrow one, whose ends stand for all beyond,
or all distances.  Terms of one kind add up there, so that each query and key meets one table of a
kind whatever the schemes.  Scalars lie over all distances.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowered import (
    OF_FACTORS,
    OF_SCALARS,
    VECTORS,
    add_factors,
    add_scalars,
    factors_of,
    folds_offset,
    reset_bits,
    reset_kinds,
    several_firsts,
    unserved_terms,
)
from relpos_fairseq.attention.windows import Reach, Window, over_window
from relpos_fairseq.relations import Clipped
from relpos_fairseq.terms import PositionTerms

NARROW = 192  # distances up to which a window is kept narrow
NOTHING = 8  # bit of a reset that adds its logits and replaces none of the kinds
_TABLES = {"query_vectors": "aq", "key_vectors": "ak", "value_vectors": "av", "trilinear": "tri"}


@dataclass
class Lowered:
    """A call's operands by the names of call.h, and what says how they are read.

    Args:
        vectors: window of tables of vectors, or None without any.
        wide: whether it has a row for each distance.
        everywhere: all distances.
        operands: q, k, v, cq, ck (B, H, T|S, D); f, g (B|1, H|1, T|S, r); u (H|1, D); aq, ak, pq,
            pk, av, tri (H|1, W, D); fixed, gate (H|1, span); theta (H|1, 2).
        reset: bits of the kinds that the reset replaces; 0 without one.
        first: (B|1,) slot of the reset's first token, or None.
    """

    vectors: Window | None
    wide: bool
    everywhere: Window
    operands: dict[str, Tensor] = field(default_factory=dict)
    reset: int = 0
    first: Tensor | None = None

    def add(self, name: str, tensor: Tensor) -> None:
        """Add to an operand that may not be there yet."""
        known = self.operands.get(name)
        self.operands[name] = tensor if known is None else known + tensor


def refusal(inputs: AttentionInputs) -> str | None:
    """What the kernel has no form for, or None."""
    unserved = unserved_terms(inputs)
    if unserved or all(term.reset is None for term in inputs.terms):
        return unserved
    held, free = reset_kinds(inputs, kinds_of)
    if several := several_firsts(inputs):
        return several
    if held & free & ~OF_FACTORS:
        return "a reset beside the same kind of term without one"
    offset = any(term.content_offset is not None for term in inputs.terms)
    if held & 1 and offset and not folds_offset(inputs):
        return "a reset of vectors beside a content_offset that does not meet the content's keys"
    return None


def lower(inputs: AttentionInputs) -> Lowered:
    """Lower a call that `refusal` does not refuse."""
    positions, exact = inputs.positions, inputs.exact
    everywhere = Window(positions.lowest_distance, positions.highest_distance)
    vectors = _window(inputs, everywhere)
    low = Lowered(vectors, vectors == everywhere, everywhere)
    for term in inputs.terms:
        _add_vectors(low, term, inputs)
        add_scalars(low.operands, term, inputs, low.everywhere, "fixed")
        _add_factors(low, term, inputs)
    if any(term.reset is not None for term in inputs.terms):
        _add_reset(low, inputs)
    operands = low.operands
    q, k, content_q, content_k = inputs.exact_pairs()
    operands["v"] = inputs.v.to(exact)
    if inputs.rotated and not operands.keys().isdisjoint(("aq", "ak", "pq")):
        operands["cq"], operands["ck"] = content_q, content_k
    else:
        q, k = content_q, content_k
    operands["q"], operands["k"] = q, k
    return low


def kinds_of(term: PositionTerms) -> int:
    """Bits of what a term adds as the kernel sees it, where v.a_r is a scalar."""
    return reset_bits(term) | OF_SCALARS * (term.query_offset is not None)


def _window(inputs: AttentionInputs, everywhere: Window) -> Window | None:
    """Where tables of vectors lie: the distances beyond which none of them changes, or all."""
    relations, offset = [], False
    for term in inputs.terms:
        offset |= term.content_offset is not None
        if any(getattr(term, name) is not None for name in VECTORS):
            relations.append(term.relation)
    if relations:
        narrow = Window.over(relations, Reach(everywhere.low, everywhere.high))
    elif offset and not folds_offset(inputs):
        narrow = Window(0, 1)  # the same vector at any distance
    else:
        return None
    return narrow if narrow.width <= min(NARROW, everywhere.width) else everywhere


def _add_vectors(low: Lowered, term: PositionTerms, inputs: AttentionInputs) -> None:
    exact = inputs.exact
    for name, operand in _TABLES.items():
        table = getattr(term, name)
        if table is None:
            continue
        table = over_window(table.to(exact), term.relation, low.vectors, inputs.positions)
        if term.product and operand in ("aq", "ak"):
            low.operands["p" + operand[1]] = table
            continue
        table = table.contiguous()  # once: products and the kernel keep it for the backward pass
        low.add(operand, table)
        if operand == "aq" and term.query_offset is not None:
            offset = term.query_offset.to(exact)[..., None] * inputs.scale  # (H|1, D, 1)
            low.add("fixed", _everywhere((table @ offset)[..., 0], low, inputs))
    if term.content_offset is not None:
        offset = term.content_offset.to(exact)
        if folds_offset(inputs):
            low.add("u", offset)
        else:
            low.add("ak", offset[:, None].expand(-1, low.vectors.width, -1))


def _everywhere(scalars: Tensor, low: Lowered, inputs: AttentionInputs) -> Tensor:
    """A number for each distance of the vectors' window (H|1, W) as one for each of all."""
    if low.wide:
        return scalars
    band = Clipped(-low.vectors.low, low.vectors.high)
    return over_window(scalars, band, low.everywhere, inputs.positions)


def _add_factors(low: Lowered, term: PositionTerms, inputs: AttentionInputs) -> None:
    for f, g in factors_of(term, inputs, inputs.exact):
        if term.reset is not None and _mixes_factors(inputs):
            f, g = _without_first(f, g, term, inputs)
        add_factors(low.operands, f, g)


def _mixes_factors(inputs: AttentionInputs) -> bool:
    """Whether some factors are reset and others are not: they are one product to the kernel."""
    held, free = reset_kinds(inputs, kinds_of)
    return bool(held & free & OF_FACTORS)


def _without_first(
    f: Tensor, g: Tensor, term: PositionTerms, inputs: AttentionInputs
) -> tuple[Tensor, Tensor]:
    """Factors whose product is 0 in the first token's row and column, as the reset leaves it."""
    positions = inputs.positions
    slots = torch.arange(positions.src_len, device=positions.device)
    other = (slots != term.reset.first[:, None]).to(f.dtype)  # (B|1, S)
    return f * positions.of_queries(other)[:, None, :, None], g * other[:, None, :, None]


def _add_reset(low: Lowered, inputs: AttentionInputs) -> None:
    for term in inputs.terms:
        if term.reset is None or not kinds_of(term):
            continue
        theta = torch.stack(torch.broadcast_tensors(term.reset.row, term.reset.column), dim=-1)
        low.add("theta", theta.to(inputs.exact))
        low.first = term.reset.first
        low.reset |= kinds_of(term)
    if _mixes_factors(inputs):
        low.reset = low.reset & ~OF_FACTORS or NOTHING
