"""What must be checked before the kernel runs, which has only addresses.

An operand of another shape would be read past its end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from relpos_fairseq.attention.native.call import FACTORS, TABLES, Numbers

_WORDS = {
    "q": "queries",
    "k": "keys",
    "v": "values",
    "query_factors": "static_factors of queries",
    "key_factors": "static_factors of keys",
}


def check(call: Numbers, operands: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse operands that have other lengths than the call says.

    Args:
        call: its numbers.
        operands: with their names in call.h, tables over the call's windows.

    Raises:
        ValueError: names the operand, its shape, and what it must be.
    """
    sizes = _sizes(call)
    for name, operand in operands:
        if operand.shape != sizes[name] and not _is_shared(name, operand.shape, sizes[name]):
            over = " over its window of distances" * (name in TABLES)
            raise ValueError(
                f"attention of {call.batch} rows, {call.heads} heads, {call.tgt} queries and "
                f"{call.src} keys: {_WORDS.get(name, name)} must be {sizes[name]}{over}, got "
                f"{tuple(operand.shape)}"
            )


def check_device(operands: Iterable[tuple[str, Tensor]]) -> None:
    """Refuse operands, given with their names, that lie elsewhere than the queries: on no CPU.

    Raises:
        ValueError: names the operand and its device.
    """
    for name, operand in operands:
        if not operand.is_cpu:
            raise ValueError(
                f"attention on a CPU: {_WORDS.get(name, name)} is on {operand.device}: move the "
                f"model and its inputs to one device"
            )


@functools.lru_cache
def _sizes(call: Numbers) -> dict[str, tuple[int, ...]]:
    """Return the shape of each operand that all heads and rows of the batch have for themselves."""
    batch, heads, tgt, src = call.batch, call.heads, call.tgt, call.src
    query, key = (batch, heads, tgt, call.dim), (batch, heads, src, call.dim)
    vectors, scalars = (heads, call.width, call.dim), (heads, tgt + src - 1)
    return {
        "q": query,
        "k": key,
        "v": (batch, heads, src, call.value_dim),
        "content_q": query,
        "content_k": key,
        "query_factors": (batch, heads, tgt, call.rank),
        "key_factors": (batch, heads, src, call.rank),
        "content_offset": (heads, call.dim),
        "query_vectors": vectors,
        "key_vectors": vectors,
        "product_query": vectors,
        "product_key": vectors,
        "value_vectors": (heads, call.width, call.value_dim),
        "trilinear": vectors,
        "static": scalars,
        "gate": scalars,
        "reset": (heads, 2),
    }


def _is_shared(name: str, shape: torch.Size, whole: tuple[int, ...]) -> bool:
    """Return whether an operand is one for all heads (factors: or rows of the batch), and fits."""
    leading = 2 if name in FACTORS else 1 if name in TABLES else 0
    if len(shape) != len(whole) or shape[leading:] != whole[leading:]:
        return False
    return all(
        one in (1, all_of) for one, all_of in zip(shape[:leading], whole[:leading], strict=True)
    )
