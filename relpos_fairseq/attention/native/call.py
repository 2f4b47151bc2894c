"""A call as the kernel reads it: call.h, field by field."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch

from relpos_fairseq.attention.native import build

_number, _pointer = ctypes.c_int64, ctypes.c_void_p


class Tensor(ctypes.Structure):
    """(B, H, length, channels): where it lies, and strides of batch, heads and rows."""

    _fields_ = [("data", _pointer), ("b", _number), ("h", _number), ("t", _number)]


class Table(ctypes.Structure):
    """(H|1, rows[, channels]): where it lies, and the stride of heads."""

    _fields_ = [("data", _pointer), ("h", _number)]


_NUMBERS = (
    "batch",
    "heads",
    "tgt",
    "src",
    "dim",
    "value_dim",
    "rank",
    "start",
    "first_head",
    "all_heads",
    "low",
    "width",
    "wide",
    "causal",
    "window",
    "reset_kinds",
    "first_per_row",
    "drop",
    "seed",
    "threads",
)


class Numbers(NamedTuple):
    """Those of them that no tensor and no machine says: what call.h says of each."""

    batch: int
    heads: int
    tgt: int
    src: int
    dim: int
    value_dim: int
    rank: int
    start: int
    low: int
    width: int
    wide: int
    causal: int
    window: int
    reset_kinds: int
    drop: int


FACTORS = ("query_factors", "key_factors")
TENSORS = ("q", "k", "v", "content_q", "content_k", *FACTORS)
OVER_DISTANCES = ("query_vectors", "key_vectors", "product_query", "product_key", "value_vectors", "trilinear")
TABLES = ("content_offset", *OVER_DISTANCES, "static", "gate", "reset")
OPERANDS = (*TENSORS, *TABLES)  # by their names in a lowered call; `static` is `static_` in call.h


class Call(ctypes.Structure):
    """All that the kernel is told."""

    _fields_ = [
        *((name, _number) for name in _NUMBERS),
        ("scale", ctypes.c_double),
        *((name, Tensor) for name in (*TENSORS, "out")),
        *((name, Table) for name in TABLES),
        *((name, _pointer) for name in ("first", "padding", "documents", "top", "mass")),
        *((f"d{name}", Tensor) for name in ("out", "q", "k", "v", "content_q", "content_k")),
        *((f"d{name}", _pointer) for name in (*FACTORS, *TABLES)),
    ]


@functools.cache
def kernel(dtype: torch.dtype) -> ctypes.CDLL:
    """The library, told of its functions' types.

    Raises:
        build.BuildError: where it cannot be had, or was compiled from another call.h than this.
    """
    library = build.library(dtype)
    library.relpos_call_size.restype = _number
    size = library.relpos_call_size()
    if size != ctypes.sizeof(Call):
        raise build.BuildError(
            f"the kernel's call has {size} bytes, and call.py's {ctypes.sizeof(Call)}: call.h and "
            f"call.py are of two versions; install the package anew"
        )
    for function in (library.relpos_forward, library.relpos_backward):
        function.argtypes, function.restype = [ctypes.POINTER(Call)], ctypes.c_int
    library.relpos_groups.argtypes = [ctypes.POINTER(Call)]
    library.relpos_groups.restype = _number
    return library
