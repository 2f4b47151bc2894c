"""Logits, probabilities and output of each tile."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from relpos_fairseq.attention.tiles.geometry import Buffer, Tile, scratch
from relpos_fairseq.attention.tiles.masks import Masks, visible_keys
from relpos_fairseq.attention.tiles.multiplied import Multiplied
from relpos_fairseq.attention.tiles.plan import Plan, Sheet
from relpos_fairseq.attention.tiles.sheets import Matrix
from relpos_fairseq.attention.tiles.vectors import BandVectors
from relpos_fairseq.attention.tiles.wide import WideVectors

ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 25}  # of a tile's logits
LEAST_MATRICES = 2  # of a tile: threads share them
FAR = 40.0  # logits; exp(-40) is 4e-18


class Forward:
    """One pass over all tiles.

    Args:
        plan: the call.
        seed: of dropout, or None without it.
        q: (B, H, T, D) in the exact type.
        k: (B, H, S, D).
        v: (B, H, S, Dv).
        tables: the plan's tables.
        totals: gradients of the tables, None where unwanted; None: no backward pass.
    """

    wanted: list[bool] | None = None

    def __init__(
        self, plan: Plan, seed: int | None, q: Tensor, k: Tensor, v: Tensor, tables: list[Tensor],
        totals: list[Tensor | None] | None = None,
    ) -> None:  # fmt: skip
        """Flatten heads, and meet queries and keys with their vectors."""
        self.plan, self.inputs, self.seed, self.tables = plan, plan.inputs, seed, tables
        self.scale, self.totals = plan.inputs.scale, totals
        self.batch, self.heads = q.shape[:2]
        self.q, self.k, self.v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        self.content_q = self.q
        if plan.folds:
            fold = sum(tables[place] for place in plan.folds)[:, None]
            self.content_q = torch.add(q, fold, out=scratch(q, "content", *q.shape)).flatten(0, 1)
        self.everything = Tile(0, 0, 0, 0, (0, self.batch), (0, self.heads), self.heads)
        self.buffer = Buffer(self._largest(), plan.guard, self.q, "probabilities")
        self.masks = Masks(plan.inputs, plan.masked, plan.falling)
        self.sheets = [self._matrix(sheet, f"sheet {n}") for n, sheet in enumerate(plan.sheets)]
        self.gate = None if plan.gate is None else self._matrix(plan.gate, "gate")
        self.far = self._far()
        self.vectors = [
            (WideVectors if part.band is None else BandVectors)(self, part, number)
            for number, part in enumerate(plan.vectors)
        ]

    def _matrix(self, sheet: Sheet, name: str) -> Matrix:
        return Matrix(sheet, self, name)

    def _chunks(self) -> tuple[int, int]:
        """Heads and rows of the batch in a tile: its logits stay near the cache."""
        budget = ELEMENTS.get(self.q.device.type, ELEMENTS["cuda"]) << self.plan.larger
        matrices = max(budget // (self.plan.rows * self.k.size(1)), LEAST_MATRICES)
        if matrices < self.heads:
            return matrices, 1
        return self.heads, min(matrices // self.heads, self.batch)

    def _largest(self) -> int:
        heads, batch = self._chunks()
        return heads * batch * self.plan.rows * self.k.size(1)

    def _far(self) -> list[bool]:
        """Whether sheets alone make probabilities of a head that are nearly 0."""
        spans = [0.0] * self.heads
        for sheet in self.plan.sheets:
            found = torch.zeros(())
            if sheet.vector is not None:
                vector = self.tables[sheet.vector]
                seen = vector > self.masks.least / 2
                found = vector.amax(1) - vector.where(seen, vector.amax(1, keepdim=True)).amin(1)
            if sheet.factors is not None:
                longest = (self.tables[place].norm(dim=-1).amax(1) for place in sheet.factors)
                found = found + 2 * next(longest) * next(longest)
            found = found.expand(self.heads).tolist()
            spans = [old + new for old, new in zip(spans, found, strict=True)]
        return [span > FAR for span in spans]

    def tiles(self) -> Iterator[Tile]:
        """Every tile; those that share a sheet follow each other."""
        heads, batch = self._chunks()
        start, rows = self.inputs.positions.query_start, self.q.size(1)
        for top in range(0, rows, self.plan.rows):
            bottom = min(top + self.plan.rows, rows)
            keys = visible_keys(self.inputs, bottom)
            for head in range(0, self.heads, heads):
                some = head, min(head + heads, self.heads)
                for first in range(0, self.batch, batch):
                    those = first, min(first + batch, self.batch)
                    yield Tile(top, bottom, start + top, keys, those, some, self.heads)

    def run(self) -> Tensor:
        """(B, H, T, Dv)."""
        out = self.v.new_empty(*self.q.shape[:2], self.v.size(2))
        for tile in self.tiles():
            probs = self.probabilities(tile)
            if self.seed is not None:
                probs.mul_(self.kept(tile))
            place = out[tile.query]
            if place.is_contiguous() and not self.plan.falling:
                torch.bmm(probs, self.v[tile.key], out=place)
            else:
                place.copy_(self.turned(torch.bmm(probs, self.v[tile.key])))
            for part in self.vectors:
                part.take_values(tile, place)
        for part in self.vectors:
            part.finish_values(out)
        self.buffer.give_back()
        return out.unflatten(0, (self.batch, self.heads))

    def turned(self, rows: Tensor) -> Tensor:
        """Rows (N, n, ...) of the call in the order of a tile, or back."""
        return rows.flip(1) if self.plan.falling else rows

    def probabilities(self, tile: Tile) -> Tensor:
        """(N, n, S) before dropout, in the buffer."""
        self.content(tile)
        logits = self.buffer.of(tile)
        for part in self.vectors:
            part.add(tile)
        apart = tile.apart(logits)
        for sheet in self.sheets:
            apart += sheet.of(tile)
        if self.plan.factors is not None:
            query, key = (self.tables[place] for place in self.plan.factors)
            logits.baddbmm_(self.turned(query[tile.query]), key[tile.key].transpose(1, 2))
        dead = self.masks.add(apart, tile)
        torch.softmax(logits, -1, out=logits)
        if any(self.far[slice(*tile.heads)]):
            torch.threshold_(logits, _least(logits.dtype), 0.0)
        if dead is not None:
            apart.masked_fill_(dead, 0.0)
        return logits

    def content(self, tile: Tile) -> None:
        """Fill the buffer with what positions are added to."""
        logits = self.buffer.of(tile)
        if self.plan.split is not None:
            self.multiplied.fill(tile)
            return
        ungated = logits if self.gate is None else self.ungated(tile)
        q, k = self.turned(self.content_q[tile.query]), self.k[tile.key].transpose(1, 2)
        torch.baddbmm(ungated, q, k, beta=0, alpha=self.scale, out=ungated)
        if self.gate is not None:
            torch.mul(tile.apart(ungated), self.gate.of(tile), out=tile.apart(logits))

    def ungated(self, tile: Tile) -> Tensor:
        """(N, n, S) storage of the content before its gate: the backward pass needs it."""
        if self.totals is None:
            return self.buffer.of(tile)
        return scratch(self.q, "ungated", tile.count, tile.rows, tile.keys)

    @cached_property
    def multiplied(self) -> Multiplied:
        """The content where terms multiply it by more than a gate."""
        return Multiplied(self)

    def kept(self, tile: Tile) -> Tensor:
        """(N, n, S): 0 where dropout drops, else 1 / (1 - p); the same in both directions."""
        probability = self.inputs.dropout
        generator = torch.Generator(self.q.device)
        generator.manual_seed(self.seed + (tile.start * self.q.size(0) + tile.matrices.start))
        mask = scratch(self.q, "kept", tile.count, tile.rows, tile.keys)
        return mask.bernoulli_(1 - probability, generator=generator).div_(1 - probability)


def _least(dtype: torch.dtype) -> float:
    """A probability below which products with it would be denormal, a hundred times slower."""
    limits = torch.finfo(dtype)
    return limits.tiny / limits.eps**2
