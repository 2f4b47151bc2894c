"""One step of incremental decoding: a single query that stands on the last key.

All distances are -(S - 1)..0, and beyond a relation's lowest distance every key shares one row of
a table.  That tail folds into the query (k.b_tail), drops out of the softmax (q.a_tail, the same
for all keys) or leaves one sum of probabilities (values), so only the last few keys meet vectors of
their own and nothing is recomputed for all keys: O(S D) a step, as plain attention.  What needs
neither query nor keys is formed once for many steps (`step_tables`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs, drop, probabilities
from relpos_fairseq.attention.step_tables import StepTables, TermTables
from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import DistanceRelation
from relpos_fairseq.terms import PositionTerms


def supports_step(terms: tuple[PositionTerms, ...], positions: Positions) -> bool:
    """Whether this is a step that the functions here evaluate: distances alone, nothing reset."""
    in_place = positions.is_step and positions.randomized is None
    return in_place and all(
        term.reset is None
        and term.contextual is None
        and (term.relation is None or isinstance(term.relation, DistanceRelation))
        for term in terms
    )


def form_clipped_key_products(terms: tuple[PositionTerms, ...], k: Tensor) -> Tensor | None:
    """k.b_tail of each product term, which decoding caches: (B, H, S, P), or None without any."""
    exact = torch.promote_types(k.dtype, torch.float32)
    # Not a product of matrices, which takes a step longer, and many keys three times as long.
    tails = [term.key_vectors[:, :1].to(exact) for term in terms if term.product]  # (H|1, 1, D)
    products = [(k.to(exact) * tail).sum(-1, keepdim=True) for tail in tails]
    if len(products) < 2:
        return products[0] if products else None
    return torch.cat(products, dim=-1)


def tables_for(inputs: AttentionInputs) -> StepTables:
    """The tables of this step: those it brings where they fit, or new ones."""
    length, known = inputs.positions.src_len, inputs.step_tables
    if known is not None and known.fit(inputs.terms, length):
        return known
    return StepTables(inputs.terms, inputs.scale, inputs.exact, inputs.q.device, length)


def attend_step(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Output (B, H, 1, Dv) and probabilities (B, H, 1, S).

    Batch and heads are one dimension of P = B H pairs wherever they can be: at short lengths the
    number of calls into torch counts for more than what they compute.
    """
    tables = tables_for(inputs)
    batch, heads, length, _ = inputs.k.shape
    logits = _logits(inputs, tables)[:, :, None]
    padded = inputs.key_padding is not None
    probs = drop(probabilities(logits, inputs.excluded(), padded), inputs.dropout)
    flat = probs.reshape(-1, 1, length)
    v = inputs.v.to(inputs.exact).flatten(0, 1)  # (P, S, Dv)
    if tables.value is None:
        out = torch.bmm(flat, v)
    else:
        # Probabilities sum to 1 but for dropout and a row without keys.
        mass = flat.sum(-1) if padded or inputs.dropout else None
        out = torch.baddbmm(_value_part(probs, tables, mass), flat, v)
    return out.view(batch, heads, 1, v.size(-1)).to(inputs.v.dtype), probs


class Parts(NamedTuple):
    """What a step's logits are made of, but for the vectors of the last keys (`StepTables`).

    Args:
        query: (B, H, 1, D) content's, scaled; it holds what all keys meet.
        factor: (B|1, H|1, S) multiplies its products with the keys, or None.
        added: (B|1, H|1, S) is added after that, or None.
    """

    query: Tensor
    factor: Tensor | None
    added: Tensor | None


def parts_of(inputs: AttentionInputs, tables: StepTables) -> Parts:
    """Form them, without what is the same for all keys."""
    _, k, query, _ = inputs.exact_pairs()
    length, scale, folds = k.size(2), inputs.scale, tables.folds(inputs.rotated)
    if tables.factor is not None:
        query, scale = query * tables.factor, 1.0
    if folds and tables.offset is not None:
        query, scale = torch.add(tables.offset, query, alpha=scale), 1.0
    factor = None if tables.gate is None else tables.gate[None, :, -length:]
    if tables.products:
        products = products_of(inputs, tables)
        factor = products if factor is None else factor * products
    added = [*added_of(inputs), *map(product_of_factors, factors_of(inputs, tables))]
    if tables.static is not None:
        added.append(tables.static[None, :, -length:])
    if tables.offset is not None and not folds:
        added.append((tables.offset @ k.transpose(-1, -2))[:, :, 0])
    scaled = query if scale == 1.0 else query * scale
    return Parts(scaled, factor, sum(added[1:], added[0]) if added else None)


def added_of(inputs: AttentionInputs) -> list[Tensor]:
    """Return the (B|1, H|1, S) that terms add to the logits of this step alone, but for factors."""
    added = []
    for term in inputs.terms:
        if term.dense_bias is not None:
            added.append(term.dense_bias.of(inputs.positions)[:, :, 0])
        if term.decay is not None:
            added.append((term.decay.past[..., -1:] - term.decay.past).to(inputs.exact))
    return added


def factors_of(inputs: AttentionInputs, tables: StepTables) -> list[tuple[Tensor, Tensor]]:
    """Return all factors: ((B|1, H|1, 1, r), (B|1, H|1, S, r)) each."""
    return given_factors(inputs) + tables.factors_at(inputs.k.size(2))


def given_factors(inputs: AttentionInputs) -> list[tuple[Tensor, Tensor]]:
    """Return those that are not read by position."""
    given = (term.static_factors for term in inputs.terms if term.static_factors is not None)
    return [tuple(part.to(inputs.exact) for part in pair) for pair in given]


def product_of_factors(factors: tuple[Tensor, Tensor]) -> Tensor:
    """(B|1, H|1, S) of a row and its columns."""
    row, columns = factors
    return (row @ columns.transpose(-1, -2))[:, :, 0]


def products_of(inputs: AttentionInputs, tables: StepTables) -> Tensor:
    """Multiply the (q.a_r)(k.b_r) of all product terms: (B, H, S)."""
    q, k = inputs.q.to(inputs.exact), inputs.k.to(inputs.exact)
    found = [_product(part, q, k, inputs.clipped_key_products, index) for index, part in enumerate(tables.products)]
    return math.prod(found[1:], start=found[0])


def _logits(inputs: AttentionInputs, tables: StepTables) -> Tensor:
    """(B, H, S) logits, but for what is the same for all keys."""
    q, k, content_q, content_k = inputs.exact_pairs()
    parts = parts_of(inputs, tables)
    logits = torch.bmm(parts.query.flatten(0, 1), content_k.flatten(0, 1).transpose(1, 2))
    by_head = logits.view(k.shape[:3])
    if tables.trilinear is not None:
        _add_near(by_head, _meet(tables.trilinear, content_k, content_q))
    if parts.factor is not None:
        by_head = by_head * parts.factor
    if parts.added is not None:
        by_head += parts.added
    if tables.query is not None:
        near = tables.query[:, -k.size(2) :]
        _add_near(by_head, _per_head(q, near.transpose(1, 2)))
    if tables.key is not None:
        _add_near(by_head, _meet(tables.key, k))
    return by_head


def _product(part: TermTables, q: Tensor, k: Tensor, clipped_key_products: Tensor | None, index: int) -> Tensor:
    """(q.a_r)(k.b_r) of a product term: (B, H, S)."""
    length = k.size(2)
    queries = _per_head(q, part.product_query)  # (B, H, keys), the tail's first
    if clipped_key_products is None:
        tails = form_clipped_key_products((part.term,), k)[..., 0]
    else:
        tails = clipped_key_products[..., index]
    n = min(part.keys, length)
    factor = queries[..., :1] * tails
    factor[..., length - n :] = queries[..., -n:] * _meet(part.product_key, k)
    return factor


def _value_part(probs: Tensor, tables: StepTables, mass: Tensor | None) -> Tensor:
    """What value vectors add to the output: (P, 1, Dv).

    Args:
        probs: (B, H, 1, S).
        tables: of the step.
        mass: (P, 1) sum of each row's probabilities, or None where that is 1.
    """
    near, tail = tables.value, tables.value_tail
    n = min(near.size(1), probs.size(-1))
    if near.size(0) == 1 and mass is None:
        return torch.addmm(tail[0], probs.flatten(0, 2)[:, -n:], near[0, -n:])[:, None]
    far = tail[:, 0] if mass is None else mass.view(*probs.shape[:2], 1) * tail[:, 0]
    return (_per_head(probs[..., -n:], near[:, -n:]) + far).flatten(0, 1)[:, None]


def _meet(rows: Tensor, k: Tensor, q: Tensor | None = None) -> Tensor:
    """Near keys meet rows of their own (H|1, keys, D), channels weighed by q: (B, H, n)."""
    n = min(rows.size(1), k.size(2))
    recent = k[:, :, -n:] if q is None else k[:, :, -n:] * q
    return (recent * rows[:, -n:]).sum(-1)


def _per_head(x: Tensor, matrices: Tensor) -> Tensor:
    """(B, H, 1, L) times (H|1, L, n), without a copy of the matrices a row: (B, H, n)."""
    batch, heads, _, inner = x.shape
    if matrices.size(0) == 1:
        return (x.reshape(batch * heads, inner) @ matrices[0]).view(batch, heads, matrices.size(-1))
    return torch.bmm(x.view(batch, heads, inner).transpose(0, 1), matrices).transpose(0, 1)


def _add_near(logits: Tensor, near: Tensor) -> None:
    """Add (B, H, n) to the last keys of (B, H, S) logits, which no operation has kept."""
    logits[..., logits.size(-1) - near.size(-1) :].add_(near)
