"""Compute the operands of the Triton kernels: a lowered call, its tables multiplied with queries and keys.

`logits` has the formula.  Products with the vectors of a near table are computed here, (B, H, T, W) and (B, H, S, W)
for W distances.  Where a term has vectors for more than STORED_DISTANCES distances they would take too much memory: its
table is a *long table*, and the kernels compute the products tile by tile.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering import (
    SAME_EVERYWHERE,
    SCALARS,
    Lowered,
    Window,
    lower,
    needs_offset_table,
    relations_of_vectors,
    table_by_distance,
)
from relpos_fairseq.core.relations import DistanceRelation
from relpos_fairseq.core.terms import PositionTerms

STORED_DISTANCES = 256  # distances up to which products with each vector are stored


def has_long_table(term: PositionTerms, reach: Window) -> bool:
    """Return whether a term adds vectors for more visible distances than products are stored for."""
    if term.product or (term.query_vectors is None and term.key_vectors is None):
        return False
    relation: Any = term.relation
    return min(relation.highest, reach.high) - max(relation.lowest, reach.low) >= STORED_DISTANCES


def windows_of(inputs: AttentionInputs) -> tuple[Window, Window, Window]:
    """Return the distances of visible pairs, the near window, and the window of scalars."""
    reach = Window.visible(inputs)
    relations = relations_of_vectors(inputs, lambda term: has_long_table(term, reach))
    if relations or not needs_offset_table(inputs):
        vectors = Window.over(relations, reach)
    else:
        vectors = SAME_EVERYWHERE
    return reach, vectors, Window.over(_relations_of_scalars(inputs, reach), reach)


def operands_of(inputs: AttentionInputs) -> Lowered:
    """Return the operands of a call that `refusal` does not refuse, over the near window and the window of scalars.

    Its tensors have the names and shapes that `kernel_args.OperandPointers` gives, without those that the call lacks,
    and value_vectors (H|1, W, D), which probabilities by distance are multiplied with.
    """
    reach, vectors, scalars = windows_of(inputs)
    low = lower(inputs, vectors, scalars, inputs.q.dtype, lambda term: has_long_table(term, reach))
    tensors = low.tensors
    tensors["q"] = inputs.content_q if inputs.rotated else inputs.q
    tensors["k"] = inputs.content_k if inputs.rotated else inputs.k
    tensors["v"] = inputs.v
    if "content_offset" in tensors:
        tensors["q"] = _add_offset(tensors["q"], tensors.pop("content_offset"))
    _multiply_near_tables(low, inputs)
    for term in inputs.terms:
        if has_long_table(term, reach):
            _add_long_table(low, term, inputs, reach)
    return low


def multiply(x: Tensor, table: Tensor) -> Tensor:
    """Multiply x (B, H, L, D) with a table (H|1, W, D): (B, H, L, W), laid out as x is."""
    flat = x.permute(0, 2, 1, 3)  # (B, L, H, D): fairseq's heads are slices of a (L, B, E) tensor
    order = (1, 0, 2, 3) if flat.stride(1) > flat.stride(0) else (0, 1, 2, 3)
    flat = flat.permute(order)
    if x.stride(1) > min(x.stride(0), x.stride(2)):
        return x @ table[None].transpose(-1, -2)
    if table.size(0) == 1:
        products = flat.reshape(-1, x.size(-1)) @ table[0].t()
    else:
        by_head = flat.reshape(-1, x.size(1), x.size(-1)).transpose(0, 1)
        products = (by_head @ table.transpose(-1, -2)).transpose(0, 1)
    products = products.reshape(*flat.shape[:3], table.size(1))
    return products.permute(order).permute(0, 2, 1, 3)


def _relations_of_scalars(inputs: AttentionInputs, reach: Window) -> list[DistanceRelation]:
    """Return the relations of static, gate, and of the scalars v.a_d that a query_offset makes."""
    return [
        term.relation
        for term in inputs.terms
        if isinstance(term.relation, DistanceRelation)
        and (
            any(getattr(term, name) is not None for name in SCALARS)
            or (term.query_offset is not None and not has_long_table(term, reach))
        )
    ]


def _add_offset(x: Tensor, offset: Tensor) -> Tensor:
    """Add an offset (H|1, D) to x (B, H, L, D), in at least fp32."""
    exact = torch.promote_types(x.dtype, torch.float32)
    return (x.to(exact) + offset.to(exact)[None, :, None]).to(x.dtype)


def _multiply_near_tables(low: Lowered, inputs: AttentionInputs) -> None:
    """Replace tables over the near window by their products with queries and keys."""
    tensors, exact = low.tensors, inputs.exact
    if "query_vectors" in tensors:
        tensors["query_products"] = multiply(inputs.q, tensors.pop("query_vectors"))
    if "key_vectors" in tensors:
        tensors["key_products"] = multiply(inputs.k, tensors.pop("key_vectors"))
    if "product_query" in tensors:
        query, key = tensors.pop("product_query"), tensors.pop("product_key")
        tensors["query_multipliers"] = multiply(inputs.q.to(exact), query)
        tensors["key_multipliers"] = multiply(inputs.k.to(exact), key)
    if "trilinear" in tensors:
        _replace_content(low, tensors.pop("trilinear"), inputs)


def _add_long_table(low: Lowered, term: PositionTerms, inputs: AttentionInputs, window: Window) -> None:
    """Add a term's vectors for every visible distance, and the queries and keys that are multiplied with them."""
    tensors = low.tensors
    if term.query_vectors is not None:
        q = inputs.q if term.query_offset is None else _add_offset(inputs.q, term.query_offset)
        tensors["long_q"] = q
        table = table_by_distance(term.query_vectors, term.relation, window, inputs.positions)
        low.add("query_vectors", table.to(q.dtype))
    if term.key_vectors is not None:
        tensors["long_k"] = inputs.k
        table = table_by_distance(term.key_vectors, term.relation, window, inputs.positions)
        low.add("key_vectors", table.to(inputs.k.dtype))


def _replace_content(low: Lowered, weights: Tensor, inputs: AttentionInputs) -> None:
    """Replace q.k by sum_c q_c k_c w_c: stored for the near window, and in its clipped ends (q w).k."""
    # Triton is imported where something is evaluated, not where it is refused.
    from relpos_fairseq.attention.triton.trilinear import trilinear_band

    tensors, q, k = low.tensors, low.tensors["q"], low.tensors["k"]
    first = inputs.positions.query_start + low.vectors.low + q.size(2) - 1
    exact = q.to(inputs.exact)
    tensors["near_content"] = trilinear_band(exact, k.to(inputs.exact), weights, first)
    tensors["q"] = (exact * weights[:, :1]).to(q.dtype)
    tensors["right_q"] = (exact * weights[:, -1:]).to(q.dtype)
