"""Evaluate one step of decoding by the kernel in C: its arguments as step.h declares them."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.native import build
from relpos_fairseq.attention.native.call import check_device, kernel
from relpos_fairseq.attention.step import (
    added_of,
    factors_of,
    form_clipped_key_products,
    given_factors,
    product_of_factors,
    products_of,
    tables_for,
)
from relpos_fairseq.attention.step_tables import StepTables
from relpos_fairseq.positions import is_captured

# ---- What a step of decoding by the kernel needs of its tables alone: formed once for many steps.


PLAN_WORDS = 33  # of step.h's StepTables
PANEL = 32  # of rows.h: columns of a transposed table that stand side by side
ABSENT = (0, 0)
PlanWords = ctypes.c_int64 * PLAN_WORDS


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
        self._words = PlanWords(
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


# ---- A step of decoding by the kernel: step.h's call, filled in word by word.
# Without gradients, dropout and conversions; what else a step may be, `attention.step` evaluates.


WORDS = 49
WORK = 1 << 17  # products and sums that are worth a thread
_ABSENT = (0, 0, 0, 0)
_Words = ctypes.c_int64 * WORDS


def serves(inputs: AttentionInputs) -> bool:
    """Whether the kernel evaluates the inputs, which are a step that `attention.step` serves."""
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


def attend(inputs: AttentionInputs) -> Tensor:
    """Output (B, H, 1, Dv) of inputs that `serves` accepts."""
    tables, q, k, v, exact = tables_for(inputs), inputs.q, inputs.k, inputs.v, inputs.exact
    (batch, heads, src, dim), value_dim = k.shape, v.size(-1)
    rotated = inputs.rotated
    wide = inputs.content_k.size(-1) if rotated else dim
    kind = ("native", heads, dim, wide, value_dim, rotated)
    plan = tables.once(kind, lambda: StepPlan(tables, *kind[1:]))
    given: list[Tensor] = []  # what has the numbers must outlive the call

    def place(x: Tensor, rows: int, width: int) -> tuple[int, ...]:
        if x.dtype != exact or not x.is_cpu:
            check_device((("a table of positions", x),))
            x = x.to(exact)
        if x.shape != (batch, heads, rows, width):
            x = x.expand(batch, heads, rows, width)
        if x.stride(-1) != 1:
            x = x.contiguous()
        given.append(x)
        return x.data_ptr(), *x.stride()[:3]

    def by_key(x: Tensor | None) -> tuple[int, ...]:
        return _ABSENT if x is None else place(x[:, :, None], 1, src)

    queries = content_q = place(q, 1, dim)
    keys = content_k = place(k, src, dim)
    if rotated:
        content_q = place(inputs.content_q, 1, wide)
        content_k = place(inputs.content_k, src, wide)
    tails, factor = _multiplied(inputs, tables, plan)
    added, rank, factors = added_of(inputs), 0, 2 * _ABSENT
    if plan.factors is not None:
        rank, factors = plan.factors.rank, plan.factors.at(src)
        pairs = given_factors(inputs)
    else:
        pairs = factors_of(inputs, tables)
        if len(pairs) == 1:
            ((of_query, of_keys),) = pairs
            rank, pairs = of_keys.size(-1), []
            factors = *place(of_query, 1, rank), *place(of_keys, src, rank)
    added += map(product_of_factors, pairs)
    out = v.new_empty(batch, heads, 1, value_dim)
    words = _Words(
        plan.address,
        batch,
        heads,
        src,
        rank,
        _threads(batch * heads * src * (dim + value_dim)),
        *queries,
        *keys,
        *place(v, src, value_dim),
        *content_q,
        *content_k,
        *(_ABSENT if tails is None else place(tails, 1, src)),
        *by_key(factor),
        *by_key(sum(added[1:], added[0]) if added else None),
        *factors,
        out.data_ptr(),
        *_masked(inputs, given),
    )
    if batch and _function(exact)(words):
        raise MemoryError(f"a step of decoding has no memory for the logits of {src} keys")
    return out


def _multiplied(inputs: AttentionInputs, tables: StepTables, plan: StepPlan) -> tuple[Tensor | None, Tensor | None]:
    """Return (B, H, 1, S) products of keys with the one product's tail, or (B, H, S) of several products."""
    if plan.product is None:
        return None, products_of(inputs, tables) if tables.products else None
    tails = inputs.clipped_key_products
    if tails is None:
        tails = form_clipped_key_products((plan.product.term,), inputs.k)
    return tails.mT, None


def _masked(inputs: AttentionInputs, given: list[Tensor]) -> tuple[int, int]:
    """Where (B|1, 1, 1, S) True at excluded keys lies, and its stride of rows."""
    if inputs.key_padding is inputs.window is inputs.documents is None:
        return 0, 0  # no key lies in the future of the last
    excluded = inputs.excluded()
    if excluded is None:
        return 0, 0
    given.append(excluded.contiguous())
    return given[-1].data_ptr(), excluded.size(-1) if excluded.size(0) > 1 else 0


def _threads(work: int) -> int:
    return max(1, min(torch.get_num_threads(), work // WORK))


@functools.cache
def _function(dtype: torch.dtype) -> Callable[[ctypes.Array], int]:
    """Return the library's function.

    Raises:
        build.BuildError: it was compiled from another step.h than this.
    """
    library = kernel(dtype)
    library.relpos_step_size.restype = ctypes.c_int64
    if library.relpos_step_size() != 8 * (PLAN_WORDS + WORDS):
        raise build.BuildError("step.h and step.py are of two versions; install the package anew")
    library.relpos_step.argtypes, library.relpos_step.restype = ([ctypes.POINTER(_Words)], ctypes.c_int)
    return library.relpos_step
