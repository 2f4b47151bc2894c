"""PositionTerms: what a position scheme contributes to attention, and a backend evaluates.

For query q_i and key k_j of one head, with r the id of (i, j) in a term's relation:

    logits = scale * [ content * gate_r * (q.a_r)(k.b_r) | content, see below
                       + q.a_r + k.b_r + u.k + v.a_r + q.e_p ]
             + static_r + dense_bias_ij + f_i . g_j + decay_ij
    content = q'.k'   or, where a term is trilinear,   sum_c q'_c k'_c w_{r,c}
    p_ij    = sum of sigmoid(scale * content_il) over the keys l >= j that i sees
    logits += mix(scale * content, all that the lines above add to it), over all heads of a pair
    output  = sum_j probs_ij (value_j + value_vectors_r)

Terms of several schemes add; gates and products multiply the content.  A term holds vectors, not their
products with q and k: a backend forms q.a for each block of rows or step of decoding, or adds the
vectors of the constant ends of a table to k.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Relation


@dataclass(frozen=True)
class Reset:
    """TUPE's reset (M4M eq. 10): the logits that replace a term's in the first token's row and column.

    Args:
        row: (H|1,) logit from the first token to every key (theta_1).
        column: (H|1,) logit from every other token to the first (theta_2).
        first: (B|1,) slot of the first token of each row of the batch.
    """

    row: Tensor
    column: Tensor
    first: Tensor


@dataclass(frozen=True)
class DenseBias:
    """Logits that depend on the query's row as well as on the distance, so that no table holds them.

    They are computed from a few tensors for each block of rows, and never kept.

    Args:
        form: computes (B|1, H|1, T, S) from the tensors, for the rows and keys of positions.
        tensors: everything that the logits depend on beside the positions.
    """

    form: Callable[[tuple[Tensor, ...], Positions], Tensor]
    tensors: tuple[Tensor, ...]

    def of(self, positions: Positions) -> Tensor:
        """Return the logits of the rows and keys of `positions`: (B|1, H|1, T, S)."""
        return self.form(self.tensors, positions)


@dataclass(frozen=True)
class Decay:
    """Running sums of the logarithms of gates, each slot's own gate included, in logit units.

    The logit of query i and key j has weight_i (past_i - past_j) added for j <= i, and
    weight_i (future_j - future_i) for j > i.

    Args:
        past: (B, H|1, S), falling.
        future: (B, H|1, S), falling; None: keys after the query add nothing.
        weight: (B, H|1, S); None: 1.
    """

    past: Tensor
    future: Tensor | None = None
    weight: Tensor | None = None

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Decay:
        """Return the same sums with `change` applied to each tensor."""
        parts = (self.past, self.future, self.weight)
        return Decay(*(None if part is None else change(part) for part in parts))  # type: ignore[arg-type]

    @classmethod
    def of_gates(cls, gates: Tensor, weight: Tensor | None = None) -> Decay:
        """Sum logarithms of gates (B, H|1, S, sides) in at least single precision; weights are (B, H|1, S)."""
        exact = torch.promote_types(gates.dtype, torch.float32)
        past, *future = gates.to(exact).cumsum(dim=2).unbind(dim=-1)
        return cls(past, future[0] if future else None, weight)


class Mixing(NamedTuple):
    """A perceptron that reads content and position logits of all heads of a pair, and adds to each head's logit.

    Args:
        hidden_weight: (m, 2 H), of the heads' content and then of what the terms add to it.
        hidden_bias: (m,).
        output_weight: (H, m).
        output_bias: (H,).
    """

    hidden_weight: Tensor
    hidden_bias: Tensor
    output_weight: Tensor
    output_bias: Tensor

    def of(self, content: Tensor, added: Tensor | None) -> Tensor:
        """Return what is added to logits, from content (B, H, T, S) and what terms add to it: (B, H, T, S)."""
        hidden_weight, hidden_bias, output_weight, output_bias = (part.to(content.dtype) for part in self)
        both = content if added is None else torch.cat([content, added.expand_as(content)], dim=1)
        x = both.flatten(2)  # (B, H | 2 H, T S)

        def linear(weight: Tensor, bias: Tensor, x: Tensor) -> Tensor:
            return torch.baddbmm(bias[:, None], weight.expand(x.size(0), -1, -1), x)  # sooner than a convolution

        hidden = linear(hidden_weight[:, : x.size(1)], hidden_bias, x)
        return linear(output_weight, output_bias, F.leaky_relu(hidden, inplace=True)).view_as(content)


@dataclass(frozen=True)
class PositionTerms:
    """What one relation contributes to the logits and the output; absent terms are None.

    Args:
        relation: the ids by which the tables below are read (None where only factors are given).
        query_vectors: (H|1, R, D) a_r in q.a_r, scaled with the content.
        query_offset: (H|1, D) v in (q + v).a_r.
        key_vectors: (H|1, R, D) b_r in k.b_r, scaled with the content.
        content_offset: (H|1, D) u in u.k, scaled with the content.
        product: the two vector products multiply the content instead of being added.
        gate: (H|1, R) multiplies the content.
        trilinear: (H|1, R, D) w_r replaces q.k by sum_c q_c k_c w_rc.
        static: (H|1, R) in logit units.
        dense_bias: in logit units, computed for each row of queries.
        static_factors: ((B|1, H|1, T, r), (B|1, H|1, S, r)) whose product is in logit units.
        position_factors: two (H|1, n, r) tables, of queries and of keys, with a row for each position.
            `at` reads them for some positions and returns static_factors.
        contextual: (H|1, n, D) vectors e in q.e_p, scaled; p is the sum of gates in the formula above.
        decay: running sums of gates of the layer's input; a term with them has no other field.
        mixing: what is added after all terms, from the logits of all heads of a pair.
        value_vectors: (H|1, R, D) added to the values.
        reset: replaces everything that this term adds to the logits of the first token's row and column.
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
    dense_bias: DenseBias | None = None
    static_factors: tuple[Tensor, Tensor] | None = None
    position_factors: tuple[Tensor, Tensor] | None = None
    contextual: Tensor | None = None
    decay: Decay | None = None
    mixing: Mixing | None = None
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

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the fields that are not None, for error messages and the choice of a backend."""
        given = [name for name in _GIVEN if getattr(self, name) is not None]
        return tuple(name for name in given if name != "product" or self.product)

    def at(self, positions: Positions) -> PositionTerms:
        """Return the same term with its tables of factors read for the queries and keys of `positions`."""
        if self.position_factors is None:
            return self
        queries, keys = self.position_factors
        of_keys = positions.rows_of_keys(keys)
        rows = of_keys if queries is keys else positions.rows_of_keys(queries)
        return replace(self, position_factors=None, static_factors=(positions.query_rows(rows, axis=2), of_keys))

    def with_reset(self, reset: Reset | None) -> PositionTerms:
        """Return the same term with a reset."""
        return self if reset is None else replace(self, reset=reset)

    @property
    def uses_unrotated_qk(self) -> bool:
        """True if the term uses q or k before rotation."""
        vectors = (self.query_vectors, self.key_vectors, self.content_offset)
        return any(part is not None for part in vectors)

    @property
    def has_vectors(self) -> bool:
        """True if q, k or the probabilities are multiplied by a table of vectors."""
        tables = (self.query_vectors, self.key_vectors, self.value_vectors)
        return any(table is not None for table in tables)

    @property
    def adds_to_logits(self) -> bool:
        """True if the term adds something to the logits, and does not only multiply the content."""
        vectors = self.query_vectors is not None or self.key_vectors is not None
        factors = (self.static_factors, self.position_factors)
        added = (self.static, self.dense_bias, *factors, self.contextual, self.decay, self.mixing)
        return any(part is not None for part in added) or (vectors and not self.product)


_GIVEN = tuple(field.name for field in fields(PositionTerms) if field.name != "relation")
_TABLES = {"query_vectors": 3, "key_vectors": 3, "trilinear": 3, "value_vectors": 3, "gate": 2, "static": 2}
