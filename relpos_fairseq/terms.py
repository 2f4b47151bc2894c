"""PositionTerms: what a scheme declares and a backend evaluates.

For query q_i and key k_j of one head, with r the id of (i, j) in a term's relation:

    logits = scale * [ content * gate_r * (q.a_r)(k.b_r) | content, see below
                       + q.a_r + k.b_r + u.k + v.a_r ]
             + static_r + f_i . g_j
    content = q'.k'   or, where a term is trilinear,   sum_c q'_c k'_c w_{r,c}
    output  = sum_j probs_ij (value_j + value_vectors_r)

Terms of several schemes add; gates and products multiply the content.  Terms carry vectors, not
products: a backend forms q.a per block, per decoding step, or folds a constant tail into q.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from torch import Tensor

from relpos_fairseq.relations import Relation


@dataclass(frozen=True)
class Reset:
    """TUPE's reset (003 eq. 10): a term's logits in the first token's row and column.

    Args:
        row: (H|1,) logit from the first token to every key (theta_1).
        column: (H|1,) logit from every other token to the first (theta_2).
        first: (B|1,) slot of the first token of each row of the batch.
    """

    row: Tensor
    column: Tensor
    first: Tensor


@dataclass(frozen=True)
class PositionTerms:
    """What one relation contributes to the logits and the output; absent terms are None.

    Args:
        relation: the ids that the tables below are read by (None where only factors are given).
        query_vectors: (H|1, R, D) a_r in q.a_r, scaled with the content.
        query_offset: (H|1, D) v in (q + v).a_r.
        key_vectors: (H|1, R, D) b_r in k.b_r, scaled with the content.
        content_offset: (H|1, D) u in u.k, scaled with the content.
        product: the two vector products multiply the content instead of being added.
        gate: (H|1, R) multiplies the content.
        trilinear: (H|1, R, D) w_r replaces q.k by sum_c q_c k_c w_rc.
        static: (H|1, R) in logit units.
        static_factors: ((B|1, H|1, T, r), (B|1, H|1, S, r)) whose product is in logit units.
        value_vectors: (H|1, R, D) added to the values.
        reset: replaces all that this term adds to the logits in a row and a column.
    """

    relation: Relation | None = None
    query_vectors: Tensor | None = None
    query_offset: Tensor | None = None
    key_vectors: Tensor | None = None
    content_offset: Tensor | None = None
    product: bool = False
    gate: Tensor | None = None
    trilinear: Tensor | None = None
    static: Tensor | None = None
    static_factors: tuple[Tensor, Tensor] | None = None
    value_vectors: Tensor | None = None
    reset: Reset | None = None

    def __post_init__(self) -> None:
        """Check that every table fits the relation."""
        for name, rank in _TABLES.items():
            table = getattr(self, name)
            if table is None:
                continue
            if self.relation is None:
                raise ValueError(f"{name} needs a relation to be read by")
            if table.dim() != rank or table.size(1) != self.relation.size:
                raise ValueError(
                    f"{name} must be (heads, {self.relation.size}{', head_dim' * (rank == 3)}) for "
                    f"{self.relation}, got {tuple(table.shape)}"
                )
        if self.product and (self.query_vectors is None or self.key_vectors is None):
            raise ValueError("a product term needs both query_vectors and key_vectors")
        if self.product and self.query_offset is not None:
            raise ValueError("a product term takes no query_offset")
        if self.query_offset is not None and self.query_vectors is None:
            raise ValueError("query_offset needs query_vectors")

    @cached_property
    def present(self) -> tuple[str, ...]:
        """Names of the fields that are given, for error messages and a backend's choice."""
        values = ((name, getattr(self, name)) for name in _GIVEN)
        return tuple(name for name, value in values if value is not None and value is not False)

    @property
    def meets_vectors(self) -> bool:
        """Whether q or k meets vectors, which they do as they are before any rotation."""
        vectors = (self.query_vectors, self.key_vectors, self.content_offset)
        return any(part is not None for part in vectors)

    @property
    def has_vectors(self) -> bool:
        """Whether q, k or the probabilities meet a table of vectors."""
        tables = (self.query_vectors, self.key_vectors, self.value_vectors)
        return any(table is not None for table in tables)

    @property
    def adds_to_logits(self) -> bool:
        """Whether anything is added to (rather than multiplied into) the logits."""
        vectors = self.query_vectors is not None or self.key_vectors is not None
        added = self.static is not None or self.static_factors is not None
        return added or (vectors and not self.product)


_GIVEN = tuple(field.name for field in fields(PositionTerms) if field.name != "relation")
_TABLES = {
    "query_vectors": 3,
    "key_vectors": 3,
    "trilinear": 3,
    "value_vectors": 3,
    "gate": 2,
    "static": 2,
}
