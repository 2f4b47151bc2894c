"""A reset as two columns of factors: what replaces a row and a column, less what stands there."""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.terms import PositionTerms

Pair = tuple[Tensor, Tensor]


def corrections(term: PositionTerms, inputs: AttentionInputs) -> list[Pair]:
    """Factors that turn what a term adds to the logits into its reset.

    Args:
        term: with a reset, over distances.
        inputs: the call.

    Returns:
        Two pairs of factors (B|1, H|1, T, 1) and (B|1, H|1, S, 1): for the row, for the column.
    """
    positions, exact, reset = inputs.positions, inputs.exact, term.reset
    first = reset.first[:, None]
    slots = torch.arange(positions.src_len, device=positions.device)
    rows = slots[positions.query_start : positions.query_stop]
    row, column = (
        (some == first).to(exact)[:, None, :, None] for some in (rows, slots)
    )  # (B|1, 1, T|S, 1), 1 where the first token stands
    at = (reset.first - positions.query_start).clamp(0, positions.tgt_len - 1)
    query_factor, key_factor = term.static_factors or (None, None)
    in_row = _added(
        term, inputs, slots - first, _at(inputs.q, at), inputs.k, _at(query_factor, at), key_factor
    )
    in_column = _added(
        term, inputs, first - rows, inputs.q, _at(inputs.k, reset.first), query_factor,
        _at(key_factor, reset.first),
    )  # fmt: skip
    theta_row, theta_column = (
        part.to(exact)[None, :, None, None] for part in (reset.row, reset.column)
    )
    return [(row, theta_row - in_row), ((1 - row) * (theta_column - in_column), column)]


def _at(part: Tensor | None, index: Tensor) -> Tensor | None:
    """(B|1, H|1, n, ...) at one row for each row of the batch: (B|1, H|1, 1, ...)."""
    if part is None:
        return None
    if index.size(0) == 1:
        return part.index_select(2, index)
    part = part.expand(index.size(0), -1, -1, -1)
    return part.gather(2, index.view(-1, 1, 1, 1).expand(-1, part.size(1), 1, part.size(3)))


def _added(
    term: PositionTerms, inputs: AttentionInputs, distance: Tensor, q: Tensor, k: Tensor,
    query_factor: Tensor | None, key_factor: Tensor | None,
) -> Tensor:  # fmt: skip
    """What a term adds in one row or one column: (B|1, H|1, n, 1); `distance` is (B|1, n)."""
    exact, total = inputs.exact, 0.0

    def read(table: Tensor) -> Tensor:
        return table.to(exact)[:, term.relation.of_distance(distance)].transpose(0, 1)

    if term.static is not None:
        total = total + read(term.static)[..., None]
    if term.static_factors is not None:
        total = total + (query_factor.to(exact) * key_factor.to(exact)).sum(-1, keepdim=True)
    if term.product:
        return total
    if term.query_vectors is not None:
        q = q.to(exact)
        if term.query_offset is not None:
            q = q + term.query_offset.to(exact)[None, :, None]
        total = total + (q * inputs.scale * read(term.query_vectors)).sum(-1, keepdim=True)
    if term.key_vectors is not None:
        total = total + (k.to(exact) * inputs.scale * read(term.key_vectors)).sum(-1, keepdim=True)
    return total
