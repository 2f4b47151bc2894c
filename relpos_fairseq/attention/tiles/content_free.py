"""What tiles add and multiply that needs neither q nor k: scalars, factors, resets, gates.

A tile's share is formed by ordinary autograd, once for all rows of the batch that share it, and its
gradient goes back the same way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from relpos_fairseq.attention.formula import static_logits
from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.sheared import Sheared
from relpos_fairseq.attention.tiles.geometry import Tile
from relpos_fairseq.attention.tiles.plan import Plan, batched, rebuilt
from relpos_fairseq.positions import Positions
from relpos_fairseq.terms import PositionTerms

FAR = 40.0  # logits; exp(-40) is 4e-18


@dataclass
class Share:
    """A tile's bias and gate: (batch|1, heads|1, n, S) or None, and how to go back.

    Args:
        bias: added to the logits.
        gate: multiplies the content.
        places: tables that want a gradient, by their place in the plan.
        leaves: those tables.
    """

    bias: Tensor | None
    gate: Tensor | None
    places: list[int]
    leaves: list[Tensor]

    def __post_init__(self) -> None:
        """Gradients are summed over the tiles that use the share."""
        self.bias_grad = self._zeros(self.bias)
        self.gate_grad = self._zeros(self.gate)
        self.far = False  # whether the bias alone makes probabilities that are nearly 0
        if self.bias is not None:
            low, high = self.bias.detach().aminmax()
            self.far = float(high - low) > FAR

    @staticmethod
    def _zeros(part: Tensor | None) -> Tensor | None:
        return torch.zeros_like(part) if part is not None and part.requires_grad else None

    def back(self, totals: list[Tensor | None]) -> None:
        """Add the gradients of the tables to `totals`."""
        pairs = ((self.bias, self.bias_grad), (self.gate, self.gate_grad))
        outputs = [(part, grad) for part, grad in pairs if grad is not None]
        if not outputs:
            return
        parts, grads = zip(*outputs, strict=True)
        found = torch.autograd.grad(parts, self.leaves, grads, allow_unused=True)
        for place, grad in zip(self.places, found, strict=True):
            if grad is not None:
                totals[place] += grad


def depends_on_batch(plan: Plan) -> bool:
    """Whether rows of the batch differ in what is free of content."""
    for bare, places in plan.content_free:
        factors = [plan.tables[places[n]] for n in ("factor_q", "factor_k") if n in places]
        first = None if bare.reset is None else bare.reset.first
        if batched(first) or any(batched(part) for part in factors):
            return True
        if plan.inputs.positions.segments is not None:
            return True
    return False


def make_share(plan: Plan, tables: list[Tensor], tile: Tile, wanted: list[bool]) -> Share:
    """Form the share of a tile.

    Args:
        plan: the call.
        tables: its tables, detached.
        tile: rows, heads and rows of the batch.
        wanted: which tables want a gradient.
    """
    places = sorted({p for _, named in plan.content_free for p in named.values() if wanted[p]})
    tables = list(tables)
    leaves = [tables[place].detach().requires_grad_() for place in places]
    for place, leaf in zip(places, leaves, strict=True):
        tables[place] = leaf
    bias = gate = None
    with torch.set_grad_enabled(bool(places)):
        for entry in plan.content_free:
            term = _of_tile(rebuilt(entry, tables), tile)
            products = Sheared(_inputs_of_tile(plan.inputs, tile, term))
            if term.gate is not None:
                part = products.scalars(term.gate, term)
                gate = part if gate is None else gate * part
            if term.static is not None or term.static_factors is not None:
                part = static_logits(replace(term, gate=None), products)
                bias = part if bias is None else bias + part
    return Share(bias, gate, places, leaves)


def _of_tile(term: PositionTerms, tile: Tile) -> PositionTerms:
    """The term for the heads, rows of the batch and queries of a tile, and the keys it sees."""

    def of_heads(table: Tensor | None, dim: int) -> Tensor | None:
        if table is None or table.size(dim) == 1:
            return table
        return table.narrow(dim, tile.heads[0], tile.heads[1] - tile.heads[0])

    def of_batch(table: Tensor) -> Tensor:
        return table[slice(*tile.batch)] if table.size(0) > 1 else table

    changed = {"static": of_heads(term.static, 0), "gate": of_heads(term.gate, 0)}
    if term.static_factors is not None:
        query, key = (of_heads(of_batch(factor), 1) for factor in term.static_factors)
        changed["static_factors"] = query[:, :, tile.start : tile.stop], key[:, :, : tile.keys]
    if term.reset is not None:
        row, column = (of_heads(part, 0) for part in (term.reset.row, term.reset.column))
        changed["reset"] = replace(
            term.reset, row=row, column=column, first=of_batch(term.reset.first)
        )
    return replace(term, **changed)


def _inputs_of_tile(inputs: AttentionInputs, tile: Tile, term: PositionTerms) -> AttentionInputs:
    """The call as the formula reads it: nothing of q and k but their type."""
    whole = inputs.positions
    segments = whole.segments
    if segments is not None:
        segments = segments[slice(*tile.batch), : tile.keys]
    positions = Positions(tile.rows, tile.keys, tile.slot, segments=segments, device=whole.device)
    return replace(inputs, terms=(term,), positions=positions)
