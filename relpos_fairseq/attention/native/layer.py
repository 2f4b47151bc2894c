"""Evaluate linear layers on packed weights, and a decoder layer's rest, by the kernel in C with layer.h's arguments."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from relpos_fairseq.attention.native import build
from relpos_fairseq.attention.native.step import StepCall

WORK_OF_A_THREAD = 1 << 18  # multiplications that are worth a thread
_integer, _pointer = ctypes.c_int64, ctypes.c_void_p


class LinearArg(ctypes.Structure):
    """layer.h's struct Linear, field by field."""

    _fields_ = [("packed", _pointer), ("inputs", _integer), ("outputs", _integer)]


class NormArg(ctypes.Structure):
    """layer.h's struct Norm, field by field."""

    _fields_ = [("weight", _pointer), ("bias", _pointer), ("eps", ctypes.c_double)]


class LinearCall(ctypes.Structure):
    """layer.h's struct LinearCall, field by field."""

    _fields_ = [
        ("linear", LinearArg),
        *((name, _integer) for name in ("rows", "row_stride", "threads")),
        *((name, _pointer) for name in ("x", "out")),
    ]


class LayerCall(ctypes.Structure):
    """layer.h's struct LayerCall, field by field."""

    _fields_ = [
        *((name, _integer) for name in ("rows", "normalize_before", "threads")),
        *((name, LinearArg) for name in ("attention_out", "query", "cross_out", "inner", "outer")),
        *((name, NormArg) for name in ("attention_norm", "cross_norm", "final_norm")),
        *((name, _pointer) for name in ("cross", "residual", "attended", "out")),
    ]


class Packed(NamedTuple):
    """A weight and a bias as the kernel reads them.

    Args:
        memory: the weight's panels, and the bias behind them.
        arg: where they lie.
    """

    memory: Tensor
    arg: LinearArg


def packs(weight: Tensor) -> bool:
    """Return whether the kernel multiplies by a weight of this type, and where it lies."""
    return weight.is_cpu and weight.dtype is torch.float32 and build.problem(weight.dtype) is None


def pack(weight: Tensor, bias: Tensor | None) -> Packed:
    """Return a weight (out, in) and a bias (out,) or None as the kernel reads them."""
    (outputs, inputs), columns = weight.shape, _columns(weight.dtype)
    more = -outputs % columns
    panels = F.pad(weight.detach(), (0, 0, 0, more)).unflatten(0, (-1, columns)).mT
    padded = weight.new_zeros(outputs + more) if bias is None else F.pad(bias.detach(), (0, more))
    memory = torch.cat([panels.flatten(), padded])
    return Packed(memory, LinearArg(memory.data_ptr(), inputs, outputs))


@functools.cache
def _columns(dtype: torch.dtype) -> int:
    count = build.library(dtype).relpos_panel
    count.restype = ctypes.c_int64
    return int(count())


def linear(x: Tensor, packed: Packed) -> Tensor:
    """Return a linear layer's output (..., out) for x (..., in) of the packed weight's type."""
    rows = x.reshape(-1, x.size(-1))
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count, (outputs, inputs) = len(rows), (packed.arg.outputs, packed.arg.inputs)
    out = rows.new_empty(count, outputs)
    call = LinearCall(
        linear=packed.arg,
        rows=count,
        row_stride=rows.stride(0),
        threads=_threads(count * outputs * inputs),
        x=rows.data_ptr(),
        out=out.data_ptr(),
    )
    build.entry(x.dtype, "relpos_linear", None, LinearCall, ctypes.sizeof(LinearCall))(call)
    return out.view(*x.shape[:-1], outputs)


def layer(form: LayerCall, x: Tensor, attended: Tensor, cross: StepCall | None) -> Tensor:
    """Return a decoder layer's output (rows, E) for its input and what self-attention found, before its projection.

    Args:
        form: what the layer has of its own: linear layers, norms, and where these stand.
        x: (rows, E), contiguous.
        attended: (rows, E), contiguous.
        cross: a step of attention to the source, without its query and output; None: there is no source.

    Raises:
        MemoryError: there is none for the rows between two linear layers.
    """
    out = torch.empty_like(x)
    call = LayerCall.from_buffer_copy(form)
    call.rows = len(x)
    call.threads = _threads(len(x) * form.inner.inputs * form.inner.outputs)
    call.residual, call.attended, call.out = x.data_ptr(), attended.data_ptr(), out.data_ptr()
    if cross is not None:
        call.cross = ctypes.addressof(cross)
    if build.entry(x.dtype, "relpos_layer", ctypes.c_int, LayerCall, ctypes.sizeof(LayerCall))(call):
        raise MemoryError(f"a decoder's layer has no memory for {len(x)} rows of {form.inner.outputs} numbers")
    return out


def norm_arg(norm: nn.LayerNorm) -> NormArg:
    """Return where the kernel finds a norm's weight and bias, which must outlive its calls."""
    return NormArg(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)


def _threads(work: int) -> int:
    return max(1, min(torch.get_num_threads(), work // WORK_OF_A_THREAD))
