"""The kernel's forward and backward pass over tensors, as operations of torch call them.

A call's tensors come as a list of those that there are; bit p of `kinds` says that the one at place
p of `PLACES` is among them, the bits after these that a pair of `ONE_TABLE` is one tensor.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.attention import operation
from relpos_fairseq.attention.native import call as calls
from relpos_fairseq.attention.native.call import FACTORS, OPERANDS, TABLES, TENSORS, Call, Numbers
from relpos_fairseq.attention.native.checks import check

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
