"""What a call asks of its tiles, and which calls they serve."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.tiles.bands import Band
from relpos_fairseq.attention.tiles.split import Split, multiplies
from relpos_fairseq.relations import DistanceRelation, Segments
from relpos_fairseq.terms import PositionTerms

ROWS = 512  # of a tile at most: with 256 products took an eighth longer, at T = 512 on two cores
CAUSAL_ROWS = 128  # of a tile, or a quarter of the keys: more rows see more keys that are hidden
NARROW = 128  # the same, where work grows with the rows that share a diagonal
LEAST_ROWS = 96  # queries of a call
WIDEST = 160  # distances between the tails of terms that multiply the content
MATRIX = {"cpu": 1 << 20, "cuda": 1 << 22}  # elements of one head's logits in a tile at most


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


@dataclass(frozen=True)
class Sheet:
    """A matrix (heads, T, S) that is the same for every row of the batch; numbers are places.

    Args:
        heads: H, or 1 where all heads share it.
        vector: (heads, L) numbers of the distances that occur, or None: 0.
        factors: (heads, T, r) and (heads, S, r) whose product is added, or None.
    """

    heads: int
    vector: int | None
    factors: tuple[int, int] | None = None


@dataclass
class Plan:
    """A call, its tables beside it.

    Args:
        inputs: the call.
        rows: rows of a tile.
        tables: every tensor that terms hold, in the exact type.
        vectors: terms with vectors.
        folds: tables (H|1, D) added to the content's query.
        sheets: what is added to the logits of every row of the batch alike.
        factors: places of (B * H, T, r) and (B * H, S, r) whose product is added to the logits.
        gate: numbers that multiply the content.
        masked: whether a sheet holds what a causal mask and a window exclude.
        falling: in a tile queries stand in falling order of their slots.
        split: how terms that multiply the content by more than a gate are served.
    """

    inputs: AttentionInputs
    rows: int
    tables: list[Tensor] = field(default_factory=list)
    vectors: list[Vectors] = field(default_factory=list)
    folds: list[int] = field(default_factory=list)
    sheets: list[Sheet] = field(default_factory=list)
    factors: tuple[int, int] | None = None
    gate: Sheet | None = None
    masked: bool = False
    falling: bool = False
    split: Split | None = None

    def keep(self, table: Tensor) -> int:
        """Append a table; returns its place."""
        self.tables.append(table.to(self.inputs.exact))
        return len(self.tables) - 1

    @property
    def larger(self) -> int:
        """How many times a tile is doubled: narrow ones have many small steps to share."""
        if self.split is not None:
            return 2
        return int(any(part.band is None for part in self.vectors))

    @property
    def guard(self) -> int:
        """Cells that bands may reach beyond a buffer's matrices."""
        return max((v.band.width + abs(v.band.lowest) for v in self.vectors if v.band), default=1)


def refusal(inputs: AttentionInputs) -> str | None:
    """Why these inputs are not for tiles, or None."""
    if inputs.rotated:
        return "vectors beside rotated content"
    if inputs.positions.tgt_len < LEAST_ROWS:
        return "so few queries that their products are better kept than formed again"
    for term in inputs.terms:
        if multiplies(term) and isinstance(term.relation, DistanceRelation):
            if _reach(term.relation, inputs) > WIDEST:
                return f"a product over {WIDEST} distances or more"
        if term.relation is None or isinstance(term.relation, DistanceRelation):
            continue
        served = isinstance(term.relation, Segments) and term.reset is None
        if not served or has_vectors(term) or multiplies(term) or term.gate is not None:
            return f"{' and '.join(term.present)} over {term.relation}"
    return None


def tile_rows(inputs: AttentionInputs) -> int:
    """How many rows a tile has: fixed by shape, terms and device alone."""
    tgt_len, src_len = inputs.positions.tgt_len, inputs.positions.src_len
    rows = MATRIX.get(inputs.q.device.type, MATRIX["cuda"]) // src_len // 16 * 16
    narrow = any(multiplies(term) or is_wide(term, inputs) for term in inputs.terms)
    return min(tgt_len, max(min(rows, NARROW if narrow else ROWS), 16))


def is_wide(term: PositionTerms, inputs: AttentionInputs) -> bool:
    """Whether the band of a term's vectors would have as many diagonals as a row has keys."""
    if not has_vectors(term) or term.relation is None:
        return False
    return Band.of(term.relation, inputs.causal).width > inputs.positions.src_len


def has_vectors(term: PositionTerms) -> bool:
    """Whether a term has vectors that do not multiply the content."""
    if term.product:
        return term.value_vectors is not None or term.content_offset is not None
    fields = (term.query_vectors, term.key_vectors, term.value_vectors, term.content_offset)
    return any(part is not None for part in fields)


def _reach(relation: DistanceRelation, inputs: AttentionInputs) -> int:
    """How many of a relation's distances between its tails occur."""
    positions = inputs.positions
    highest = 0 if inputs.causal else positions.highest_distance
    low = max(relation.lowest, positions.lowest_distance)
    return min(relation.highest, highest) - low
