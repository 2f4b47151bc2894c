"""Multiply a slice of query rows with tables over distances, and shift the products into place.

This is the relative shift of Transformer-XL (Dai2019): it needs no (T, S) index and no gather.  A
slice of n rows and S keys has the distances low..low + L - 1, L = S + n - 1, where low is minus the
slot of its last query.  A matrix X (n, L), whose column m belongs to distance low + m, becomes logits
(n, S): entry (t, j) is X[t, j - t + n - 1].  On a contiguous X that is a view with strides (L - 1, 1)
which starts at column n - 1, so that nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import distances_of, required
from relpos_fairseq.attention.lowering import Window, table_by_distance
from relpos_fairseq.attention.reference import GatheredProducts
from relpos_fairseq.core.relations import DistanceRelation
from relpos_fairseq.core.terms import PositionTerms

LEAST_KEYS = 64  # keys of a chunk whose products with key vectors are formed at once


class ShiftedProducts(GatheredProducts):
    """Compute products with tables over distances, and shift them to the pairs of query and key (T = n, one slice)."""

    def rows_for(self, table: Tensor, relation: DistanceRelation, low: int, high: int) -> Tensor:
        """Expand a table (H|1, R, ...) over ids to one row for each of the distances low..high: (H|1, W, ...)."""
        return table_by_distance(table, relation, Window(low, high), self.inputs.positions)

    def near_range(self, term: PositionTerms) -> tuple[int, int, int, int]:
        """Return (low, high, before, after): the slice's distances low..high have rows of their own.

        `before` distances of the slice are below `low` and read its row; `after` are above `high` and read that row.
        """
        positions, relation = self.inputs.positions, distances_of(term)
        lowest, highest = positions.lowest_distance, positions.highest_distance
        low, high = max(lowest, relation.lowest), min(highest, relation.highest)
        return low, high, low - lowest, highest - high

    def scalars(self, table: Tensor, term: PositionTerms) -> Tensor:
        """Return a table of scalars (H|1, R), read for every pair: (B|1, H|1, n, S)."""
        positions, relation = self.inputs.positions, required(term.relation)
        if not isinstance(relation, DistanceRelation):
            return super().scalars(table, term)
        low, high = positions.lowest_distance, positions.highest_distance
        vector = self.rows_for(table, relation, low, high)  # (H|1, L)
        return relative_shift(vector[None, :, None].expand(-1, -1, positions.tgt_len, -1))

    def query(self, q: Tensor, term: PositionTerms) -> Tensor:
        """Return q_i.a_r: (B, H, n, S)."""
        low, high, before, after = self.near_range(term)
        vectors = self.rows_for(required(term.query_vectors), distances_of(term), low, high)  # (H|1, W, D)
        products = q @ vectors.transpose(-1, -2)  # (B, H, n, W)
        return relative_shift(repeat_ends(products, before, after))

    def key(self, k: Tensor, term: PositionTerms) -> Tensor:
        """Return k_j.b_r (B, H, n, S), by chunks of about as many keys as the slice has rows.

        If all pairs of a chunk are beyond one end of the relation, they read one vector.
        """
        positions, relation, table = self.inputs.positions, distances_of(term), required(term.key_vectors)
        rows, start, columns = positions.tgt_len, 0, []
        for keys in k.split(max(rows, LEAST_KEYS), dim=2):  # (B, H, c, D)
            lowest = start - (positions.query_stop - 1)
            start += keys.size(2)
            highest = start - 1 - positions.query_start
            low, high = max(lowest, relation.lowest), min(highest, relation.highest)
            if low >= high:
                end = min(low, relation.highest)
                vector = self.rows_for(table, relation, end, end)  # (H|1, 1, D)
                column = (vector @ keys.transpose(-1, -2)).expand(-1, -1, rows, -1)
            else:
                # Rows are keys here, and along a row distances fall.
                vectors = self.rows_for(table, relation, low, high).flip(1)  # (H|1, W, D)
                products = repeat_ends(keys @ vectors.transpose(-1, -2), highest - high, low - lowest)
                column = relative_shift(products).transpose(-1, -2)
            columns.append(column)  # (B, H, n, c)
        return torch.cat(columns, dim=-1)

    def trilinear(self, q: Tensor, k: Tensor, term: PositionTerms) -> Tensor:
        """Return sum_c q_ic k_jc w_rc (B, H, n, S); beyond an end of the relation, w_r is multiplied into q."""
        positions, (low, high, before, after) = self.inputs.positions, self.near_range(term)
        weights = self.rows_for(required(term.trilinear), distances_of(term), low, high)  # (H|1, W, D)
        band = trilinear_band(q, k, weights, positions.query_stop - 1 + low)  # (B, H, n, W)
        result = relative_shift(repeat_ends(band, before, after))
        distance = positions.distance()  # (n, S)
        if before:
            folded = q * weights[:, :1]  # (B, H, n, D)
            result = torch.where(distance < low, folded @ k.transpose(-1, -2), result)
        if after:
            folded = q * weights[:, -1:]
            result = torch.where(distance > high, folded @ k.transpose(-1, -2), result)
        return result

    def values(self, probs: Tensor, term: PositionTerms) -> Tensor:
        """Return value vectors weighted by probabilities (B, H, n, S): (B, H, n, Dv)."""
        low, high, before, after = self.near_range(term)
        vectors = self.rows_for(required(term.value_vectors), distances_of(term), low, high)  # (H|1, W, Dv)
        wide = undo_relative_shift(probs)  # (B, H, n, before + W + after)
        stop = wide.size(-1) - after
        result = wide[..., before:stop] @ vectors
        if before:
            result = result + wide[..., :before].sum(-1, keepdim=True) * vectors[:, :1]
        if after:
            result = result + wide[..., stop:].sum(-1, keepdim=True) * vectors[:, -1:]
        return result


def repeat_ends(x: Tensor, before: int, after: int) -> Tensor:
    """Pad (..., W) with `before` more copies of its first column and `after` more copies of its last."""
    parts = (x[..., :1].expand(*x.shape[:-1], before), x, x[..., -1:].expand(*x.shape[:-1], after))
    return torch.cat(parts, dim=-1) if before or after else x


def trilinear_band(q: Tensor, k: Tensor, w: Tensor, first: int) -> Tensor:
    """Return X[t, m] = sum_c q_tc k_jc w_mc for j = t + m - (n - 1) + first; 0 without key j.

    Args:
        q: (B, H, n, D).
        k: (B, H, S, D).
        w: (H|1, W, D).
        first: slot of the key in row 0 and column n - 1.

    Returns:
        (B, H, n, W).
    """
    start, count = first - q.size(2) + 1, q.size(2) + w.size(1) - 1  # the keys in the band
    there = k[:, :, max(start, 0) : max(start + count, 0)]
    before = min(max(-start, 0), count)
    padding = (0, 0, before, count - before - there.size(2))
    return _TrilinearBand.apply(q, torch.nn.functional.pad(there, padding), w)


class _TrilinearBand(torch.autograd.Function):
    """Compute `trilinear_band` for padded keys (B, H, n + W - 1, D), one distance at a time, to save memory."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, w)
        rows, width = q.size(2), w.size(1)
        columns = [(q * k[:, :, m : m + rows]) @ w[:, m, :, None] for m in range(width)]
        return torch.cat(columns, dim=-1)  # of (B, H, n, 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, w = ctx.saved_tensors
        dq, dk, dw = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(w)
        for m in range(w.size(1)):
            g, keys = grad[..., m, None], k[:, :, m : m + q.size(2)]  # (B, H, n, 1), (B, H, n, D)
            of_w = (g.transpose(-1, -2) @ (q * keys)).sum(0)[:, 0]  # (H, D)
            dw[:, m] = of_w if w.size(0) > 1 else of_w.sum(0)
            product = g * w[:, m, None]
            dq.addcmul_(product, keys)
            dk[:, :, m : m + q.size(2)].addcmul_(product, q)
        return dq, dk, dw


def relative_shift(wide: Tensor) -> Tensor:
    """Shift rows over distances (..., n, S + n - 1) to rows over keys (..., n, S): Y[t, j] = X[t, j - t + n - 1]."""
    return wide if wide.size(-2) == 1 else _RelativeShift.apply(wide)


def undo_relative_shift(narrow: Tensor) -> Tensor:
    """Shift rows over keys (..., n, S) to rows over distances (..., n, S + n - 1), with 0 where there is no key."""
    return narrow if narrow.size(-2) == 1 else _UndoRelativeShift.apply(narrow)


class _RelativeShift(torch.autograd.Function):
    """Apply `relative_shift` as a view; its gradient is `undo_relative_shift`."""

    @staticmethod
    def forward(ctx, wide: Tensor) -> Tensor:
        rows = wide.size(-2)
        return _shifted_view(wide.contiguous(), rows, wide.size(-1) - rows + 1)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return _UndoRelativeShift.apply(grad)


class _UndoRelativeShift(torch.autograd.Function):
    """Apply `undo_relative_shift` by a copy into zeros; its gradient is `relative_shift`."""

    @staticmethod
    def forward(ctx, narrow: Tensor) -> Tensor:
        rows, width = narrow.shape[-2:]
        wide = narrow.new_zeros(*narrow.shape[:-1], width + rows - 1)
        _shifted_view(wide, rows, width).copy_(narrow)
        return wide

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return _RelativeShift.apply(grad)


def _shifted_view(wide: Tensor, rows: int, width: int) -> Tensor:
    """Return the relative shift of a contiguous (..., rows, width + rows - 1) as a view (..., rows, width)."""
    span = width + rows - 1
    return wide.as_strided(
        (*wide.shape[:-2], rows, width), (*wide.stride()[:-2], max(span - 1, 1), 1), wide.storage_offset() + rows - 1
    )
