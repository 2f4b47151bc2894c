"""Call the kernel in C, forward and backward: its arguments as call.h declares them."""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from relpos_fairseq.attention import operation
from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering import (
    SAME_EVERYWHERE,
    DistanceRange,
    Lowered,
    Window,
    lower,
    needs_offset_table,
    relations_of_vectors,
)
from relpos_fairseq.attention.native import build
from relpos_fairseq.attention.native import call as calls
from relpos_fairseq.attention.operation import define

# ---- A call as the kernel reads it: call.h, field by field.


_number, _pointer = ctypes.c_int64, ctypes.c_void_p


class TensorArg(ctypes.Structure):
    """(B, H, length, channels): where it lies, and strides of batch, heads and rows."""

    _fields_ = [("data", _pointer), ("b", _number), ("h", _number), ("t", _number)]


class TableArg(ctypes.Structure):
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
        *((name, TensorArg) for name in (*TENSORS, "out")),
        *((name, TableArg) for name in TABLES),
        *((name, _pointer) for name in ("first", "padding", "documents", "top", "mass")),
        *((f"d{name}", TensorArg) for name in ("out", "q", "k", "v", "content_q", "content_k")),
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


# ---- What must be checked before the kernel runs, which has only addresses.
# An operand of another shape would be read past its end.


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


# ---- The operands of the kernel in C (call.h): a lowered call over the kernel's own windows.
# Tables of vectors share one window: a narrow band between two tails, or, where a term has more
# distances than `NARROW`, all distances.  Scalars lie over all distances.


NARROW = 192  # distances up to which a window is kept narrow


def lower_for_c(inputs: AttentionInputs) -> Lowered:
    """Lower a call that `refusal` does not refuse; its tensors are the kernel's operands."""
    positions = inputs.positions
    everywhere = Window(positions.lowest_distance, positions.highest_distance)
    low = lower(inputs, _window(inputs, everywhere), everywhere, inputs.exact)
    operands = low.tensors
    q, k, content_q, content_k = inputs.exact_pairs()
    operands["v"] = inputs.v.to(inputs.exact)
    vectors = ("query_vectors", "key_vectors", "product_query")
    if inputs.rotated and any(name in operands for name in vectors):
        operands["content_q"], operands["content_k"] = content_q, content_k
    else:
        q, k = content_q, content_k
    operands["q"], operands["k"] = q, k
    return low


def _window(inputs: AttentionInputs, everywhere: Window) -> Window:
    """Return the distances beyond which no table of vectors changes, or all distances."""
    if relations := relations_of_vectors(inputs):
        narrow = Window.over(relations, DistanceRange(everywhere.low, everywhere.high))
    elif needs_offset_table(inputs):
        narrow = SAME_EVERYWHERE
    else:
        return everywhere
    return narrow if narrow.width <= min(NARROW, everywhere.width) else everywhere


# ---- The kernel's forward and backward pass over tensors, as operations of torch call them.
# A call's tensors come as a list of those that there are; bit p of `kinds` says that the one at place
# p of `PLACES` is among them, the bits after these that a pair of `ONE_TABLE` is one tensor.


_GRADIENTS = tuple(f"d{name}" for name in OPERANDS)
CONTENT = ("q", "k", "v", "content_q", "content_k")
_IS_TABLE = frozenset(TABLES)
_BY_HEAD = (*TENSORS, *TABLES, "out", "dout", *(f"d{name}" for name in CONTENT))
MASKS = ("first", "padding", "documents")
PLACES = (*OPERANDS, *MASKS, "seed")
ONE_TABLE = (("query_vectors", "key_vectors"), ("product_query", "product_key"))
AT_ONCE = 32 << 20  # bytes of gradients that the kernel writes apart, before they are summed
_Words = ctypes.c_int64 * (ctypes.sizeof(Call) // 8)  # a call's fields have 8 bytes each
_WORD = {name: getattr(Call, name).offset // 8 for name, _ in Call._fields_}


def arranged(given: dict[str, Tensor]) -> tuple[int, list[Tensor]]:
    """Return a call's tensors, given by their names, as `kinds` and the list that it describes."""
    alike = 0
    for bit, (first, second) in enumerate(ONE_TABLE, len(PLACES)):
        if first in given and given[first] is given.get(second):
            alike |= 1 << bit
            given = {name: tensor for name, tensor in given.items() if name != second}
    kinds, tensors = operation.arranged(PLACES, given)
    return kinds | alike, tensors


def forward(tensors: list[Tensor], kinds: int, numbers: list[int], scale: float) -> list[Tensor]:
    """Return the output, and the (2, N, T) largest logits and sums that its gradients need."""
    plan = _plan_of(kinds, tuple(numbers), scale)
    check(plan.numbers, zip(plan.names, tensors, strict=False))
    out, sums = results(tensors)
    call, laid = plan.call_of(tensors, out, sums)
    _run(calls.kernel(sums.dtype).relpos_forward, call)
    del laid  # not before: the call has the addresses alone
    return [out, sums]


def backward(
    grads: list[Tensor],
    results: list[Tensor],
    tensors: list[Tensor],
    kinds: int,
    numbers: list[int],
    scale: float,
    wanted: int,
) -> list[Tensor]:
    """Return the gradients of those of `tensors` whose bits `wanted` has, in their order."""
    (dout,), (out, sums) = grads, results
    plan = _plan_of(kinds, tuple(numbers), scale)
    call, laid = plan.call_of(tensors, out, sums)
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    _Words.from_buffer(call)[_WORD["dout"] : _WORD["dout"] + 4] = _place(dout)
    asked = {n: names for n, names in enumerate(plan.names) if wanted >> n & 1}
    found = _gradients(call, laid, sums, asked)
    return [found[number] for number in asked]


def results(tensors: list[Tensor], *rest) -> list[Tensor]:
    """Return room for what `forward` returns."""
    q, v = tensors[0], tensors[2]
    if q.size(-1) != v.size(-1):
        out = v.new_empty(*q.shape[:3], v.size(-1))
    elif q.stride(-1) == 1:
        out = torch.empty_like(q)
    else:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    return [out, q.new_empty((2, q.size(0) * q.size(1), q.size(2)))]


def gradients(tensors: list[Tensor], kinds: int, numbers: list[int], scale: float, wanted: int) -> list[Tensor]:
    """Return room for what `backward` returns."""
    found = []
    for number, (names, operand) in enumerate(zip(_names(kinds), tensors, strict=True)):
        if wanted >> number & 1:
            if names[0] in CONTENT and operand.stride(-1) == 1:
                found.append(torch.empty_like(operand))
            else:
                found.append(operand.new_empty(operand.shape))
    return found


def _names(kinds: int) -> list[tuple[str, ...]]:
    """Return the names of each of a call's tensors, in their order."""
    both = {pair[0]: pair for bit, pair in enumerate(ONE_TABLE, len(PLACES)) if kinds >> bit & 1}
    there = (name for place, name in enumerate(PLACES) if kinds >> place & 1)
    return [both.get(name, (name,)) for name in there]


@functools.lru_cache
def _plan_of(kinds: int, numbers: tuple[int, ...], scale: float) -> _Plan:
    """Return what all calls with these numbers have in common."""
    named = Numbers(*numbers)
    call = Call(**named._asdict(), scale=scale, all_heads=named.heads)
    names = _names(kinds)
    operands = sum(found[0] in OPERANDS for found in names)
    return _Plan(named, call, names[:operands], [name for (name,) in names[operands:]])


@dataclass(frozen=True)
class _Plan:
    """What calls that differ in tensors alone have in common.

    Args:
        numbers: of the call.
        call: the same as the kernel reads them, to be copied.
        names: of each operand; they come first among the tensors.
        rest: names of the other tensors.
    """

    numbers: Numbers
    call: Call
    names: list[tuple[str, ...]]
    rest: list[str]

    def call_of(self, tensors: list[Tensor], out: Tensor, sums: Tensor) -> tuple[Call, list[Tensor]]:
        """Tell a call where operands and results lie; return the operands too, as it reads them.

        Their channels follow one another, and tables are without gaps.
        """
        call = Call.from_buffer_copy(self.call)
        call.threads = torch.get_num_threads()
        words, laid = _Words.from_buffer(call), []
        for names, operand in zip(self.names, tensors, strict=False):
            name = names[0]
            if name in _IS_TABLE:
                operand = operand.contiguous()
                place = operand.data_ptr(), operand.stride(0) if operand.size(0) > 1 else 0
                for name in names:
                    words[_WORD[name] : _WORD[name] + 2] = place
            else:
                # Rows that read the same numbers share one gradient: of a batch of 1 only.
                expanded = name in FACTORS and operand.stride(0) == 0 and operand.size(0) > 1
                if expanded or operand.stride(-1) != 1:
                    operand = operand.contiguous()
                words[_WORD[name] : _WORD[name] + 4] = _place(operand)
            laid.append(operand)
        for name, tensor in zip(self.rest, tensors[len(laid) :], strict=True):
            words[_WORD[name]] = int(tensor) if name == "seed" else tensor.data_ptr()
            if name == "first":
                call.first_per_row = tensor.numel() > 1
        top, at = sums.data_ptr(), _WORD["out"]
        words[at : at + 4] = _place(out)
        words[_WORD["top"]] = top
        words[_WORD["mass"]] = top + sums.stride(0) * sums.element_size()
        return call, laid


def _place(x: Tensor) -> tuple[int, int, int, int]:
    """Where (B|1, H|1, length, channels) lies; strides are 0 where it is broadcast."""
    batch, heads, rows, _ = x.stride()
    if x.size(0) == 1:
        batch = 0
    if x.size(1) == 1:
        heads = 0
    return x.data_ptr(), batch, heads, rows


@dataclass
class _Apart:
    """A gradient that the kernel writes in several rows, before they are summed.

    Args:
        rows: of the batch, or groups of them.
        shape: of the operand: (B|1, H|1, ...).
    """

    rows: int
    shape: tuple[int, ...]


def _gradients(
    call: Call, laid: Sequence[Tensor], sums: Tensor, asked: dict[int, tuple[str, ...]]
) -> dict[int, Tensor]:
    """Return the gradients of operands, by number, of those in `asked` by number and names.

    The kernel writes those of tables for each head of each row of the batch, those of factors for
    each head of the groups that rows are taken in.  Where these would take much memory before they
    are summed, some heads are evaluated at a time; which ones depends on shapes and the number of
    threads alone.
    """
    grads: dict[int, Tensor] = {}
    groups = calls.kernel(sums.dtype).relpos_groups(call) if call.rank else call.batch
    words, apart = _Words.from_buffer(call), {}
    for number, (name, *_) in asked.items():
        operand = laid[number]
        if name in CONTENT:
            grads[number] = grad = torch.empty_like(operand)
            at = _WORD[f"d{name}"]
            words[at : at + 4] = _place(grad)
        elif name in FACTORS:
            apart[number] = _Apart(groups, operand.shape)
        else:
            apart[number] = _Apart(call.batch, (1, *operand.shape))
    for first, heads in _parts(call, apart.values(), sums.element_size()):
        for number, grad in _of_part(call, first, heads, sums, apart, asked).items():
            if heads == call.heads:
                grads[number] = grad.view(laid[number].shape)
                continue
            if number not in grads:
                grads[number] = laid[number].new_zeros(laid[number].shape)
            own = grads[number].view(apart[number].shape)
            own = own[:, first : first + heads] if own.size(1) > 1 else own
            own += grad
    return grads


def _parts(call: Call, apart: Iterable[_Apart], element_size: int) -> Iterator[tuple[int, int]]:
    """First head and number of heads of each part of a backward pass.

    Args:
        call: the call.
        apart: gradients that the kernel writes in several rows.
        element_size: bytes of a number.
    """
    all_heads, threads = call.heads, call.threads
    size = 0  # bytes of a head, before they are summed
    for grad in apart:
        if tuple(grad.shape[:2]) != (grad.rows, all_heads):
            size += grad.rows * math.prod(grad.shape[2:]) * element_size
    heads = max(AT_ONCE // max(size, 1), 2 * threads)  # no thread is idle for long
    heads = min(all_heads, heads // threads * threads)
    for first in range(0, all_heads, heads):
        yield first, min(heads, all_heads - first)


def _of_part(
    call: Call, first: int, heads: int, sums: Tensor, apart: dict[int, _Apart], asked: dict[int, tuple[str, ...]]
) -> dict[int, Tensor]:
    """Evaluate some heads; what they give to operands: (B|1, heads|1, ...)."""
    if heads < call.heads:
        call = Call.from_buffer_copy(call)
        size = sums.element_size()
        for name in _BY_HEAD:
            place = getattr(call, name)
            if place.data:
                place.data += first * place.h * size
        sums = sums.view(2, call.batch, call.heads, call.tgt)[:, :, first : first + heads]
        sums = sums.contiguous()
        call.top, call.mass = sums[0].data_ptr(), sums[1].data_ptr()
        call.heads, call.first_head = heads, first
    found, words = {}, _Words.from_buffer(call)
    for number, grad in apart.items():
        found[number] = sums.new_empty((grad.rows, heads, *grad.shape[2:]))
        for name in asked[number]:
            words[_WORD[f"d{name}"]] = found[number].data_ptr()
    _run(calls.kernel(sums.dtype).relpos_backward, call)
    for number, grad in apart.items():
        own = (grad.shape[0], heads if grad.shape[1] > 1 else 1, *grad.shape[2:])
        found[number] = found[number].sum_to_size(own)
    return found


def _run(function: Callable[[Call], int], call: Call) -> None:
    if call.batch and function(call):  # a batch without rows has nothing to evaluate
        raise MemoryError(
            f"the attention kernel has no memory for its buffers ({call.threads} threads, each for "
            f"a head of {call.tgt} queries and {call.src} keys, {call.dim} channels): use fewer "
            f"threads (OMP_NUM_THREADS), or --attention-backend blocked"
        )


# ---- The kernel as an operation of torch, and the call of it that evaluates `AttentionInputs`.


DROPS = 65536  # parts of all probabilities, in which a dropout is counted
_kernel = define(
    "attend", sys.modules[__name__], ["CPU"], ("attention by the compiled kernel", "use --attention-backend reference")
)


def attend(inputs: AttentionInputs) -> Tensor:
    """Output (B, H, T, Dv) of inputs that `refusal` does not refuse."""
    low = lower_for_c(inputs)
    numbers = describe(inputs, low)
    check_device(low.tensors.items())
    kinds, tensors = arranged({**low.tensors, **_masks(inputs, low)})
    (out,) = _kernel(1, kinds, numbers, inputs.scale, tensors)
    return out.to(inputs.v.dtype)


def describe(inputs: AttentionInputs, low: Lowered) -> Numbers:
    """Return the numbers of a call.

    Args:
        inputs: the call.
        low: the same, lowered.
    """
    positions, operands = inputs.positions, low.tensors
    batch, heads, _, dim = (inputs.content_q if inputs.rotated else inputs.q).shape
    rank = operands["query_factors"].size(-1) if "query_factors" in operands else 0
    lowest = width = wide = 0
    if any(name in operands for name in OVER_DISTANCES):
        lowest, width = low.vectors.low, low.vectors.width
        wide = int(low.vectors.equals(low.scalars))  # a row for each of all distances
    return Numbers(
        batch=batch,
        heads=heads,
        tgt=positions.tgt_len,
        src=positions.src_len,
        dim=dim,
        value_dim=inputs.v.size(-1),
        rank=rank,
        start=positions.query_start,
        low=lowest,
        width=width,
        wide=wide,
        causal=int(inputs.causal),
        window=inputs.window or 0,
        reset_kinds=low.reset_kinds,
        drop=round(inputs.dropout * DROPS),
    )


def _masks(inputs: AttentionInputs, low: Lowered) -> dict[str, Tensor]:
    """Return the tensors without gradients, as the kernel reads them."""
    found, shape = {}, (inputs.q.size(0), inputs.positions.src_len)
    if low.reset_kinds:
        found["first"] = low.first.to(torch.int64).contiguous()
    if inputs.key_padding is not None:
        padding = inputs.key_padding.to(torch.bool).expand(shape).contiguous()
        found["padding"] = padding.view(torch.uint8)
    if inputs.documents is not None:
        found["documents"] = inputs.documents.to(torch.int64).expand(shape).contiguous()
    if inputs.dropout:
        found["seed"] = torch.randint(1 << 40, 1 << 62, (), dtype=torch.long)
    return found
