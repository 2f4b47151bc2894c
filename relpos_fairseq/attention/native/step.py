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
from relpos_fairseq.attention.native import build, step_plan
from relpos_fairseq.attention.native.call import kernel
from relpos_fairseq.attention.native.checks import check_device
from relpos_fairseq.attention.native.step_plan import StepPlan
from relpos_fairseq.attention.step import (
    added_of,
    factors_of,
    given_factors,
    product_of_factors,
    products_of,
    tables_for,
    tail_products,
)
from relpos_fairseq.attention.step_tables import StepTables
from relpos_fairseq.positions import is_captured

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
    tails = inputs.key_tails
    if tails is None:
        tails = tail_products((plan.product.term,), inputs.k)
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
    if library.relpos_step_size() != 8 * (step_plan.WORDS + WORDS):
        raise build.BuildError("step.h and step.py are of two versions; install the package anew")
    library.relpos_step.argtypes, library.relpos_step.restype = ([ctypes.POINTER(_Words)], ctypes.c_int)
    return library.relpos_step
