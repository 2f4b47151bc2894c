"""Logits, probabilities and output of each tile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from relpos_fairseq.attention.tiles.bands import KeyProducts
from relpos_fairseq.attention.tiles.content_free import Share, depends_on_batch, make_share
from relpos_fairseq.attention.tiles.geometry import Buffer, Tile, products
from relpos_fairseq.attention.tiles.masks import Exclusion, exclusion, visible_keys
from relpos_fairseq.attention.tiles.multiplied import Multiplied
from relpos_fairseq.attention.tiles.plan import ELEMENTS, Plan, Vectors
from relpos_fairseq.attention.tiles.wide import (
    chunks,
    falling,
    of_keys,
    sheared,
    unsheared,
    window,
)


class Forward:
    """One pass over all tiles.

    Args:
        plan: the call.
        seed: of dropout, or None without it.
        q: (B, H, T, D) in the exact type.
        k: (B, H, S, D).
        v: (B, H, S, Dv).
        tables: the plan's tables.
    """

    wanted: list[bool] | None = None

    def __init__(
        self, plan: Plan, seed: int | None, q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor]
    ) -> None:
        """Flatten heads, and meet the keys with their vectors."""
        self.plan, self.inputs, self.seed, self.tables = plan, plan.inputs, seed, tables
        self.scale = plan.inputs.scale
        self.batch, self.heads = q.shape[:2]
        self.q, self.k, self.v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        self.buffer = Buffer(self._largest(), plan.guard, self.q, "probabilities")
        self._of_rows: dict = {}  # masks, the same for all tiles of the same rows
        self.key_products = [self._meet_keys(part) for part in plan.vectors]
        self.fold = sum(tables[place] for place in plan.folds) if plan.folds else None

    def _chunks(self) -> tuple[int, int]:
        """Heads and rows of the batch in a tile: its logits stay near the cache."""
        budget = ELEMENTS.get(self.q.device.type, ELEMENTS["cuda"])
        matrices = max(budget // (self.plan.rows * self.k.size(1)), 1)
        if matrices < self.heads:
            return matrices, 1
        return self.heads, min(matrices // self.heads, self.batch)

    def _largest(self) -> int:
        heads, batch = self._chunks()
        return heads * batch * self.plan.rows * self.k.size(1)

    def _meet_keys(self, part: Vectors) -> KeyProducts | None:
        if part.key is None or part.band is None:
            return None
        table = self.tables[part.key]
        found = KeyProducts(part.band, self.k.size(1), self.k.size(0), self.k)
        everything = Tile(0, 0, 0, 0, (0, self.batch), (0, self.heads), self.heads)
        found.inner.copy_(products(self.k, everything.of_heads(table)).mul_(self.scale))
        return found

    def tiles(self) -> Iterator[tuple[Tile, Share]]:
        """Every tile, with what is free of content: formed once for rows of the batch alike."""
        heads, batch = self._chunks()
        tgt_len, apart = self.q.size(1), depends_on_batch(self.plan)
        start = self.inputs.positions.query_start
        for top in range(0, tgt_len, self.plan.rows):
            bottom = min(top + self.plan.rows, tgt_len)
            keys = visible_keys(self.inputs, bottom)
            self._of_rows.clear()
            for head in range(0, self.heads, heads):
                some = head, min(head + heads, self.heads)
                share = None
                for first in range(0, self.batch, batch):
                    those = first, min(first + batch, self.batch)
                    tile = Tile(top, bottom, start + top, keys, those, some, self.heads)
                    if share is None or apart:
                        share = make_share(self.plan, self.tables, tile, self._wanted)
                    yield tile, share
                    if apart or those[1] == self.batch:
                        self.finish(share)

    @property
    def _wanted(self) -> list[bool]:
        return self.wanted or [False] * len(self.tables)

    def finish(self, share: Share) -> None:
        """Called when no further tile uses a share."""

    def run(self) -> Tensor:
        """(B, H, T, Dv)."""
        out = self.v.new_empty(self.q.size(0), self.q.size(1), self.v.size(2))
        for tile, share in self.tiles():
            probs = self.probabilities(tile, share)
            if self.seed is not None:
                probs.mul_(self.kept(tile))
            found = probs @ self.v[tile.key]
            for part in self.plan.vectors:
                if part.value is not None:
                    found += self._value_part(tile, part)
            out[tile.query] = found
        self.buffer.give_back()
        return out.unflatten(0, (self.batch, self.heads))

    def queries(self, tile: Tile) -> Tensor:
        """(N, n, D) queries of the content, scaled, tails of the keys' vectors folded in."""
        q = self.q[tile.query]
        if self.fold is not None:
            q = q + tile.of_heads(self.fold)[:, None]
        return q * self.scale

    def queries_of(self, tile: Tile, part: Vectors) -> Tensor:
        """(N, n, D) queries that meet a term's vectors, scaled."""
        q = self.q[tile.query]
        if part.offset is not None:
            q = q + tile.of_heads(self.tables[part.offset])[:, None]
        return q * self.scale

    @cached_property
    def multiplied(self) -> Multiplied:
        """The content where terms multiply it."""
        return Multiplied(self)

    def logits(self, tile: Tile, share: Share) -> Tensor | None:
        """Fill the buffer; returns the content before its gate, where it has one."""
        logits, content = self.buffer.of(tile), None
        if self.plan.split is not None:
            self.multiplied.fill(tile)
        else:
            torch.bmm(self.queries(tile), self.k[tile.key].transpose(1, 2), out=logits)
        if share.gate is not None:
            content = logits.clone() if self.wanted is not None else None
            tile.apart(logits).mul_(share.gate.detach())
        for part, keys in zip(self.plan.vectors, self.key_products, strict=True):
            self._add_vectors(tile, part, keys)
        if share.bias is not None:
            tile.apart(logits).add_(share.bias.detach())
        return content

    def _add_vectors(self, tile: Tile, part: Vectors, keys: KeyProducts | None) -> None:
        if part.band is None:
            self._add_wide(tile, part)
            return
        columns = last = None
        if part.query is not None:
            table = tile.of_heads(self.tables[part.query])
            columns = products(self.queries_of(tile, part), table)
            last = columns[..., -1:].clone()  # the band's mask hides it in most rows
        if keys is not None:
            found = keys.diagonals(tile)
            columns = found.clone() if columns is None else columns.add_(found)
        if columns is not None:
            part.band.add(self.buffer, tile, columns, self.mask(tile, part), last)
        if keys is not None:
            keys.add_right(self.buffer, tile)

    def _add_wide(self, tile: Tile, part: Vectors) -> None:
        """Add the products of queries and of keys with vectors over all distances."""
        logits = self.buffer.of(tile)
        if part.query is not None:
            distances = products(self.queries_of(tile, part), self.wide_table(tile, part.query))
            logits.add_(sheared(distances, tile.keys))
        if part.key is None:
            return
        for keys in chunks(tile):
            vectors = falling(self.wide_table(tile, part.key, keys))
            distances = products(self.k[tile.matrices, keys] * self.scale, vectors)
            logits[:, :, keys] += of_keys(distances, tile.rows)

    def wide_table(self, tile: Tile, place: int, keys: slice | None = None) -> Tensor:
        """(1|N, S + n - 1, D): a table's vectors over the distances of a tile to some keys."""
        table = tile.of_heads(self.tables[place])
        return window(table, tile, self.inputs.positions.lowest_distance, keys)

    def probabilities(self, tile: Tile, share: Share) -> Tensor:
        """(N, n, S) before dropout, in the buffer."""
        self.content = self.logits(tile, share)
        probs = self.buffer.of(tile)
        excluded = self._exclusion(tile)
        excluded.fill(tile.apart(probs))
        torch.softmax(probs, -1, out=probs)
        if share.far:
            torch.threshold_(probs, _least(probs.dtype), 0.0)
        excluded.clear(tile.apart(probs))
        return probs

    def _exclusion(self, tile: Tile) -> Exclusion:
        inputs = self.inputs
        alike = inputs.key_padding is None and inputs.documents is None
        key = tile.start if alike else (tile.start, tile.batch)
        if key not in self._of_rows:
            self._of_rows[key] = exclusion(inputs, tile)
        return self._of_rows[key]

    def mask(self, tile: Tile, part: Vectors) -> Tensor:
        """The mask of a term's band."""
        key = tile.start, part.band
        if key not in self._of_rows:
            self._of_rows[key] = part.band.mask(tile, self.q.device)
        return self._of_rows[key]

    def kept(self, tile: Tile) -> Tensor:
        """(N, n, S): 0 where dropout drops, else 1 / (1 - p); the same in both directions."""
        probability = self.inputs.dropout
        generator = torch.Generator(self.q.device)
        generator.manual_seed(self.seed + (tile.start * self.q.size(0) + tile.matrices.start))
        mask = torch.empty(
            tile.count, tile.rows, tile.keys, dtype=self.q.dtype, device=self.q.device
        )
        return mask.bernoulli_(1 - probability, generator=generator).div_(1 - probability)

    def _value_part(self, tile: Tile, part: Vectors) -> Tensor:
        """What probabilities (in the buffer) give with a term's value vectors: (N, n, Dv)."""
        if part.band is None:
            table = self.wide_table(tile, part.value)
            return _by_columns(unsheared(self.buffer.of(tile)), table)
        band = part.band
        columns = band.take(self.buffer, tile, self.mask(tile, part))
        table = tile.of_heads(self.tables[part.value])
        out = _by_columns(columns, table)
        mass = self.buffer.of(tile).sum(-1, keepdim=True)
        return out.addcmul_(mass, tile.of_heads(self.tables[part.value_left]))


def _least(dtype: torch.dtype) -> float:
    """A probability below which products with it would be denormal, a hundred times slower."""
    limits = torch.finfo(dtype)
    return limits.tiny / limits.eps**2


def _by_columns(columns: Tensor, table: Tensor) -> Tensor:
    """Columns (N, n, W) by vectors (1|N, W, D): (N, n, D)."""
    return products(columns, table.transpose(1, 2))
