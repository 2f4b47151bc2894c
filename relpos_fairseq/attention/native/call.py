"""Call the attention kernel in C, forward and backward, with the arguments that call.h declares.

`attend` lowers the terms of a call (`attention.lowering`) and hands the tensors to an operation of
torch.  The operation's passes, `forward` and `backward`, fill in a `Call`, whose fields are those of
call.h: integers, and the address and strides of each tensor.  The kernel does not know the tensors'
shapes and devices, so both are checked here.

An operation takes a list of tensors.  Bit p of its integer `present` says that the tensor named
`PLACES[p]` is in the list; further bits say which pairs of `SHARED_TABLES` are one tensor.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from relpos_fairseq.attention import operation
from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering import (
    SAME_EVERYWHERE,
    Lowered,
    Window,
    lower,
    needs_offset_table,
    relations_of_vectors,
)
from relpos_fairseq.attention.native.build import entry
from relpos_fairseq.attention.operation import Given

CONTENT = ("q", "k", "v", "content_q", "content_k")
FACTORS = ("query_factors", "key_factors")
OF_ROWS = (*FACTORS, "decay")  # may be shared by batch rows and heads, over which gradients are summed then
TENSORS = (*CONTENT, *OF_ROWS)
TABLES_OF_VECTORS = ("query_vectors", "key_vectors", "product_query", "product_key", "value_vectors", "trilinear")
TABLES = ("content_offset", *TABLES_OF_VECTORS, "static", "gate", "reset")
OPERANDS = (*TENSORS, *TABLES)  # what may have a gradient
MASKS = ("first_token", "key_padding", "documents")
PLACES = (*OPERANDS, *MASKS, "seed")
SHARED_TABLES = (("query_vectors", "key_vectors"), ("product_query", "product_key"))
DROP_PARTS = 65536  # dropout is rounded to a multiple of 1 / DROP_PARTS
MAX_CLIPPED_WIDTH = 192  # widest window over which tables of vectors are clipped (see call.h)
MAX_UNSUMMED_BYTES = 32 << 20  # of gradients that the kernel writes for each batch row, before they are summed

_integer, _pointer = ctypes.c_int64, ctypes.c_void_p


class TensorArg(ctypes.Structure):
    """call.h's Tensor: the address of (B, H, length, channels), and strides in elements."""

    _fields_ = [("data", _pointer), ("batch_stride", _integer), ("head_stride", _integer), ("row_stride", _integer)]


class TableArg(ctypes.Structure):
    """call.h's Table: the address of (H|1, rows[, channels]), and the stride of heads in elements."""

    _fields_ = [("data", _pointer), ("head_stride", _integer)]


class Call(ctypes.Structure):
    """call.h's struct Call, field by field; the field that is `static_` in C is `static` here."""

    _fields_ = [
        *((name, _integer) for name in ("batch", "heads", "tgt_len", "src_len", "dim", "value_dim", "rank")),
        *((name, _integer) for name in ("query_start", "first_head", "all_heads", "low", "width", "unclipped")),
        *((name, _integer) for name in ("causal", "window", "reset_replaces", "first_token_per_row")),
        *((name, _integer) for name in ("drop_threshold", "seed", "threads")),
        ("scale", ctypes.c_double),
        *((name, TensorArg) for name in (*TENSORS, "out")),
        *((name, TableArg) for name in TABLES),
        *((name, _pointer) for name in (*MASKS, "row_max", "row_sum")),
        *((f"d{name}", TensorArg) for name in ("out", *CONTENT)),
        *((f"d{name}", _pointer) for name in (*OF_ROWS, *TABLES)),
    ]


_OF_PASSES = ("first_head", "all_heads", "first_token_per_row", "seed", "threads")  # filled in by each pass
NUMBERS = [name for name, kind in Call._fields_ if kind is _integer and name not in _OF_PASSES]  # of an operation


# ------------------------------------------------------------------------------ From inputs to operands


def attend_sequence(inputs: AttentionInputs) -> Tensor:
    """Return the output (B, H, T, Dv) of attention, for inputs for which `native.refusal` returns None."""
    lowered = lower_for_c(inputs)
    check_device(lowered.tensors.items())
    present, tensors = _as_list({**lowered.tensors, **_masks(inputs, lowered)})
    (out,) = _operation(1, present, call_numbers(inputs, lowered), inputs.scale, tensors)
    return out.to(inputs.v.dtype)


def lower_for_c(inputs: AttentionInputs) -> Lowered:
    """Lower the terms of a call; the result's `tensors` are all operands of the kernel, by their names in call.h."""
    positions = inputs.positions
    all_distances = Window(positions.lowest_distance, positions.highest_distance)
    lowered = lower(inputs, _window_of_vectors(inputs, all_distances), all_distances, inputs.exact)
    operands = lowered.tensors
    q, k, content_q, content_k = inputs.exact_pairs()
    operands["v"] = inputs.v.to(inputs.exact)
    if inputs.rotated and any(name in operands for name in ("query_vectors", "key_vectors", "product_query")):
        operands["content_q"], operands["content_k"] = content_q, content_k
    else:
        q, k = content_q, content_k
    operands["q"], operands["k"] = q, k
    return lowered


def _window_of_vectors(inputs: AttentionInputs, all_distances: Window) -> Window:
    """Return the window of distances for tables of vectors: clipped if that makes it narrow enough, else all."""
    if relations := relations_of_vectors(inputs):
        clipped = Window.over(relations, all_distances)
    elif needs_offset_table(inputs):
        clipped = SAME_EVERYWHERE
    else:
        return all_distances
    return clipped if clipped.width <= min(MAX_CLIPPED_WIDTH, all_distances.width) else all_distances


def call_numbers(inputs: AttentionInputs, lowered: Lowered) -> tuple[int, ...]:
    """Return the integer arguments of a call, by NUMBERS, from its inputs and its lowered terms."""
    positions, operands = inputs.positions, lowered.tensors
    batch, heads, _, dim = (inputs.content_q if inputs.rotated else inputs.q).shape
    rank = operands["query_factors"].size(-1) if "query_factors" in operands else 0
    low = width = unclipped = 0
    if any(name in operands for name in TABLES_OF_VECTORS):
        low, width = lowered.vectors.low, lowered.vectors.width
        unclipped = int(lowered.vectors.equals(lowered.scalars))  # a row for each of all distances
    found = {
        "batch": batch,
        "heads": heads,
        "tgt_len": positions.tgt_len,
        "src_len": positions.src_len,
        "dim": dim,
        "value_dim": inputs.v.size(-1),
        "rank": rank,
        "query_start": positions.query_start,
        "low": low,
        "width": width,
        "unclipped": unclipped,
        "causal": int(inputs.causal),
        "window": inputs.window or 0,
        "reset_replaces": lowered.reset_replaces,
        "drop_threshold": round(inputs.dropout * DROP_PARTS),
    }
    return tuple(found[name] for name in NUMBERS)


def _masks(inputs: AttentionInputs, lowered: Lowered) -> dict[str, Tensor]:
    """Return the masks and the seed of dropout by name, in the types that the kernel reads."""
    found, shape = {}, (inputs.q.size(0), inputs.positions.src_len)
    if lowered.reset_replaces:
        found["first_token"] = lowered.first.to(torch.int64).contiguous()
    if inputs.key_padding is not None:
        padding = inputs.key_padding.to(torch.bool).expand(shape).contiguous()
        found["key_padding"] = padding.view(torch.uint8)
    if inputs.documents is not None:
        found["documents"] = inputs.documents.to(torch.int64).expand(shape).contiguous()
    if inputs.dropout:
        found["seed"] = torch.randint(1 << 40, 1 << 62, (), dtype=torch.long)
    return found


def _as_list(given: dict[str, Tensor]) -> tuple[int, list[Tensor]]:
    """Return `present` and the list of tensors (see the top of this file) for a dictionary of tensors by name.

    A tensor that serves as both tables of a pair in `SHARED_TABLES` stands in the list once.
    """
    shared = 0
    for bit, (first, second) in enumerate(SHARED_TABLES, len(PLACES)):
        if first in given and given[first] is given.get(second):
            shared |= 1 << bit
            given = {name: tensor for name, tensor in given.items() if name != second}
    present, tensors = operation.arranged(PLACES, given)
    return present | shared, tensors


def _names_in_list(present: int) -> list[tuple[str, ...]]:
    """Return the names of each tensor in the list that `present` describes: two if it serves as two tables."""
    both = {pair[0]: pair for bit, pair in enumerate(SHARED_TABLES, len(PLACES)) if present >> bit & 1}
    names = (name for place, name in enumerate(PLACES) if present >> place & 1)
    return [both.get(name, (name,)) for name in names]


# ----------------------------------------------------------------------------------------------- Checks

_WORDS = {
    "q": "queries",
    "k": "keys",
    "v": "values",
    "query_factors": "static_factors of queries",
    "key_factors": "static_factors of keys",
}


def check_shapes(plan: _Plan, tensors: list[Tensor]) -> None:
    """Raise an error if the shape of an operand, of which `tensors` begins with all, contradicts the call's sizes.

    Raises:
        ValueError: names the operand, its shape, and the shape that it must have.
    """
    call, fitting = plan.call, plan.fitting
    for (name, *_), operand in zip(plan.operands, tensors, strict=False):
        if operand.shape not in fitting[name]:
            over = " over its window of distances" * (name in TABLES)
            raise ValueError(
                f"attention of {call.batch} rows, {call.heads} heads, {call.tgt_len} queries and "
                f"{call.src_len} keys: {_WORDS.get(name, name)} must be {fitting[name][0]}{over}, got "
                f"{tuple(operand.shape)}"
            )


def check_device(operands: Iterable[tuple[str, Tensor]]) -> None:
    """Raise an error if an operand, given as a pair of its name and the tensor, is not on the CPU.

    Raises:
        ValueError: names the operand and its device.
    """
    for name, operand in operands:
        if not operand.is_cpu:
            raise ValueError(
                f"attention on a CPU: {_WORDS.get(name, name)} is on {operand.device}: move the "
                f"model and its inputs to one device"
            )


def _fitting_shapes(call: Call) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes that each operand, by name, may have: the full shape first, then those that broadcast to it.

    Tables may be shared by heads, and factors and decay by heads and batch rows.
    """
    batch, heads, tgt_len, src_len, dim = call.batch, call.heads, call.tgt_len, call.src_len, call.dim
    query, key = (batch, heads, tgt_len, dim), (batch, heads, src_len, dim)
    full = dict.fromkeys(TABLES_OF_VECTORS, (heads, call.width, dim)) | {
        "q": query,
        "k": key,
        "v": (batch, heads, src_len, call.value_dim),
        "content_q": query,
        "content_k": key,
        "query_factors": (batch, heads, tgt_len, call.rank),
        "key_factors": (batch, heads, src_len, call.rank),
        "decay": (batch, heads, 3, src_len),
        "content_offset": (heads, dim),
        "value_vectors": (heads, call.width, call.value_dim),
        "static": (heads, tgt_len + src_len - 1),
        "gate": (heads, tgt_len + src_len - 1),
        "reset": (heads, 2),
    }
    found = {}
    for name, shape in full.items():
        leading = 2 if name in OF_ROWS else 1 if name in TABLES else 0
        sizes = itertools.product(*((size, 1) for size in shape[:leading]))
        found[name] = [(*some, *shape[leading:]) for some in sizes]
    return found


# ------------------------------------------------------------------------------------------------ Passes


def forward(given: Given) -> list[Tensor]:
    """Run the forward pass; return the output, and row_max and row_sum as one (2, B H, T) for the backward pass."""
    plan = _plan_of(given.present, tuple(given.numbers), given.scale)
    check_shapes(plan, given.tensors)
    out, sums = results(given)
    call, placed = plan.fill_in(given.tensors, out, sums)
    _run("forward", call, sums.dtype)
    del placed  # alive until here: the call has only the addresses
    return [out, sums]


def backward(grads: list[Tensor], results: list[Tensor], given: Given, wanted: int) -> list[Tensor]:
    """Run the backward pass; return the gradients of the tensors whose bits are set in `wanted`, in order.

    `grads` holds the gradient of the output, and `results` is what `forward` returned.  Bit p of `wanted` belongs to
    the p-th of the tensors.
    """
    (dout,), (out, sums) = grads, results
    plan = _plan_of(given.present, tuple(given.numbers), given.scale)
    call, placed = plan.fill_in(given.tensors, out, sums)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    call.dout = _place(dout)
    asked = {number: names for number, names in enumerate(plan.operands) if wanted >> number & 1}
    found = _gradients(call, placed, sums, asked)
    return [found[number] for number in asked]


def results(given: Given) -> list[Tensor]:
    """Return uninitialised tensors of the shapes, types and strides that `forward` returns.

    `forward` allocates its results with this function, and torch traces `forward` with it.
    """
    q, _, v, *_ = given.tensors
    if q.size(-1) != v.size(-1):
        out = v.new_empty(*q.shape[:3], v.size(-1))
    elif q.stride(-1) == 1:
        out = torch.empty_like(q)
    else:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return [out, q.new_empty((2, q.size(0) * q.size(1), q.size(2)))]


def gradients(given: Given, wanted: int) -> list[Tensor]:
    """Return uninitialised tensors of the shapes, types and strides that `backward` returns, for torch's tracing."""
    found = []
    for number, (names, operand) in enumerate(zip(_names_in_list(given.present), given.tensors, strict=True)):
        if wanted >> number & 1:
            if names[0] in CONTENT and operand.stride(-1) == 1:
                found.append(torch.empty_like(operand))
            else:
                found.append(operand.new_empty(operand.shape))
    return found


_operation = operation.define(
    "attend",
    operation.Kernel(forward, results, backward, gradients),
    ["CPU"],
    ("attention by the compiled kernel", "use --attention-backend reference"),
)


@functools.lru_cache
def _plan_of(present: int, numbers: tuple[int, ...], scale: float) -> _Plan:
    """Return the `_Plan` for these arguments of the operation, kept for later calls with the same arguments."""
    call = Call(**dict(zip(NUMBERS, numbers, strict=True)), scale=scale)
    call.all_heads = call.heads
    names = _names_in_list(present)
    count = sum(found[0] in OPERANDS for found in names)
    return _Plan(call, names[:count], [name for (name,) in names[count:]], _fitting_shapes(call))


@dataclass(frozen=True)
class _Plan:
    """The part of a kernel call that is the same whatever the tensors are.

    Args:
        call: a `Call` with its integers and without tensors, to be copied.
        operands: the names of each operand; operands come first in the list of tensors.
        masks: the names of the other tensors: masks and the seed.
        fitting: the shapes that operands may have, by name.
    """

    call: Call
    operands: list[tuple[str, ...]]
    masks: list[str]
    fitting: dict[str, list[tuple[int, ...]]]

    def fill_in(self, tensors: list[Tensor], out: Tensor, sums: Tensor) -> tuple[Call, list[Tensor]]:
        """Return a copy of `call` with the addresses of all tensors, and the operands that it points to.

        Operands are copied where the kernel cannot read their layout: it needs contiguous channels, and contiguous
        tables.  The caller keeps the operands alive until the kernel has run.

        Args:
            tensors: the list of tensors.
            out: the output of the forward pass.
            sums: (2, B H, T) row_max and row_sum.
        """
        call, placed = Call.from_buffer_copy(self.call), []
        call.threads = torch.get_num_threads()
        for names, operand in zip(self.operands, tensors, strict=False):
            name = names[0]
            if name in _IS_TABLE:
                operand = operand.contiguous()
                place = operand.data_ptr(), operand.stride(0) if operand.size(0) > 1 else 0
            else:
                # Batch rows that read the same factors share one gradient, but only if the batch dimension is 1.
                is_expanded = name in FACTORS and operand.stride(0) == 0 and operand.size(0) > 1
                if is_expanded or operand.stride(-1) != 1:
                    operand = operand.contiguous()
                place = _place(operand)
            for name in names:
                setattr(call, name, place)
            placed.append(operand)
        for name, tensor in zip(self.masks, tensors[len(placed) :], strict=True):
            setattr(call, name, int(tensor) if name == "seed" else tensor.data_ptr())
            if name == "first_token":
                call.first_token_per_row = tensor.numel() > 1
        call.out = _place(out)
        call.row_max = sums.data_ptr()
        call.row_sum = sums.data_ptr() + sums.stride(0) * sums.element_size()
        return call, placed


_IS_TABLE = frozenset(TABLES)


def _place(x: Tensor) -> tuple[int, int, int, int]:
    """Return the fields of the `TensorArg` of a tensor (B|1, H|1, length, channels): its address and three strides."""
    batch, heads, rows, _ = x.stride()
    return x.data_ptr(), 0 if x.size(0) == 1 else batch, 0 if x.size(1) == 1 else heads, rows


def _run(name: str, call: Call, dtype: torch.dtype) -> None:
    if call.batch and entry(dtype, f"relpos_{name}", Call)(call):  # a batch without rows has nothing to evaluate
        raise MemoryError(
            f"the attention kernel has no memory for its buffers ({call.threads} threads, each for "
            f"a head of {call.tgt_len} queries and {call.src_len} keys, {call.dim} channels): use fewer "
            f"threads (OMP_NUM_THREADS), or --attention-backend blocked"
        )


# --------------------------------------------------------------------------------------------- Gradients


class UnsummedGradient(NamedTuple):
    """A gradient that the kernel writes for each batch row or group of rows, and that is summed afterwards.

    Args:
        rows: for how many batch rows, or groups of them, the kernel writes it.
        shape: the operand's shape (B|1, H|1, ...), to which it is summed.
    """

    rows: int
    shape: tuple[int, ...]


def _gradients(
    call: Call, operands: Sequence[Tensor], sums: Tensor, asked: dict[int, tuple[str, ...]]
) -> dict[int, Tensor]:
    """Run the backward pass of a call; return the gradients of the operands in `asked`, by their place in `operands`.

    The kernel writes the gradients of tables and decay for each head of each batch row, and those of factors
    for each head of each group of batch rows.  Where these would take much memory before they are
    summed, some heads are evaluated at a time.  Which ones depends on shapes and the number of
    threads alone.

    Args:
        call: the call with the addresses of operands, results and `dout`.
        operands: the operands.
        sums: (2, B H, T) row_max and row_sum.
        asked: the names of each operand whose gradient is wanted, by its place in `operands`.
    """
    grads: dict[int, Tensor] = {}
    groups = entry(sums.dtype, "relpos_groups", Call)(call) if call.rank else call.batch
    unsummed = {}
    for number, (name, *_) in asked.items():
        operand = operands[number]
        if name in CONTENT:
            grads[number] = torch.empty_like(operand)
            setattr(call, f"d{name}", _place(grads[number]))
        elif name in OF_ROWS:
            unsummed[number] = UnsummedGradient(groups if name in FACTORS else call.batch, operand.shape)
        else:
            unsummed[number] = UnsummedGradient(call.batch, (1, *operand.shape))
    for first, heads in _parts(call, unsummed.values(), sums.element_size()):
        for number, grad in _gradients_of_heads(call, first, heads, sums, unsummed, asked).items():
            if heads == call.heads:
                grads[number] = grad.view(operands[number].shape)
                continue
            if number not in grads:
                grads[number] = operands[number].new_zeros(operands[number].shape)
            own = grads[number].view(unsummed[number].shape)
            own = own[:, first : first + heads] if own.size(1) > 1 else own
            own += grad
    return grads


def _parts(call: Call, unsummed: Iterable[UnsummedGradient], element_size: int) -> Iterator[tuple[int, int]]:
    """Divide the heads of a backward pass into parts that fit in memory; yield (first head, number of heads) of each.

    Args:
        call: the whole call.
        unsummed: the gradients that take memory before they are summed.
        element_size: bytes of an element.
    """
    size = 0  # bytes of one head's gradients
    for grad in unsummed:
        if tuple(grad.shape[:2]) != (grad.rows, call.heads):
            size += grad.rows * math.prod(grad.shape[2:]) * element_size
    heads = max(MAX_UNSUMMED_BYTES // max(size, 1), 2 * call.threads)  # no thread is idle for long
    heads = min(call.heads, heads // call.threads * call.threads)
    for first in range(0, call.heads, heads):
        yield first, min(heads, call.heads - first)


def _gradients_of_heads(
    call: Call,
    first: int,
    heads: int,
    sums: Tensor,
    unsummed: dict[int, UnsummedGradient],
    asked: dict[int, tuple[str, ...]],
) -> dict[int, Tensor]:
    """Run the backward pass of `heads` heads from head `first` on; return what these add to the `unsummed` gradients.

    Each of these is summed to (B|1, heads|1, ...).  The kernel writes all other gradients in place.
    """
    if heads < call.heads:
        call = _call_of_heads(call, first, heads, sums.element_size())
        sums = sums.view(2, call.batch, call.all_heads, call.tgt_len)[:, :, first : first + heads].contiguous()
        call.row_max, call.row_sum = sums[0].data_ptr(), sums[1].data_ptr()
    found = {}
    for number, grad in unsummed.items():
        found[number] = sums.new_empty((grad.rows, heads, *grad.shape[2:]))
        for name in asked[number]:
            setattr(call, f"d{name}", found[number].data_ptr())
    _run("backward", call, sums.dtype)
    for number, grad in unsummed.items():
        summed = (grad.shape[0], heads if grad.shape[1] > 1 else 1, *grad.shape[2:])
        found[number] = found[number].sum_to_size(summed)
    return found


def _call_of_heads(call: Call, first: int, heads: int, element_size: int) -> Call:
    """Return a copy of a call that evaluates `heads` heads from head `first` on."""
    call = Call.from_buffer_copy(call)
    for name in (*TENSORS, *TABLES, "out", "dout", *(f"d{name}" for name in CONTENT)):
        place = getattr(call, name)
        if place.data:
            place.data += first * place.head_stride * element_size
    call.heads, call.first_head = heads, first
    return call
