"""What the kernel cannot see for itself: it is handed addresses, and torch does not see it.

Operands of other shapes or on other devices would be read past their ends; a tracer would record a
call without its kernel, and replay memory that nobody wrote.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from relpos_fairseq.attention.native.call import TABLES, Call

_FACTORS = ("f", "g")
_WORDS = {
    "q": "queries", "k": "keys", "v": "values", "cq": "content_q", "ck": "content_k",
    "f": "static_factors of queries", "g": "static_factors of keys", "u": "content_offset",
    "aq": "query_vectors", "ak": "key_vectors", "pq": "query_vectors", "pk": "key_vectors",
    "av": "value_vectors", "tri": "trilinear", "fixed": "static", "gate": "gate",
    "theta": "a reset",
}  # fmt: skip


def is_traced() -> bool:
    """Whether torch records operations (make_fx, export), or runs them without numbers."""
    if torch.jit.is_tracing():
        return True
    # Torch's own modes (fake, proxy, functional) have a key; a user's, which only watch, have none.
    return any(getattr(mode, "_mode_key", None) for mode in _get_current_dispatch_mode_stack())


def check(call: Call, operands: Mapping[str, Tensor]) -> None:
    """Check that operands lie here and are as long as the call says.

    Args:
        call: its numbers.
        operands: by their names in call.h, tables over the call's windows.

    Raises:
        ValueError: names the operand, its shape or device, and what it must be.
    """
    sizes = _sizes(call)
    for name, operand in operands.items():
        if operand.shape != sizes[name] and not _is_shared(name, operand.shape, sizes[name]):
            over = " over its window of distances" * (name in TABLES)
            raise ValueError(
                f"attention of {call.batch} rows, {call.heads} heads, {call.tgt} queries and "
                f"{call.src} keys: {_WORDS[name]} must be {sizes[name]}{over}, got "
                f"{tuple(operand.shape)}"
            )
        if not operand.is_cpu:
            raise ValueError(
                f"attention on a CPU: {_WORDS[name]} is on {operand.device}: move the model and "
                f"its inputs to one device"
            )


def _sizes(call: Call) -> dict[str, tuple[int, ...]]:
    batch, heads, tgt, src = call.batch, call.heads, call.tgt, call.src
    query, key = (batch, heads, tgt, call.dim), (batch, heads, src, call.dim)
    table, scalars = (heads, call.width, call.dim), (heads, tgt + src - 1)
    return {
        "q": query, "k": key, "v": (batch, heads, src, call.value_dim), "cq": query, "ck": key,
        "f": (batch, heads, tgt, call.rank), "g": (batch, heads, src, call.rank),
        "u": (heads, call.dim), "aq": table, "ak": table, "pq": table, "pk": table,
        "av": (heads, call.width, call.value_dim), "tri": table, "fixed": scalars, "gate": scalars,
        "theta": (heads, 2),
    }  # fmt: skip


def _is_shared(name: str, shape: torch.Size, whole: tuple[int, ...]) -> bool:
    """Whether an operand is one for all heads (factors: or rows of the batch), or fits as it is."""
    leading = 2 if name in _FACTORS else 1 if name in TABLES else 0
    if len(shape) != len(whole) or shape[leading:] != whole[leading:]:
        return False
    return all(
        one in (1, all_of) for one, all_of in zip(shape[:leading], whole[:leading], strict=True)
    )
