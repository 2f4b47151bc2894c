"""From terms to a plan.

Normalised tables, scalars over distances and factors are made here, under autograd; the
hand-written backward pass ends at them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.tiles.bands import Band
from relpos_fairseq.attention.tiles.masks import excluding
from relpos_fairseq.attention.tiles.plan import Plan, Sheet, Vectors, has_vectors, is_wide
from relpos_fairseq.attention.tiles.reset import corrections
from relpos_fairseq.attention.tiles.split import make_split, multiplies
from relpos_fairseq.relations import Segments
from relpos_fairseq.terms import PositionTerms

Pair = tuple[Tensor, Tensor]


def make_plan(inputs: AttentionInputs, rows: int) -> Plan:
    """The plan of a call that `refusal` does not refuse."""
    plan, scalars, pairs = Plan(inputs, rows), [], []
    if any(multiplies(term) for term in inputs.terms):
        plan.split = make_split(inputs, plan.keep)
    gates = [term for term in inputs.terms if term.gate is not None]
    for term in inputs.terms:
        if has_vectors(term):
            pairs += _add_vectors(plan, term, folds=not gates and plan.split is None)
        if isinstance(term.relation, Segments):
            pairs += _of_segments(term, inputs)
        elif term.static is not None:
            scalars.append(_of_distances(term.static, term, inputs))
        if term.static_factors is not None:
            pairs.append(term.static_factors)
        if term.reset is not None and term.adds_to_logits:
            pairs += corrections(term, inputs)
    if gates and plan.split is None:
        gate = _of_distances(gates[0].gate, gates[0], inputs)
        for term in gates[1:]:
            gate = gate * _of_distances(term.gate, term, inputs)
        plan.gate = Sheet(gate.size(0), plan.keep(gate))
    # Over falling queries a vector over distances is a matrix as it is, over rising ones a copy.
    plan.falling = not plan.vectors and plan.split is None and bool(gates or scalars)
    _add_sheets(plan, scalars, pairs)
    return plan


def _of_distances(table: Tensor, term: PositionTerms, inputs: AttentionInputs) -> Tensor:
    """(H|1, R, ...) read by all distances that occur: (H|1, L, ...)."""
    positions = inputs.positions
    low, high = positions.lowest_distance, positions.highest_distance
    ids = term.relation.window(low, high, positions.device)
    return table.to(inputs.exact).index_select(1, ids)


def _of_segments(term: PositionTerms, inputs: AttentionInputs) -> list[Pair]:
    """Numbers of pairs of segments, as a product of factors."""
    if term.static is None:
        return []
    positions, count = inputs.positions, term.relation.count
    table = term.static.to(inputs.exact).unflatten(1, (count, count))  # (H|1, query's, key's)
    ours = F.one_hot(positions.of_queries(positions.segments), count).to(table.dtype)
    return [(ours[:, None], table[:, :, positions.segments].permute(2, 0, 3, 1))]


def _add_vectors(plan: Plan, term: PositionTerms, folds: bool) -> list[Pair]:
    """Plan a term's vectors; returns what `folds` forbids to add to the content's query."""
    inputs, relation, exact = plan.inputs, term.relation, plan.inputs.exact
    folded = [] if term.content_offset is None else [term.content_offset.to(exact)]
    given = {
        "query": None if term.product else term.query_vectors,
        "key": None if term.product else term.key_vectors,
        "value": term.value_vectors,
    }
    given = {name: table.to(exact) for name, table in given.items() if table is not None}
    if given and is_wide(term, inputs):
        band = None
        places = {n: plan.keep(_of_distances(table, term, inputs)) for n, table in given.items()}
    elif given:
        band = Band.of(relation, inputs.causal)
        places = {n: plan.keep(band.normalised(table, relation)) for n, table in given.items()}
        if "key" in given:
            folded.append(band.left(given["key"], relation)[:, 0])
        if "value" in given:
            places["value_left"] = plan.keep(band.left(given["value"], relation))
    if given:
        if term.query_offset is not None and "query" in given:
            places["offset"] = plan.keep(term.query_offset)
        plan.vectors.append(Vectors(band, **places))
    if folds:
        plan.folds += [plan.keep(part) for part in folded]
        return []
    ones = inputs.q.new_ones((1, 1, inputs.positions.tgt_len, 1), dtype=exact)
    return [(ones, inputs.k.to(exact) @ part[..., None] * inputs.scale) for part in folded]


def _add_sheets(plan: Plan, scalars: list[Tensor], pairs: list[Pair]) -> None:
    """Gather what is added to the logits by what shares it: all, rows of the batch, nothing."""
    inputs, alone = plan.inputs, []
    found: dict[int, tuple[list[Tensor], list[Pair]]] = {}
    for vector in scalars:
        found.setdefault(vector.size(0), ([], []))[0].append(vector)
    for pair in pairs:
        heads = max(part.size(1) for part in pair)
        if any(part.size(0) > 1 for part in pair) or heads > 1 and inputs.q.size(0) == 1:
            alone.append(pair)
        else:
            found.setdefault(heads, ([], []))[1].append(pair)
    hidden = excluding(inputs)
    if hidden is not None and not found and (inputs.window is not None or plan.falling):
        found[1] = ([], [])
    plan.masked = bool(found) and hidden is not None
    if plan.masked:
        next(iter(found.values()))[0].append(hidden)
    for heads, (vectors, some) in found.items():
        vector = plan.keep(sum(vectors).expand(heads, -1)) if vectors else None
        factors = _joined(plan, some, (1, heads)) if some else None
        plan.sheets.append(Sheet(heads, vector, factors))
    if alone:
        plan.factors = _joined(plan, alone, tuple(inputs.q.shape[:2]))


def _joined(plan: Plan, pairs: list[Pair], shape: tuple[int, int]) -> tuple[int, int]:
    """Places of pairs of factors (B|1, H|1, n, r), side by side as (B * H, n, r)."""
    exact = plan.inputs.exact
    query, key = (
        torch.cat([part.to(exact).expand(*shape, -1, -1) for part in side], -1)
        for side in zip(*pairs, strict=True)
    )
    return plan.keep(query.flatten(0, 1)), plan.keep(key.flatten(0, 1))
