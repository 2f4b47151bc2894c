"""Gradients of each tile, whose probabilities are formed again."""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.attention.tiles.bands import KeyProducts
from relpos_fairseq.attention.tiles.content_free import Share
from relpos_fairseq.attention.tiles.forward import Forward
from relpos_fairseq.attention.tiles.geometry import (
    Buffer,
    Tile,
    add_table_gradient,
    products,
    products_back,
)
from relpos_fairseq.attention.tiles.plan import Plan, Vectors
from relpos_fairseq.attention.tiles.wide import (
    chunks,
    falling,
    sheared,
    to_keys,
    unsheared,
    window,
)


class Backward(Forward):
    """One pass over all tiles, from the output's gradient to those of q, k, v and the tables."""

    def __init__(
        self,
        plan: Plan,
        seed: int | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tables: list[Tensor],
        wanted: list[bool],
    ) -> None:
        """Allocate the gradients that are summed over tiles."""
        super().__init__(plan, seed, q, k, v, tables)
        self.wanted = wanted
        self.dq = torch.empty_like(self.q, memory_format=torch.contiguous_format)
        self.dk, self.dv = self._zeros(self.k), self._zeros(self.v)
        self.totals = [
            self._zeros(table) if want else None for table, want in zip(tables, wanted, strict=True)
        ]
        self.grads = Buffer(self._largest(), plan.guard, self.q, "gradients")
        self.key_grads = [
            None if keys is None else KeyProducts(keys.band, keys.keys, self.k.size(0), self.k)
            for keys in self.key_products
        ]

    @staticmethod
    def _zeros(like: Tensor) -> Tensor:
        return torch.zeros_like(like, memory_format=torch.contiguous_format)

    def run(self, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of q, k, v and every table."""
        grad = grad.to(self.q.dtype).flatten(0, 1)
        for tile, share in self.tiles():
            probs = self.probabilities(tile, share)
            upstream = grad[tile.query]
            self._through_values(tile, probs, upstream)
            logits = self.grads.of(tile)
            torch.ops.aten._softmax_backward_data.out(
                logits, probs, -1, logits.dtype, grad_input=logits
            )
            self._through_logits(tile, share, logits)
        self.buffer.give_back()
        self.grads.give_back()
        self._through_keys()
        if self.plan.split is not None:
            self.multiplied.finish()
        shape = (self.batch, self.heads)
        inner = (part.unflatten(0, shape) for part in (self.dq, self.dk, self.dv))
        return (*inner, *self.totals)

    def finish(self, share: Share) -> None:
        """Take a share's gradients back to its tables."""
        share.back(self.totals)

    # --- from the output to the probabilities -------------------------------------------------

    def _through_values(self, tile: Tile, probs: Tensor, upstream: Tensor) -> None:
        """Leave the gradient of the probabilities in `grads`; sum those of values."""
        logits = self.grads.of(tile)
        torch.bmm(upstream, self.v[tile.key].transpose(1, 2), out=logits)
        kept = undropped = None
        if self.seed is not None:
            kept, undropped = self.kept(tile), probs.clone()
            probs.mul_(kept)
        for part in self.plan.vectors:
            if part.value is not None:
                self._through_value_vectors(tile, part, upstream)
        self.dv[tile.key].baddbmm_(probs.transpose(1, 2), upstream)
        if kept is not None:
            logits.mul_(kept)
            probs.copy_(undropped)

    def _through_value_vectors(self, tile: Tile, part: Vectors, upstream: Tensor) -> None:
        if part.band is None:
            distances = unsheared(self.buffer.of(tile))
            self._add_window(part.value, distances, upstream, tile)
            found = products(upstream, self.wide_table(tile, part.value))
            self.grads.of(tile).add_(sheared(found, tile.keys))
            return
        band, mask = part.band, self.mask(tile, part)
        table, left = (tile.of_heads(self.tables[n]) for n in (part.value, part.value_left))
        columns = band.take(self.buffer, tile, mask)
        mass = self.buffer.of(tile).sum(-1, keepdim=True)
        if self.totals[part.value] is not None:
            add_table_gradient(self.totals[part.value], columns, upstream, tile)
        if self.totals[part.value_left] is not None:
            add_table_gradient(self.totals[part.value_left], mass, upstream, tile)
        found = products(upstream, table)
        band.add(self.grads, tile, found, mask, found[..., -1:].clone())
        if self.seed is not None:  # without dropout softmax does not see what a whole row gets
            self.grads.of(tile).add_(products(upstream, left))

    # --- from the logits to queries, keys and tables ------------------------------------------

    def _through_logits(self, tile: Tile, share: Share, logits: Tensor) -> None:
        if share.bias_grad is not None:
            _add_reduced(share.bias_grad, tile.apart(logits))
        self.query_grad = None
        for number, part in enumerate(self.plan.vectors):
            self._through_vectors(tile, part, self.key_grads[number], logits)
        if share.gate is not None:
            if share.gate_grad is not None:
                _add_reduced(share.gate_grad, tile.apart(self.content.mul_(logits)))
            tile.apart(logits).mul_(share.gate.detach())
        if self.plan.split is not None:
            queries = self.multiplied.back(tile, logits)
            if self.query_grad is not None:
                queries.add_(self.query_grad, alpha=self.scale)
            self.dq[tile.query] = queries
            return
        queries = torch.bmm(logits, self.k[tile.key])
        self.dk[tile.key].baddbmm_(logits.transpose(1, 2), self.queries(tile))
        for place in self.plan.folds:
            self._add_offset(place, queries, tile)
        if self.query_grad is not None:
            queries += self.query_grad
        self.dq[tile.query] = queries.mul_(self.scale)

    def _through_vectors(
        self, tile: Tile, part: Vectors, keys: KeyProducts | None, logits: Tensor
    ) -> None:
        if part.band is None:
            self._through_wide(tile, part, logits)
            return
        if part.query is None and keys is None:
            return
        columns = part.band.take_band(self.grads, tile, self.mask(tile, part))
        if keys is not None:
            keys.diagonals(tile).add_(columns)
            keys.take_right(self.grads, tile)
        if part.query is not None:
            part.band.take_right(self.grads, tile, columns)
            self._through_products(tile, part, columns, tile.of_heads(self.tables[part.query]))

    def _through_wide(self, tile: Tile, part: Vectors, logits: Tensor) -> None:
        """Vectors over all distances."""
        if part.query is not None:
            table = self.wide_table(tile, part.query)
            self._through_products(tile, part, unsheared(logits), table)
        if part.key is None:
            return
        for keys in chunks(tile):
            columns = to_keys(logits[:, :, keys]) * self.scale
            vectors = falling(self.wide_table(tile, part.key, keys))
            self.dk[tile.matrices, keys] += products_back(columns, vectors)
            self._add_window(part.key, columns.flip(2), self.k[tile.matrices, keys], tile, keys)

    def _through_products(self, tile: Tile, part: Vectors, columns: Tensor, table: Tensor) -> None:
        """Columns (N, n, W) of gradients to the queries and vectors whose products they are."""
        found = products_back(columns, table)
        if part.offset is not None:
            self._add_offset(part.offset, found, tile)
        if part.band is None:
            self._add_window(part.query, columns, self.queries_of(tile, part), tile)
        elif self.totals[part.query] is not None:
            queries = self.queries_of(tile, part)
            add_table_gradient(self.totals[part.query], columns, queries, tile)
        self.query_grad = found if self.query_grad is None else self.query_grad + found

    def _add_window(
        self, place: int, columns: Tensor, x: Tensor, tile: Tile, keys: slice | None = None
    ) -> None:
        """Add to the gradient of a table over all distances what a tile's columns give it."""
        total = self.totals[place]
        if total is not None:
            lowest = self.inputs.positions.lowest_distance
            add_table_gradient(window(total, tile, lowest, keys), columns, x, tile)

    def _add_offset(self, place: int, queries: Tensor, tile: Tile) -> None:
        """Add to an offset's (H|1, D) gradient that of the queries which it was added to."""
        total = self.totals[place]
        if total is None:
            return
        found = tile.apart(queries).sum((0, 2)) * self.scale  # (heads, D)
        if total.size(0) == 1:
            total[0] += found.sum(0)
        else:
            total[slice(*tile.heads)] += found

    def _through_keys(self) -> None:
        """From products of keys with vectors to both, once for all tiles."""
        everything = Tile(0, 0, 0, 0, (0, self.batch), (0, self.heads), self.heads)
        for part, grads in zip(self.plan.vectors, self.key_grads, strict=True):
            if grads is None:
                continue
            columns = grads.inner * self.scale
            self.dk += products_back(columns, everything.of_heads(self.tables[part.key]))
            if self.totals[part.key] is not None:
                add_table_gradient(self.totals[part.key], columns, self.k, everything)


def _add_reduced(total: Tensor, grad: Tensor) -> None:
    """Add (batch, heads, n, S) to (batch|1, heads|1, n, S), summing what is shared."""
    shared = [dim for dim in (0, 1) if total.size(dim) < grad.size(dim)]
    total += grad.sum(shared, keepdim=True) if shared else grad
