"""A step of decoding by the kernel: step.h's call, filled in word by word.

Without gradients, dropout and conversions; what else a step may be, `attention.step` evaluates.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.native import build
from relpos_fairseq.attention.native.call import kernel
from relpos_fairseq.attention.native.checks import check_device
from relpos_fairseq.attention.step import parts_of, tables_for, tail_products
from relpos_fairseq.positions import is_captured

WORDS = 82
WORK = 1 << 17  # products and sums that are worth a thread
_ABSENT = (0, 0, 0, 0)
_Words = ctypes.c_int64 * WORDS


def serves(inputs: AttentionInputs) -> bool:
    """Whether the kernel evaluates the inputs, which are a step that `attention.step` serves."""
    if torch.is_grad_enabled() or inputs.dropout or is_captured():
        return False
    content_k, exact = inputs.k if inputs.content_k is None else inputs.content_k, inputs.exact
    return (
        all(x.dtype == exact and x.is_cpu for x in (inputs.q, inputs.k, inputs.v))
        and inputs.k.stride(-1) == inputs.v.stride(-1) == content_k.stride(-1) == 1
        and build.problem(exact) is None
    )


def attend(inputs: AttentionInputs) -> Tensor:
    """Output (B, H, 1, Dv) of inputs that `serves` accepts."""
    tables = tables_for(inputs)
    product = tables.products[0] if len(tables.products) == 1 else None
    parts = parts_of(inputs, tables, multiplied=product is None)
    (batch, heads, src, dim), exact = inputs.k.shape, inputs.exact
    value_dim = inputs.v.size(-1)
    out = inputs.v.new_empty(batch, heads, 1, value_dim)
    given: list[Tensor] = []  # what has the numbers must outlive the call

    def place(x: Tensor | None, rows: int, width: int) -> tuple[int, ...]:
        if x is None:
            return _ABSENT
        if x.dtype != exact or not x.is_cpu:
            check_device((("a table of positions", x),))
            x = x.to(exact)
        if x.shape != (batch, heads, rows, width):
            x = x.expand(batch, heads, rows, width)
        if x.stride(-1) != 1:
            x = x.contiguous()
        given.append(x)
        return x.data_ptr(), *x.stride()[:3]

    def near(table: Tensor | None, width: int) -> tuple[int, ...]:
        return _ABSENT if table is None else place(table, table.size(1), width)

    def by_key(x: Tensor | None) -> tuple[int, ...]:
        return _ABSENT if x is None else place(x[:, :, None], 1, src)

    products, tails = (None, None), None
    if product is not None:
        products = product.product_query.transpose(1, 2), product.product_key
        tails = inputs.key_tails
        if tails is None:
            tails = tail_products((product.term,), inputs.k)
        tails = tails[..., 0]
    near_tables = (tables.query, tables.key, tables.trilinear, tables.value, products[1])
    content_q, content_k = inputs.q, inputs.k
    if inputs.rotated:
        content_q, content_k = inputs.content_q, inputs.content_k
    wide = content_k.size(-1)
    words = (
        batch, heads, src, dim, wide, value_dim, _threads(batch * heads * src * (dim + value_dim)),
        *(0 if table is None else table.size(1) for table in near_tables),
        *place(parts.query, 1, wide),
        *place(content_k, src, wide),
        *place(inputs.v, src, value_dim),
        *place(None if tables.query is products[0] is None else inputs.q, 1, dim),
        *place(None if tables.key is products[1] is None else inputs.k, src, dim),
        *place(None if tables.trilinear is None else content_q, 1, wide),
        *by_key(parts.factor), *by_key(parts.added), *by_key(tails),
        *near(tables.query, dim), *near(tables.key, dim), *near(tables.trilinear, wide),
        *near(tables.value, value_dim), *near(tables.value_tail, value_dim),
        *near(products[0], dim), *near(products[1], dim),
        *place(out, 1, value_dim),
        *_masked(inputs.excluded(), given),
    )  # fmt: skip
    if batch and _function(exact)(_Words(*words)):
        raise MemoryError(f"a step of decoding has no memory for the logits of {src} keys")
    return out


def _masked(excluded: Tensor | None, given: list[Tensor]) -> tuple[int, int]:
    """Where (B|1, 1, 1, S) True at excluded keys lies, and its stride of rows."""
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
    if library.relpos_step_size() != ctypes.sizeof(_Words):
        raise build.BuildError("step.h and step.py are of two versions; install the package anew")
    library.relpos_step.argtypes, library.relpos_step.restype = (
        [ctypes.POINTER(_Words)],
        ctypes.c_int,
    )
    return library.relpos_step
