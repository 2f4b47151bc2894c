"""Evaluate one step of decoding by the kernel in C, with the arguments that step.h declares.

The kernel evaluates steps without gradients, dropout or conversion of types; `attention.step` evaluates
all others, in torch.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.native import build
from relpos_fairseq.attention.native.call import TableArg, TensorArg, check_device
from relpos_fairseq.attention.step import (
    StepTables,
    added_of,
    factors_of,
    form_clipped_key_products,
    given_factors,
    product_of_factors,
    products_of,
    tables_for,
)
from relpos_fairseq.core.positions import is_captured

PANEL = 32  # of step.h: columns of a transposed table that stand side by side
WORK_OF_A_THREAD = 1 << 17  # multiplications that are worth a thread
_integer, _pointer = ctypes.c_int64, ctypes.c_void_p


class StepTablesArg(ctypes.Structure):
    """step.h's struct StepTables, field by field; the field that is `static_` in C is `static` here."""

    _fields_ = [
        *((name, _integer) for name in ("dim", "content_dim", "value_dim")),
        *((f"{name}_rows", _integer) for name in ("near_query", "near_key", "near_trilinear", "near_value", "product")),
        ("length", _integer),
        *((name, TableArg) for name in ("query_scale", "query_offset", "key_offset", "clipped_value")),
        *((name, TableArg) for name in ("near_query", "product_query")),
        *((name, TableArg) for name in ("near_key", "near_trilinear", "near_value", "product_key")),
        *((name, TableArg) for name in ("gate", "static")),
    ]


class StepCall(ctypes.Structure):
    """step.h's struct StepCall, field by field."""

    _fields_ = [
        ("tables", _pointer),
        *((name, _integer) for name in ("batch", "heads", "src_len", "rank", "threads")),
        *((name, TensorArg) for name in ("q", "k", "v", "content_q", "content_k")),
        *((name, TensorArg) for name in ("clipped_key_products", "multiplier", "added")),
        *((name, TensorArg) for name in ("query_factors", "key_factors")),
        *((name, _pointer) for name in ("out", "masked")),
        ("masked_stride", _integer),
        ("key_rows", _pointer),
        *((name, _integer) for name in ("key_rows_stride", "key_rows_step")),
    ]


def serves(inputs: AttentionInputs) -> bool:
    """Return whether the kernel can evaluate a step for which `attention.step.supports_step` is True."""
    if torch.is_grad_enabled() or inputs.dropout or is_captured():
        return False
    q, k, v, exact = inputs.q, inputs.k, inputs.v, inputs.exact
    content_k = k if inputs.content_k is None else inputs.content_k
    return (
        q.dtype == k.dtype == v.dtype == exact
        and q.is_cpu
        and k.is_cpu
        and v.is_cpu
        and k.stride(-1) == v.stride(-1) == content_k.stride(-1) == 1
        and build.problem(exact) is None
    )


def reads_key_rows(inputs: AttentionInputs) -> bool:
    """Return whether the kernel alone reads the keys of a step, so that they may lie in other rows."""
    decays = any(term.decay is not None for term in inputs.terms)
    return not decays and len(tables_for(inputs).products) <= 1


def attend_token(inputs: AttentionInputs) -> Tensor:
    """Return the output (B, H, 1, Dv) of attention, for inputs for which `serves` is True."""
    call, _kept = arguments(inputs)
    out = inputs.v.new_empty(call.batch, call.heads, 1, inputs.v.size(-1))
    call.out = out.data_ptr()
    if call.batch and build.entry(inputs.exact, "relpos_step", StepCall, StepTablesArg)(call):
        raise MemoryError(f"a step of decoding has no memory for the logits of {call.src_len} keys")
    return out


def arguments(inputs: AttentionInputs) -> tuple[StepCall, list[Any]]:
    """Return the kernel's arguments, but for the output, and what must outlive its call."""
    if inputs.key_rows is not None and not reads_key_rows(inputs):
        inputs = inputs.gathered()
    tables, q, k, v, exact = tables_for(inputs), inputs.q, inputs.k, inputs.v, inputs.exact
    (stored, heads, src_len, dim), value_dim, batch = k.shape, v.size(-1), q.size(0)
    rotated = inputs.rotated
    content_dim = inputs.content_k.size(-1) if rotated else dim
    kind = ("native", heads, dim, content_dim, value_dim, rotated)
    plan = tables.once(kind, lambda: StepPlan(tables, *kind[1:]))
    placed: list[Any] = [tables]  # the kernel has only addresses

    def place(x: Tensor, rows: int, width: int, batch: int = batch) -> tuple[int, int, int, int]:
        """Return the fields of a `TensorArg` for a tensor that broadcasts to (B, H, rows, width)."""
        if x.dtype != exact or not x.is_cpu:
            check_device((("a table of positions", x),))
            x = x.to(exact)
        if x.shape != (batch, heads, rows, width):
            x = x.expand(batch, heads, rows, width)
        if x.stride(-1) != 1:
            x = x.contiguous()
        placed.append(x)
        return x.data_ptr(), *x.stride()[:3]

    call = StepCall(tables=plan.address, batch=batch, heads=heads, src_len=src_len)
    call.threads = build.threads_for(batch * heads * src_len * (dim + value_dim), WORK_OF_A_THREAD)
    call.q = call.content_q = place(q, 1, dim)
    call.k = call.content_k = place(k, src_len, dim, stored)
    call.v = place(v, src_len, value_dim, stored)
    if inputs.key_rows is not None:
        placed.append(inputs.key_rows)
        call.key_rows, (call.key_rows_stride, step) = inputs.key_rows.data_ptr(), inputs.key_rows.stride()
        call.key_rows_step = step if inputs.key_rows.size(1) > 1 else 0
    if rotated:
        call.content_q = place(inputs.content_q, 1, content_dim)
        call.content_k = place(inputs.content_k, src_len, content_dim, stored)
    if plan.product is not None:
        clipped = inputs.clipped_key_products
        if clipped is None:
            clipped = form_clipped_key_products((plan.product.term,), inputs.k)
        call.clipped_key_products = place(clipped.mT, 1, src_len, stored)
    elif tables.products:
        call.multiplier = place(products_of(inputs, tables)[:, :, None], 1, src_len)
    if plan.factors is not None:
        call.rank = plan.factors.rank
        call.query_factors, call.key_factors = plan.factors.at(src_len)
        pairs = given_factors(inputs)
    else:
        pairs = factors_of(inputs, tables)
        if len(pairs) == 1:
            ((of_query, of_keys),), pairs = pairs, []
            call.rank = rank = of_keys.size(-1)
            call.query_factors, call.key_factors = place(of_query, 1, rank), place(of_keys, src_len, rank)
    added = [*added_of(inputs), *map(product_of_factors, pairs)]
    if added:
        call.added = place(sum(added[1:], added[0])[:, :, None], 1, src_len)
    # The query stands on the last key, so that a causal mask hides nothing.
    is_masked = not (inputs.key_padding is inputs.window is inputs.documents is None)
    excluded = inputs.excluded() if is_masked else None  # (B|1, 1, 1, S)
    if excluded is not None:
        placed.append(excluded.contiguous())
        call.masked = placed[-1].data_ptr()
        call.masked_stride = excluded.size(-1) if excluded.size(0) > 1 else 0
    return call, placed


class FactorTables(NamedTuple):
    """Addresses of two tables of factors by position, (H|1, positions, rank): of queries and of keys.

    Args:
        positions: how many rows they have.
        rank: how many channels.
        queries: address and stride of heads.
        keys: the same of keys.
        element_size: bytes of an element.
    """

    positions: int
    rank: int
    queries: tuple[int, int]
    keys: tuple[int, int]
    element_size: int

    def at(self, length: int) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        """Return the `TensorArg` fields of the factors of a step of `length` keys: of the query, and of the keys.

        Raises:
            ValueError: there are fewer positions.
        """
        if length > self.positions:
            raise ValueError(f"position_factors have {self.positions} positions, and there are {length} keys")
        address, head_stride = self.queries
        query = address + (length - 1) * self.rank * self.element_size, 0, head_stride, 0
        return query, (self.keys[0], 0, self.keys[1], self.rank)


class StepPlan:
    """The arguments of the kernel that depend only on the step's tables, computed once for many steps.

    Args:
        tables: of the step's terms.
        heads: number of heads H.
        dim: channels of the queries and keys that tables are multiplied with.
        content_dim: channels of the content's queries and keys.
        value_dim: channels of values.
        rotated: whether the content has queries and keys of its own.

    Attributes:
        address: of a `StepTablesArg`.
        product: the one product term, whose products the kernel forms, or None; several are formed by torch.
        factors: the one pair of factors by position, which the kernel reads, or None; likewise.
    """

    def __init__(
        self, tables: StepTables, heads: int, dim: int, content_dim: int, value_dim: int, rotated: bool
    ) -> None:
        self._heads, self._exact, self._kept = heads, tables.exact, []
        self.product = tables.products[0] if len(tables.products) == 1 else None
        self.factors = self._place_factors(*tables.factors[0]) if len(tables.factors) == 1 else None
        place, folds = self._place, tables.folds_offset(rotated)
        offset = None if tables.offset is None else tables.offset[0]  # (H|1, 1, D)
        query_scale = tables.query_scale[0] if tables.query_scale is not None else None
        if query_scale is None:
            query_scale = torch.full((1, 1, content_dim), tables.scale, dtype=tables.exact)
        product_query = product_key = None
        if self.product is not None:
            product_query, product_key = self.product.product_query, self.product.product_key
        near = {
            "near_query": tables.near_query,
            "near_key": tables.near_key,
            "near_trilinear": tables.near_trilinear,
            "near_value": tables.near_value,
            "product": product_key,
        }
        self._tables = StepTablesArg(
            dim=dim,
            content_dim=content_dim,
            value_dim=value_dim,
            **{f"{name}_rows": 0 if table is None else table.size(1) for name, table in near.items()},
            length=tables.length,
            query_scale=place(query_scale, 1, content_dim),
            query_offset=place(offset if folds else None, 1, content_dim),
            key_offset=place(None if folds else offset, 1, dim),
            clipped_value=place(tables.clipped_value, 1, value_dim),
            near_query=self._place_panels(None if tables.near_query is None else tables.near_query.mT, dim),
            product_query=self._place_panels(product_query, dim),
            near_key=place(tables.near_key, None, dim),
            near_trilinear=place(tables.near_trilinear, None, content_dim),
            near_value=place(tables.near_value, None, value_dim),
            product_key=place(product_key, None, dim),
            gate=place(tables.gate, tables.length),
            static=place(tables.static, tables.length),
        )
        self.address = ctypes.addressof(self._tables)

    def _place_factors(self, queries: Tensor, keys: Tensor) -> FactorTables:
        _, positions, rank = keys.shape
        rows, columns = (self._place(table, positions, rank) for table in (queries, keys))
        return FactorTables(positions, rank, rows, columns, self._exact.itemsize)

    def _place_panels(self, table: Tensor | None, dim: int) -> tuple[int, int]:
        """Return the fields of a `TableArg` for (H|1, D, rows) laid out as (H|1, ceil(rows / PANEL), D, PANEL)."""
        if table is None:
            return 0, 0
        padded = F.pad(table, (0, -table.size(2) % PANEL))
        panels = padded.unflatten(2, (-1, PANEL)).transpose(1, 2)
        return self._place(panels, None, dim, PANEL)

    def _place(self, table: Tensor | None, rows: int | None, *dim: int) -> tuple[int, int]:
        """Return the fields of a `TableArg` for (H|1, rows[, dim]); `rows` None: any number of them.

        Raises:
            ValueError: the table lies on another device, or is of another shape.
        """
        if table is None:
            return 0, 0
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
