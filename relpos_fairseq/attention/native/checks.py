"""What must be checked before the kernel runs, which has only addresses.

An operand of another shape would be read past its end.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence

from torch import Tensor

from relpos_fairseq.attention.native.call import FACTORS, TABLES, Numbers

_WORDS = {
    "q": "queries",
    "k": "keys",
    "v": "values",
    "query_factors": "static_factors of queries",
    "key_factors": "static_factors of keys",
}


def check(call: Numbers, operands: Iterable[tuple[Sequence[str], Tensor]]) -> None:
    """Refuse operands that have other lengths than the call says.

    Args:
        call: its numbers.
        operands: with their names in call.h, tables over the call's windows.

    Raises:
        ValueError: names the operand, its shape, and what it must be.
    """
    fitting = _shapes(call)
    for (name, *_), operand in operands:
        if operand.shape not in fitting[name]:
            over = " over its window of distances" * (name in TABLES)
            raise ValueError(
                f"attention of {call.batch} rows, {call.heads} heads, {call.tgt} queries and "
                f"{call.src} keys: {_WORDS.get(name, name)} must be {fitting[name][0]}{over}, got "
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
def _shapes(call: Numbers) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes that each operand may have: of its own for each head of each row first."""
    batch, heads, tgt, src = call.batch, call.heads, call.tgt, call.src
    query, key = (batch, heads, tgt, call.dim), (batch, heads, src, call.dim)
    vectors, scalars = (heads, call.width, call.dim), (heads, tgt + src - 1)
    whole = {
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
    return {name: _or_shared(name, shape) for name, shape in whole.items()}


def _or_shared(name: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return a shape, and those of an operand that heads (factors: or rows of the batch) share."""
    leading = 2 if name in FACTORS else 1 if name in TABLES else 0
    kept = itertools.product(*((size, 1) for size in shape[:leading]))
    return [(*sizes, *shape[leading:]) for sizes in kept]
