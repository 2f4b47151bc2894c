"""Evaluate linear layers on packed weights, and a decoder layer's rest, by the kernel in C with layer.h's arguments."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from relpos_fairseq.attention.native import build
from relpos_fairseq.attention.native.step import StepCall

WORK_OF_A_THREAD = 1 << 18  # multiplications that are worth a thread
_integer, _pointer = ctypes.c_int64, ctypes.c_void_p


class LinearArg(ctypes.Structure):
    """layer.h's struct Linear, field by field."""

    _fields_ = [
        *((name, _pointer) for name in ("weight", "integers", "scales", "sums", "bias")),
        *((name, _integer) for name in ("inputs", "outputs")),
    ]


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
        *(
            (name, LinearArg)
            for name in ("queries_keys_values", "attention_out", "query", "cross_out", "inner", "outer")
        ),
        *((name, NormArg) for name in ("attention_norm", "cross_norm", "final_norm")),
        ("turn", _pointer),
        *((name, _integer) for name in ("pairs", "halves")),
        *((name, _pointer) for name in ("attention", "cross", "residual", "attended", "out")),
    ]


@dataclass(frozen=True, eq=False)
class Packed:
    """A weight and a bias as the kernel reads them.

    Args:
        panels: (P, in, columns) in fp32, or (P, ceil(in / 4), columns, 4) in int8.
        bias: (P columns,) of 0 where there is none.
        inputs: in.
        outputs: out; the last panel has more columns.
        scales: (P columns,) of weights in int8.
        sums: (P columns,) of each output's integers.

    Attributes:
        arg: where these lie.
    """

    panels: Tensor
    bias: Tensor
    inputs: int
    outputs: int
    scales: Tensor | None = None
    sums: Tensor | None = None
    arg: LinearArg = field(init=False)

    def __post_init__(self) -> None:
        of_panels = "weight" if self.scales is None else "integers"
        places = {of_panels: self.panels, "bias": self.bias, "scales": self.scales, "sums": self.sums}
        addresses = {name: part.data_ptr() for name, part in places.items() if part is not None}
        object.__setattr__(self, "arg", LinearArg(inputs=self.inputs, outputs=self.outputs, **addresses))

    def check(self, x: Tensor) -> None:
        """Raise a ValueError for x (..., in) of another number of inputs, or of another type."""
        if x.size(-1) != self.inputs or x.dtype is not self.bias.dtype:
            raise ValueError(
                f"a linear layer of {self.inputs} inputs in {self.bias.dtype} was given {x.size(-1)} in {x.dtype}"
            )

    @property
    def integers(self) -> tuple[Tensor, Tensor]:
        """(out, in) in int8 and (out,) the scales, of a weight in int8."""
        assert self.scales is not None
        rows = self.panels.transpose(1, 2).flatten(2).flatten(0, 1)
        return rows[: self.outputs, : self.inputs], self.scales[: self.outputs]


def packs(weight: Tensor) -> bool:
    """Return whether the kernel multiplies by a weight of this type, and where it lies."""
    return weight.is_cpu and weight.dtype is torch.float32 and build.problem(weight.dtype) is None


def packs_integers(weight: Tensor) -> bool:
    """Return whether the kernel on this machine multiplies by a weight (out, in) in int8."""
    return packs(weight) and weight.size(1) <= _told("relpos_most_integers")


def pack(weight: Tensor, bias: Tensor | None) -> Packed:
    """Return a weight (out, in) and a bias (out,) or None as the kernel reads them."""
    outputs, inputs = weight.shape
    panels = _panels(weight.detach()).mT.contiguous()
    return Packed(panels, _padded(weight, bias), inputs, outputs)


def integers_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight (out, in) in int8, and the scales (out,) of its outputs."""
    scales = weight.detach().abs().amax(1).clamp(min=1e-12) / 127
    return (weight.detach() / scales[:, None]).round().to(torch.int8), scales


def pack_integers(integers: Tensor, scales: Tensor, bias: Tensor | None) -> Packed:
    """Return a weight (out, in) in int8 with a scale an output, and a bias (out,) or None, as the kernel reads them."""
    outputs, inputs = integers.shape
    panels = _panels(F.pad(integers, (0, -inputs % 4))).unflatten(2, (-1, 4)).transpose(1, 2).contiguous()
    sums = integers.sum(1, dtype=torch.int32).to(scales.dtype)
    return Packed(panels, _padded(scales, bias), inputs, outputs, _padded(scales, scales), _padded(scales, sums))


def _panels(weight: Tensor) -> Tensor:
    """Return a weight (out, in) as (P, columns, in), with further rows of 0."""
    columns = _told("relpos_panel")
    return F.pad(weight, (0, 0, 0, -len(weight) % columns)).unflatten(0, (-1, columns))


def _padded(weight: Tensor, numbers: Tensor | None) -> Tensor:
    """Return numbers (out,) of a weight's outputs, or 0 for None, with 0 for the further columns of the last panel."""
    numbers = weight.new_zeros(len(weight)) if numbers is None else numbers.detach()
    return F.pad(numbers, (0, -len(numbers) % _told("relpos_panel")))


@functools.cache
def _told(name: str) -> int:
    """Return what a function of the library for fp32 says of this machine."""
    function = getattr(build.library(torch.float32), name)
    function.restype = ctypes.c_int64
    return int(function())


def linear(x: Tensor, packed: Packed) -> Tensor:
    """Return a linear layer's output (..., out) for x (..., in) of the packed weight's type.

    Raises:
        ValueError: x has another number of inputs, or another type.
        MemoryError: there is none to pack rows in.
    """
    packed.check(x)
    rows = x.reshape(-1, x.size(-1))
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    count, outputs, inputs = len(rows), packed.outputs, packed.inputs
    out = rows.new_empty(count, outputs)
    call = LinearCall(
        linear=packed.arg,
        rows=count,
        row_stride=rows.stride(0),
        threads=build.threads_for(count * outputs * inputs, WORK_OF_A_THREAD),
        x=rows.data_ptr(),
        out=out.data_ptr(),
    )
    if build.entry(x.dtype, "relpos_linear", LinearCall)(call):
        raise MemoryError(f"a linear layer has no memory to pack {count} rows of {inputs} inputs in")
    return out.view(*x.shape[:-1], outputs)


class Step(NamedTuple):
    """A step of self-attention without its query, output, last key and last value, which a layer's call writes.

    Args:
        call: the arguments.
        turn: (slots, P, 2) cos and sin by which pairs of channels of the step's query and key are turned, and those of
            later steps; or None.
        halves: whether channels (c, c + P) are a pair; else (2c, 2c + 1).
        kept: what must outlive the call.
    """

    call: StepCall
    turn: Tensor | None
    halves: bool
    kept: list[Any]


def layer(form: LayerCall, x: Tensor, attention: Tensor | Step, cross: StepCall | None) -> Tensor:
    """Return a decoder layer's output (rows, E) for its input, and self-attention or what it found.

    Args:
        form: what the layer has of its own: linear layers, norms, and where these stand.
        x: (rows, E), contiguous.
        attention: (rows, E), contiguous, before its projection; or a step of self-attention.
        cross: a step of attention to the source, without its query and output; None: there is no source.

    Raises:
        ValueError: what attention found is of another type, as of keys that a cache holds from steps in that type.
        MemoryError: there is none for the rows between two linear layers.
    """
    if isinstance(attention, Tensor) and (attention.dtype is not x.dtype or len(attention) != len(x)):
        raise ValueError(
            f"attention found {tuple(attention.shape)}, {attention.dtype}, the layer has {tuple(x.shape)}, {x.dtype}: "
            f"take a fresh incremental state where the type of a model changes"
        )
    out = x.new_empty(x.shape)
    call = prepared(form, len(x), None if isinstance(attention, Tensor) else attention, cross)
    call.residual, call.out = x.data_ptr(), out.data_ptr()
    if isinstance(attention, Tensor):
        call.attended = attention.data_ptr()
    if build.entry(x.dtype, "relpos_layer", LayerCall)(call):
        raise MemoryError(f"a decoder's layer has no memory for {len(x)} rows of {form.inner.outputs} numbers")
    return out


def prepared(form: LayerCall, rows: int, attention: Step | None, cross: StepCall | None) -> LayerCall:
    """Return a layer's arguments for a step of so many rows, but for its input and output."""
    call = LayerCall.from_buffer_copy(form)
    call.rows = rows
    call.threads = build.threads_for(rows * form.inner.inputs * form.inner.outputs, WORK_OF_A_THREAD)
    if attention is not None:
        call.attention = ctypes.addressof(attention.call)
        if attention.turn is not None:
            call.turn, call.pairs, call.halves = attention.turn.data_ptr(), attention.turn.size(1), attention.halves
    call.cross = None if cross is None else ctypes.addressof(cross)
    return call


def norm_arg(norm: nn.LayerNorm) -> NormArg:
    """Return where the kernel finds a norm's weight and bias, which must outlive its calls."""
    return NormArg(norm.weight.data_ptr(), norm.bias.data_ptr(), norm.eps)
