"""What a step of decoding by the kernel needs of its tables alone: formed once for many steps."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.attention.native.checks import check_device
from relpos_fairseq.attention.step_tables import StepTables

WORDS = 33  # of step.h's StepTables
PANEL = 32  # of rows.h: columns of a transposed table that stand side by side
ABSENT = (0, 0)
Words = ctypes.c_int64 * WORDS


class PlacedFactors(NamedTuple):
    """Where tables (H|1, positions, rank) of queries and of keys lie."""

    positions: int
    rank: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    size: int

    def at(self, length: int) -> tuple[int, ...]:
        """Return the two tensors of a step of `length` keys: addresses, and strides of rows, heads and keys.

        Raises:
            ValueError: there are fewer positions.
        """
        if length > self.positions:
            raise ValueError(f"position_factors have {self.positions} positions, and there are {length} keys")
        address, head = self.queries
        return address + (length - 1) * self.rank * self.size, 0, head, 0, self.keys[0], 0, self.keys[1], self.rank


class StepPlan:
    """step.h's StepTables, filled in word by word, with what has the numbers.

    Args:
        tables: of the step's terms.
        heads: number of heads H.
        dim: channels of queries and keys as tables meet them.
        content_dim: as the content's product meets them.
        value_dim: of values.
        rotated: whether those two differ.

    Attributes:
        address: of the words.
        product: the one term whose products the kernel forms, or None; several are formed by torch.
        factors: where the one pair of factors by position lies, or None; likewise.
    """

    def __init__(
        self, tables: StepTables, heads: int, dim: int, content_dim: int, value_dim: int, rotated: bool
    ) -> None:
        self._heads, self._exact, self._kept = heads, tables.exact, []
        self.product = tables.products[0] if len(tables.products) == 1 else None
        self.factors = self._place_factors(*tables.factors[0]) if len(tables.factors) == 1 else None
        near = (tables.query, tables.key, tables.trilinear, tables.value)
        query = None if tables.query is None else tables.query.transpose(1, 2)
        products = (None, None)
        if self.product is not None:
            products = (self.product.product_query, self.product.product_key)
        folds, place = tables.folds(rotated), self._place
        offset = None if tables.offset is None else tables.offset[0]
        self._words = Words(
            dim,
            content_dim,
            value_dim,
            *(0 if table is None else table.size(1) for table in (*near, products[1])),
            tables.length,
            *place(self._factor(tables, content_dim), 1, content_dim),
            *place(offset if folds else None, 1, content_dim),
            *place(None if folds else offset, 1, dim),
            *place(tables.value_tail, 1, value_dim),
            *self._place_panels(query, dim),
            *self._place_panels(products[0], dim),
            *place(tables.key, None, dim),
            *place(tables.trilinear, None, content_dim),
            *place(tables.value, None, value_dim),
            *place(products[1], None, dim),
            *place(tables.gate, tables.length),
            *place(tables.static, tables.length),
        )
        self.address = ctypes.addressof(self._words)

    def _factor(self, tables: StepTables, content_dim: int) -> Tensor:
        """What multiplies the content's query, channel by channel."""
        if tables.factor is not None:
            return tables.factor[0]
        return torch.full((1, 1, content_dim), tables.scale, dtype=tables.exact)

    def _place_factors(self, queries: Tensor, keys: Tensor) -> PlacedFactors:
        _, positions, rank = keys.shape
        places = (self._place(table, positions, rank) for table in (queries, keys))
        return PlacedFactors(positions, rank, *places, self._exact.itemsize)

    def _place_panels(self, table: Tensor | None, dim: int) -> tuple[int, int]:
        """Return where (H|1, D, rows) lies as (H|1, ceil(rows / PANEL), D, PANEL), and the stride of heads."""
        if table is None:
            return ABSENT
        padded = F.pad(table, (0, -table.size(2) % PANEL))
        panels = padded.unflatten(2, (-1, PANEL)).transpose(1, 2)
        return self._place(panels, None, dim, PANEL)

    def _place(self, table: Tensor | None, rows: int | None, *dim: int) -> tuple[int, int]:
        """Return where (H|1, rows[, dim]) lies, and the stride of heads; None: any number of rows.

        Raises:
            ValueError: it lies on another device, or is of another shape.
        """
        if table is None:
            return ABSENT
        check_device((("a table of positions", table),))
        rows = table.size(1) if rows is None else rows
        shapes = [(heads, rows, *dim) for heads in (1, self._heads)]
        if tuple(table.shape) not in shapes:
            raise ValueError(
                f"a step of decoding with {self._heads} heads: a table of positions must be "
                f"{shapes[1]}, or {shapes[0]} for all heads, got {tuple(table.shape)}"
            )
        table = table.to(self._exact).contiguous()
        self._kept.append(table)
        return table.data_ptr(), 0 if table.size(0) == 1 else table.stride(0)
