"""What a call asks of its tiles: which terms become bands, and all tables as one list of tensors.

Normalised tables are made here, under autograd; the hand-written backward pass ends at them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.tiles.bands import Band
from relpos_fairseq.attention.tiles.split import Split, make_split, multiplies
from relpos_fairseq.relations import DistanceRelation
from relpos_fairseq.terms import PositionTerms, Reset

ROWS = 128  # of a tile
LEAST_ROWS = 96  # queries of a call
WIDEST = 160  # distances between the tails of terms that multiply the content
ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 25}  # of a tile's logits


@dataclass(frozen=True)
class Vectors:
    """One term's vectors; numbers are places in the plan's tables, or None.

    Args:
        band: their diagonals, or None: vectors of all distances (`wide`).
        query: q.a.
        offset: v in (q + v).a.
        key: k.b.
        value: vectors added to values.
        value_left: a band's left tail of them.
    """

    band: Band | None
    query: int | None = None
    offset: int | None = None
    key: int | None = None
    value: int | None = None
    value_left: int | None = None


@dataclass
class Plan:
    """A call, its tables beside it.

    Args:
        inputs: the call.
        rows: rows of a tile.
        tables: every tensor that terms hold, in the exact type.
        vectors: terms with vectors.
        folds: tables (H|1, D) added to the content's query.
        content_free: terms without vectors, each with the places of its fields.
        split: how terms that multiply the content are served, if there are any.
    """

    inputs: AttentionInputs
    rows: int
    tables: list[Tensor] = field(default_factory=list)
    vectors: list[Vectors] = field(default_factory=list)
    folds: list[int] = field(default_factory=list)
    content_free: list[tuple[PositionTerms, dict[str, int]]] = field(default_factory=list)
    split: Split | None = None

    def keep(self, table: Tensor) -> int:
        """Append a table; returns its place."""
        self.tables.append(table.to(self.inputs.exact))
        return len(self.tables) - 1

    @property
    def guard(self) -> int:
        """Cells that bands may reach beyond a buffer's matrices."""
        return max((v.band.width + abs(v.band.lowest) for v in self.vectors if v.band), default=1)


_FREE = ("static", "gate")


def refusal(inputs: AttentionInputs) -> str | None:
    """Why these inputs are not for tiles, or None."""
    if inputs.rotated:
        return "vectors beside rotated content"
    if inputs.positions.tgt_len < LEAST_ROWS:
        return "so few queries that their products are better kept than formed again"
    rows = tile_rows(inputs)
    gated = any(term.gate is not None or multiplies(term) for term in inputs.terms)
    for term in inputs.terms:
        if multiplies(term) and not isinstance(term.relation, DistanceRelation):
            return f"a product over {term.relation}"
        if multiplies(term) and _reach(term.relation, inputs) > WIDEST:
            return f"a product over {WIDEST} distances or more"
        if not _has_vectors(term):
            continue
        if term.reset is not None:
            return "a reset of vectors"
        if not isinstance(term.relation, DistanceRelation):
            return f"vectors over {term.relation}"
        folds = (
            term.key_vectors is not None
            and not term.product
            and not _is_wide(term.relation, inputs, rows)
        )
        if gated and (folds or term.content_offset is not None):
            return "a fold beside a gate"
    return None


def tile_rows(inputs: AttentionInputs) -> int:
    """How many rows a tile has: fixed by shape and device alone."""
    tgt_len, src_len = inputs.positions.tgt_len, inputs.positions.src_len
    budget = ELEMENTS.get(inputs.q.device.type, ELEMENTS["cuda"]) // src_len
    return min(tgt_len, ROWS if budget >= ROWS else max(budget // 16 * 16, 16))


def _has_vectors(term: PositionTerms) -> bool:
    if term.product:  # its vectors multiply
        return term.value_vectors is not None or term.content_offset is not None
    fields = (term.query_vectors, term.key_vectors, term.value_vectors, term.content_offset)
    return any(part is not None for part in fields)


def _is_wide(relation: DistanceRelation, inputs: AttentionInputs, rows: int) -> bool:
    """Whether a band would be no narrower than all distances of a tile."""
    causal = inputs.causal
    everything = inputs.positions.src_len * (1 if causal else 2) // 2 + rows
    return Band.of(relation, causal, rows).width >= everything


def _reach(relation: DistanceRelation, inputs: AttentionInputs) -> int:
    """How many of a relation's distances between its tails occur."""
    positions = inputs.positions
    highest = 0 if inputs.causal else positions.highest_distance
    low = max(relation.lowest, positions.lowest_distance)
    return min(relation.highest, highest) - low


def make_plan(inputs: AttentionInputs, rows: int) -> Plan:
    """The plan of a call that `refusal` does not refuse."""
    plan = Plan(inputs, rows)
    if any(multiplies(term) for term in inputs.terms):
        plan.split = make_split(inputs, plan.keep)
    for term in inputs.terms:
        if _has_vectors(term):
            _add_vectors(plan, term)
        if plan.split is not None and term.gate is not None:
            term = replace(term, gate=None)
        if term.gate is not None or term.static is not None or term.static_factors is not None:
            _add_content_free(plan, term)
    return plan


def _add_vectors(plan: Plan, term: PositionTerms) -> None:
    inputs, relation, exact = plan.inputs, term.relation, plan.inputs.exact
    if term.content_offset is not None:
        plan.folds.append(plan.keep(term.content_offset))
    given = {
        "query": None if term.product else term.query_vectors,
        "key": None if term.product else term.key_vectors,
        "value": term.value_vectors,
    }
    given = {name: table.to(exact) for name, table in given.items() if table is not None}
    if _is_wide(relation, inputs, plan.rows):
        band, positions = None, inputs.positions
        low, high = positions.lowest_distance, positions.highest_distance
        ids = relation.window(low, high, positions.device)
        places = {name: plan.keep(table.index_select(1, ids)) for name, table in given.items()}
    else:
        band = Band.of(relation, inputs.causal, plan.rows)
        places = {n: plan.keep(band.normalised(table, relation)) for n, table in given.items()}
        if "key" in given:
            plan.folds.append(plan.keep(band.left(given["key"], relation)[:, 0]))
        if "value" in given:
            places["value_left"] = plan.keep(band.left(given["value"], relation))
    if term.query_offset is not None:
        places["offset"] = plan.keep(term.query_offset)
    if places:
        plan.vectors.append(Vectors(band, **places))


def _add_content_free(plan: Plan, term: PositionTerms) -> None:
    places = {
        name: plan.keep(getattr(term, name)) for name in _FREE if getattr(term, name) is not None
    }
    if term.static_factors is not None:
        for name, factor in zip(("factor_q", "factor_k"), term.static_factors, strict=True):
            places[name] = plan.keep(factor)
    if term.reset is not None:
        places["row"], places["column"] = plan.keep(term.reset.row), plan.keep(term.reset.column)
    bare = PositionTerms(term.relation, reset=term.reset)
    plan.content_free.append((bare, places))


def rebuilt(entry: tuple[PositionTerms, dict[str, int]], tables: list[Tensor]) -> PositionTerms:
    """A content-free term with the given tensors in its fields."""
    bare, places = entry
    given = {name: tables[places[name]] for name in _FREE if name in places}
    if "factor_q" in places:
        given["static_factors"] = (tables[places["factor_q"]], tables[places["factor_k"]])
    if "row" in places:
        given["reset"] = Reset(tables[places["row"]], tables[places["column"]], bare.reset.first)
    return replace(bare, **given)


def batched(tensor: Tensor | None) -> bool:
    """Whether a (B|1, ...) tensor differs between rows of the batch."""
    return tensor is not None and tensor.size(0) > 1
