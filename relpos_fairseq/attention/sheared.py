"""Tables as vectors over the distances that a block of rows meets, sheared into place."""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.attention.formula import Products
from relpos_fairseq.attention.toeplitz import shear, spread, trilinear_band
from relpos_fairseq.relations import DistanceRelation
from relpos_fairseq.terms import PositionTerms


class Sheared(Products):
    """The formula's four ways of meeting a table, without an index over pairs of tokens."""

    def rows_for(self, table: Tensor, relation: DistanceRelation, low: int, high: int) -> Tensor:
        """(H|1, R, ...) as rows for the distances low..high."""
        window = relation.window(low, high, self.inputs.positions.device)
        return table.to(self.inputs.exact).index_select(1, window)

    def over_distances(self, table: Tensor, term: PositionTerms) -> Tensor:
        """(H|1, R, ...) as rows for all distances that the block meets: (H|1, L, ...)."""
        positions = self.inputs.positions
        low, high = positions.lowest_distance, positions.highest_distance
        return self.rows_for(table, term.relation, low, high)

    def scalars(self, table: Tensor, term: PositionTerms) -> Tensor:
        """A Toeplitz matrix; other relations are few scalars, read by ids."""
        if not isinstance(term.relation, DistanceRelation):
            ids = term.relation.ids(self.inputs.positions)  # (B, n, S)
            return table.to(self.inputs.exact)[:, ids].transpose(0, 1)
        vector = self.over_distances(table, term)  # (H|1, L)
        return spread(vector, self.inputs.positions.tgt_len)[None]

    def query(self, q: Tensor, term: PositionTerms) -> Tensor:
        """q_i.a_r: (B, H, n, S)."""
        vectors = self.over_distances(term.query_vectors, term)  # (H|1, L, D)
        return shear(q @ vectors.transpose(-1, -2))

    def key(self, k: Tensor, term: PositionTerms) -> Tensor:
        """k_j.b_r: (B, H, n, S), over chunks of keys about as long as the block has rows.

        A chunk whose distances all lie beyond an end of the relation reads one vector.
        """
        positions, relation = self.inputs.positions, term.relation
        rows, chunk = positions.tgt_len, max(positions.tgt_len, 64)
        columns = []
        for start in range(0, k.size(2), chunk):
            keys = k[:, :, start : start + chunk]
            low = start - (positions.query_stop - 1)
            high = start + keys.size(2) - 1 - positions.query_start
            if high <= relation.lowest or low >= relation.highest:
                vector = self.rows_for(term.key_vectors, relation, low, low)  # (H|1, 1, D)
                column = vector @ keys.transpose(-1, -2)  # (B, H, 1, chunk)
                columns.append(column.expand(-1, -1, rows, -1))
            else:
                # Rows are keys here, so columns run over falling distances before the shear.
                vectors = self.rows_for(term.key_vectors, relation, low, high).flip(1)
                columns.append(shear(keys @ vectors.transpose(-1, -2)).transpose(-1, -2))
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)

    def content(self, q: Tensor, k: Tensor) -> Tensor:
        """q.k, or the trilinear term that replaces it: (B, H, n, S)."""
        for term in self.inputs.terms:
            if term.trilinear is not None:
                return self._trilinear(q, k, term)
        return q @ k.transpose(-1, -2)

    def _trilinear(self, q: Tensor, k: Tensor, term: PositionTerms) -> Tensor:
        """Sum_c q_ic k_jc w_rc as a band and two tails, whose constant vector folds into q."""
        positions, relation, table = self.inputs.positions, term.relation, term.trilinear
        lowest, highest = positions.lowest_distance, positions.highest_distance
        low, high = max(lowest, relation.lowest), min(highest, relation.highest)
        result = None
        if low <= high:
            weights = self.rows_for(table, relation, low, high)
            first = positions.query_start + low + positions.tgt_len - 1
            band = trilinear_band(q, k, weights, first)  # (B, H, n, high - low + 1)
            padding = (low - lowest, highest - high)
            result = shear(torch.nn.functional.pad(band, padding))
        for beyond, inside in ((lowest, low), (highest, high)):
            if beyond == inside and result is not None:
                continue
            folded = q * self.rows_for(table, relation, beyond, beyond)
            constant = folded @ k.transpose(-1, -2)
            if result is None:
                return constant
            distance = positions.distance()
            outside = distance < low if beyond == lowest else distance > high
            result = torch.where(outside, constant, result)
        return result
