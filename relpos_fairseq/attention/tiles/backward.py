"""Gradients of each tile, whose probabilities are formed again."""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.attention.tiles.forward import Forward
from relpos_fairseq.attention.tiles.geometry import Buffer, Tile, add_table_gradient, scratch
from relpos_fairseq.attention.tiles.plan import Plan


class Backward(Forward):
    """One pass over all tiles, from the output's gradient to those of q, k, v and the tables."""

    def __init__(
        self, plan: Plan, seed: int | None, q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor],
        wanted: list[bool],
    ) -> None:  # fmt: skip
        """Allocate the gradients that are summed over tiles."""
        self.wanted = wanted
        pairs = zip(tables, wanted, strict=True)
        totals = [_zeros(table) if want else None for table, want in pairs]
        super().__init__(plan, seed, q, k, v, tables, totals)
        # Where all rows are in one tile its products are written, elsewhere they are summed.
        self.once = plan.split is None and plan.rows == q.size(2)
        start = _empty if self.once else _zeros
        self.dq = (_empty if plan.split is None else _zeros)(self.q)
        self.dk, self.dv = start(self.k), start(self.v)
        self.grads = Buffer(self._largest(), plan.guard, self.q, "gradients")

    def run(self, grad: Tensor, taken: list[Tensor]) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v and every table.

        Args:
            grad: (B, H, T, Dv) that of the output.
            taken: what the forward pass kept.
        """
        grad, taken = grad.to(self.q.dtype).flatten(0, 1), iter(taken)
        for part in self.vectors:
            part.start_back(grad, taken)
        for tile in self.tiles():
            probs = self.probabilities(tile)
            self._through_values(tile, probs, self.turned(grad[tile.query]))
            logits = self.grads.of(tile)
            torch.ops.aten._softmax_backward_data.out(
                logits, probs, -1, logits.dtype, grad_input=logits
            )
            self._through_logits(tile, logits)
        self.buffer.give_back()
        self.grads.give_back()
        for sheet in (*self.sheets, *([] if self.gate is None else [self.gate])):
            sheet.finish()
        for part in self.vectors:
            part.finish_back()
        if self.plan.split is not None:
            self.multiplied.finish()
        shape = (self.batch, self.heads)
        inner = (part.unflatten(0, shape) for part in (self.dq, self.dk, self.dv))
        return (*inner, *self.totals)

    def _through_values(self, tile: Tile, probs: Tensor, upstream: Tensor) -> None:
        """Leave the gradient of the probabilities in `grads`; sum those of values."""
        grads = self.grads.of(tile)
        torch.bmm(upstream, self.v[tile.key].transpose(1, 2), out=grads)
        for part in self.vectors:
            part.add_values(tile, upstream)
        dropped = probs
        if self.seed is not None:
            kept = self.kept(tile)
            grads.mul_(kept)
            dropped = kept.mul_(probs)
        for part in self.vectors:
            part.back_to_values(tile, dropped, upstream)
        self._sum(self.dv[tile.key], dropped, upstream, 1.0)

    def _through_logits(self, tile: Tile, logits: Tensor) -> None:
        """From the logits' gradient to queries, keys and tables."""
        if self.plan.split is None:
            self._through_content(tile, logits)
        for sheet in self.sheets:
            sheet.add_gradient(tile, logits)
        if self.plan.factors is not None:
            self._through_factors(tile, logits)
        for part in self.vectors:
            part.back(tile)
        if self.plan.split is not None:  # overwrites the logits
            self.multiplied.back(tile, logits, self.dq[tile.query])

    def _through_content(self, tile: Tile, logits: Tensor) -> None:
        """To queries and keys, through the gate."""
        if self.gate is not None:
            content = self.ungated(tile)
            self.gate.add_gradient(tile, content.mul_(logits))
            torch.mul(tile.apart(logits), self.gate.of(tile), out=tile.apart(content))
            logits = content
        keys, queries = self.k[tile.key], self.dq[tile.query]
        direct = queries.is_contiguous() and not self.plan.falling
        found = queries if direct else scratch(self.q, "rows", *queries.shape)
        torch.baddbmm(found, logits, keys, beta=0, alpha=self.scale, out=found)
        if not direct:
            queries.copy_(self.turned(found))
        for place in self.plan.folds:
            self.add_to_offset(place, found, tile)
        self._sum(self.dk[tile.key], logits, self.turned(self.content_q[tile.query]), self.scale)

    def _sum(self, total: Tensor, left: Tensor, right: Tensor, scale: float) -> None:
        """Add to total (N, S, D) the product of left (N, n, S) and right (N, n, D)."""
        beta = 0 if self.once else 1
        if total.is_contiguous():
            torch.baddbmm(total, left.transpose(1, 2), right, beta=beta, alpha=scale, out=total)
        else:
            total.baddbmm_(left.transpose(1, 2), right, beta=beta, alpha=scale)

    def _through_factors(self, tile: Tile, logits: Tensor) -> None:
        """To factors that no tiles share."""
        query, key = self.plan.factors
        q, k = self.turned(self.tables[query][tile.query]), self.tables[key][tile.key]
        if self.totals[query] is not None:
            self.totals[query][tile.query] = self.turned(torch.bmm(logits, k))
        if self.totals[key] is not None:
            self.totals[key][tile.key].baddbmm_(logits.transpose(1, 2), q)

    def add_to_table(
        self, place: int, columns: Tensor, x: Tensor, tile: Tile | None = None
    ) -> None:
        """Add to a table's gradient (H|1, W, D) that of the products (N, n, W) of x with it."""
        if self.totals[place] is not None:
            add_table_gradient(self.totals[place], columns, x, tile or self.everything)

    def add_to_offset(self, place: int, queries: Tensor, tile: Tile | None = None) -> None:
        """Add to an offset's gradient (H|1, D) that of the queries (N, n, D) it was added to."""
        total, tile = self.totals[place], tile or self.everything
        if total is None:
            return
        found = tile.apart(queries).sum((0, 2))  # (heads, D)
        if total.size(0) == 1:
            total[0] += found.sum(0)
        else:
            total[slice(*tile.heads)] += found


def _empty(like: Tensor) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros_like(like, memory_format=torch.contiguous_format)
