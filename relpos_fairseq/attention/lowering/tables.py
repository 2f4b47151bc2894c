"""Terms summed by kind, over windows of distances."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering.factors import factors_of, is_segments, side_by_side
from relpos_fairseq.attention.lowering.resets import Resets, folds_offset
from relpos_fairseq.attention.lowering.windows import Window, over_window
from relpos_fairseq.relations import Clipped, DistanceRelation
from relpos_fairseq.terms import PositionTerms

VECTORS = ("query_vectors", "key_vectors", "trilinear", "value_vectors")
SCALARS = ("static", "gate")
SAME_EVERYWHERE = Window(0, 1)  # of a vector that is read at any distance


@dataclass
class Lowered:
    """The terms of one call, summed by kind.

    Args:
        vectors: window of tables of vectors.
        scalars: window of `static` and `gate`.
        tensors: by the names of `PositionTerms`.
            Over `vectors`: query_vectors, key_vectors, trilinear (H|1, W, D), value_vectors
            (H|1, W, Dv), and the two tables of a product term, product_query and product_key.
            Over `scalars`: static, gate (H|1, W').
            content_offset (H|1, D), which is added to the content's queries.
            The two static_factors: query_factors (B|1, H|1, T, r), key_factors (B|1, H|1, S, r).
            reset (H|1, 2): the logits of the first token's row and of its column.
        first: (B|1,) slot of the reset's first token, or None.
        reset_kinds: bits of the kinds that the reset replaces (see `resets`), 0 without one.
    """

    vectors: Window
    scalars: Window
    tensors: dict[str, Tensor] = field(default_factory=dict)
    first: Tensor | None = None
    reset_kinds: int = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add to a tensor that may not be there yet."""
        known = self.tensors.get(name)
        self.tensors[name] = tensor if known is None else known + tensor

    def add_factors(self, of_queries: Tensor, of_keys: Tensor) -> None:
        """Put factors beside those that are there."""
        for name, factors in (("query_factors", of_queries), ("key_factors", of_keys)):
            known = self.tensors.get(name)
            self.tensors[name] = factors if known is None else side_by_side(known, factors)


def nothing_apart(term: PositionTerms) -> bool:
    """Return False: all tables of vectors lie over one window."""
    return False


def lower(
    inputs: AttentionInputs,
    vectors: Window,
    scalars: Window,
    dtype: torch.dtype,
    apart: Callable[[PositionTerms], bool] = nothing_apart,
) -> Lowered:
    """Lower the terms of a call that `refusal` does not refuse.

    Args:
        inputs: the call.
        vectors: window of tables of vectors.
        scalars: window of tables of scalars.
        dtype: type of vectors and factors; scalars, and what multiplies, are as exact as logits.
        apart: terms whose query_vectors and key_vectors the caller lowers itself.
    """
    low = Lowered(vectors, scalars)
    resets = None
    if any(term.reset is not None for term in inputs.terms):
        resets = Resets(inputs)
    for term in inputs.terms:
        _add_vectors(low, term, inputs, dtype, apart(term))
        _add_scalars(low, term, inputs)
        for factors in factors_of(term, inputs, dtype):
            if term.reset is not None and resets.clears_factors:
                factors = resets.cleared(factors)
            low.add_factors(*factors)
    if resets is not None and resets.held:
        low.tensors["reset"] = resets.numbers()
        low.first, low.reset_kinds = resets.first, resets.kinds
        if resets.mixes_tables:
            low.add_factors(*resets.kept(dtype))
    return low


def relations_of_vectors(
    inputs: AttentionInputs, apart: Callable[[PositionTerms], bool] = nothing_apart
) -> list[DistanceRelation]:
    """Return the relations of tables of vectors, but for those that are lowered apart."""
    found = []
    for term in inputs.terms:
        names = VECTORS[2:] if apart(term) else VECTORS
        if any(getattr(term, name) is not None for name in names):
            found.append(term.relation)
    return found


def needs_offset_table(inputs: AttentionInputs) -> bool:
    """Return whether some u of u.k goes into the table of key_vectors."""
    given = any(term.content_offset is not None for term in inputs.terms)
    return given and not folds_offset(inputs)


def _add_vectors(low: Lowered, term: PositionTerms, inputs: AttentionInputs, dtype: torch.dtype, apart: bool) -> None:
    exact, known = inputs.exact, {}

    def read(name: str, dtype: torch.dtype) -> Tensor:
        given = getattr(term, name)
        if (id(given), dtype) not in known:  # one table may serve queries and keys
            # Its gradient is summed in the more exact of both types.
            table = given.to(torch.promote_types(given.dtype, dtype))
            table = over_window(table, term.relation, low.vectors, inputs.positions).to(dtype)
            known[id(given), dtype] = table
        return known[id(given), dtype]

    if term.product:
        # A product of three passes what half precision holds.
        low.tensors["product_query"] = read("query_vectors", exact)
        low.tensors["product_key"] = read("key_vectors", exact)
    elif not apart:
        if term.query_vectors is not None:
            table = read("query_vectors", dtype)
            if term.query_offset is not None:
                table = table.contiguous()  # once: this product and the kernel keep it
                _add_query_offset(low, table.to(exact), term, inputs)
            low.add("query_vectors", table)
        if term.key_vectors is not None:
            low.add("key_vectors", read("key_vectors", dtype))
    if term.value_vectors is not None:
        low.add("value_vectors", read("value_vectors", dtype))
    if term.trilinear is not None:
        low.add("trilinear", read("trilinear", exact))
    if term.content_offset is not None:
        if folds_offset(inputs):
            low.add("content_offset", term.content_offset.to(exact))
        else:
            offset = term.content_offset.to(dtype)[:, None]  # (H|1, 1, D)
            low.add("key_vectors", offset.expand(-1, low.vectors.width, -1))


def _add_query_offset(low: Lowered, table: Tensor, term: PositionTerms, inputs: AttentionInputs) -> None:
    """Add scale v.a_d, a number for each distance."""
    offset = term.query_offset.to(inputs.exact)[..., None] * inputs.scale  # (H|1, D, 1)
    products = (table @ offset)[..., 0]  # (H|1, W)
    if not low.scalars.equals(low.vectors):
        band = Clipped(-low.vectors.low, low.vectors.high)
        products = over_window(products, band, low.scalars, inputs.positions)
    low.add("static", products)


def _add_scalars(low: Lowered, term: PositionTerms, inputs: AttentionInputs) -> None:
    """Add a term's `static` over the window of scalars (H|1, W'), and multiply by its `gate`."""
    if is_segments(term):
        return
    for name in SCALARS:
        table = getattr(term, name)
        if table is None:
            continue
        table = over_window(table.to(inputs.exact), term.relation, low.scalars, inputs.positions)
        known = low.tensors.get(name)
        if known is not None:
            table = known + table if name == "static" else known * table
        low.tensors[name] = table
