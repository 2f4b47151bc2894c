"""What backends with kernels ask of terms: their kinds, their factors, what a reset replaces."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.windows import Window, over_window
from relpos_fairseq.relations import DistanceRelation, Segments
from relpos_fairseq.terms import PositionTerms

VECTORS = ("query_vectors", "key_vectors", "trilinear", "value_vectors")
SCALARS = ("static", "gate")
OF_VECTORS, OF_SCALARS, OF_FACTORS = 1, 2, 4  # kinds of what a term adds to the logits, as bits


def is_segments(term: PositionTerms) -> bool:
    """Scalars over pairs of segments, which are factors of rank `count`."""
    return isinstance(term.relation, Segments) and term.static is not None


def folds_offset(inputs: AttentionInputs) -> bool:
    """Whether u in u.k may be added to the content's query: nothing else comes between."""
    multiplied = any(
        term.gate is not None or term.product or term.trilinear is not None for term in inputs.terms
    )
    return not multiplied and not inputs.rotated


def reset_bits(term: PositionTerms) -> int:
    """Which of vectors, scalars, factors (1, 2, 4) a term adds."""
    vectors = not term.product and (term.query_vectors is not None or term.key_vectors is not None)
    factors = term.static_factors is not None or is_segments(term)
    scalars = term.static is not None and not is_segments(term)
    return OF_VECTORS * vectors + OF_SCALARS * scalars + OF_FACTORS * factors


def reset_kinds(
    inputs: AttentionInputs, bits: Callable[[PositionTerms], int] = reset_bits
) -> tuple[int, int]:
    """Bits of what terms with a reset add, and of what those without one do.

    Args:
        inputs: the call.
        bits: of one term.
    """
    held = free = 0
    for term in inputs.terms:
        if term.reset is None:
            free |= bits(term)
        else:
            held |= bits(term)
    return held, free


def several_firsts(inputs: AttentionInputs) -> str | None:
    """Resets that take several tokens of a row for its first: the kernels have no form for them."""
    firsts = [term.reset.first for term in inputs.terms if term.reset is not None]
    if any(first is not firsts[0] and (first != firsts[0]).any() for first in firsts[1:]):
        return "resets of several first tokens"
    return None


def side_by_side(one: Tensor, other: Tensor) -> Tensor:
    """Factors (B|1, H|1, L, r) of two terms as those of one: (B|1, H|1, L, r + r')."""
    common = torch.broadcast_shapes(one.shape[:2], other.shape[:2])
    return torch.cat([part.expand(*common, -1, -1) for part in (one, other)], dim=-1)


def add_factors(operands: dict[str, Tensor], f: Tensor, g: Tensor) -> None:
    """Put factors beside those that operands `f` and `g` have already."""
    if "f" in operands:
        f, g = side_by_side(operands["f"], f), side_by_side(operands["g"], g)
    operands["f"], operands["g"] = f, g


def factors_of(
    term: PositionTerms, inputs: AttentionInputs, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """A term's pairs of factors (B|1, H|1, T, r), (B|1, H|1, S, r), with those of segments."""
    pairs = [] if term.static_factors is None else [term.static_factors]
    if is_segments(term):
        pairs.append(segment_factors(term, inputs))
    return [(f.to(dtype), g.to(dtype)) for f, g in pairs]


def add_scalars(
    operands: dict[str, Tensor],
    term: PositionTerms,
    inputs: AttentionInputs,
    window: Window,
    static: str = "static",
) -> None:
    """Add a term's scalars over a window (H|1, width) to operand `static`; multiply `gate`."""
    if is_segments(term):
        return
    for name in SCALARS:
        table = getattr(term, name)
        if table is None:
            continue
        table = over_window(table.to(inputs.exact), term.relation, window, inputs.positions)
        operand = static if name == "static" else name
        known = operands.get(operand)
        if known is not None:
            table = known + table if name == "static" else known * table
        operands[operand] = table


def segment_factors(term: PositionTerms, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """A table of pairs of segments (H|1, n^2) as rows of queries' segments and unit vectors."""
    positions, count = inputs.positions, term.relation.count
    of_key = torch.nn.functional.one_hot(positions.segments, count).to(inputs.exact)
    of_query = positions.of_queries(of_key)  # (B, T, count)
    table = term.static.to(inputs.exact).view(1, -1, count, count)
    return of_query[:, None] @ table, of_key[:, None]


def unserved_terms(inputs: AttentionInputs) -> str | None:
    """What kernels over distances have no form for, or None."""
    products = trilinear = 0
    for term in inputs.terms:
        products += term.product
        trilinear += term.trilinear is not None
        if term.relation is None or isinstance(term.relation, DistanceRelation):
            continue
        odd = [field for field in term.present if field not in ("static", "reset")]
        if odd or not is_segments(term):
            return f"{' and '.join(odd)} over {term.relation}"
    for name, count in (("product", products), ("trilinear", trilinear)):
        if count > 1:
            return f"{count} {name} terms"
    return None
