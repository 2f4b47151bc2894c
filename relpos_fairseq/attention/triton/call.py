"""What the kernels are told beside tensors: numbers, flags that a kernel is compiled for, masks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering import Window
from relpos_fairseq.attention.triton import launch
from relpos_fairseq.attention.triton.launch import Launch
from relpos_fairseq.attention.triton.operands import Operands

_ACCUMULATORS = {torch.float64: tl.float64}
BANDS = (  # operands over the window of vectors
    "query_products",
    "key_products",
    "query_multipliers",
    "key_multipliers",
    "content_band",
)
_BY_SCALARS = ("static", "gate")
MASKS = ("first", "padding", "documents")  # tensors without gradients


class Numbers(NamedTuple):
    """What the kernels are told beside tensors, as an operation of torch takes it: whole numbers.

    Windows of distances are given by their lowest and highest: `outer`, outside of which nothing at
    all changes, that of vectors, that of scalars, and the distances of visible pairs.
    """

    start: int
    outer_low: int
    outer_high: int
    vector_low: int
    vector_high: int
    scalar_low: int
    scalar_high: int
    lowest: int
    highest: int
    causal: int
    window: int
    drop: int
    reset_kinds: int
    values: int
    rest: int
    static_grad: int
    gate_grad: int
    tf32: int


def describe(inputs: AttentionInputs, low: Operands) -> Numbers:
    """Return the numbers of a lowered call.

    Args:
        inputs: the call.
        low: the same, lowered.
    """
    tensors, outer = low.tensors, _outer(low, inputs.causal)
    grads = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    learns = {name: name in tensors and tensors[name].requires_grad for name in _BY_SCALARS}
    return Numbers(
        start=inputs.positions.query_start,
        outer_low=outer.low,
        outer_high=outer.high,
        vector_low=low.vectors.low,
        vector_high=low.vectors.high,
        scalar_low=low.scalars.low,
        scalar_high=low.scalars.high,
        lowest=low.reach.lowest,
        highest=low.reach.highest,
        causal=int(inputs.causal),
        window=inputs.window or 0,
        drop=round(inputs.dropout * 65536),
        reset_kinds=low.reset_kinds,
        values=int(low.value_vectors is not None),
        # Where probabilities are peaked, a gradient is the difference of a probability's own and
        # their mean, which the output gives: its rounding to half precision would be all of it.
        rest=int(grads and inputs.q.dtype in (torch.float16, torch.bfloat16)),
        static_grad=int(learns["static"]),
        gate_grad=int(learns["gate"]),
        tf32=int(torch.backends.cuda.matmul.allow_tf32),  # fp32 products are as torch's own
    )


@dataclass(frozen=True)
class Call:
    """One attention call, without the tensors that have gradients.

    Args:
        exact: the type of logits.
        outer: window outside of which nothing at all changes.
        scalars: window of tables of scalars.
        numbers: kernels' arguments by name.
        flags: kernels' compile-time arguments by name.
        masks: kernels' tensors without gradients by name: first, padding, documents.
        launches: each kernel's block sizes.
    """

    exact: torch.dtype
    outer: Window
    scalars: Window
    numbers: dict[str, int]
    flags: dict
    masks: dict[str, Tensor]
    launches: dict[str, Launch]

    @property
    def inverse(self) -> float:
        """What dropout multiplies the kept by."""
        return 65536 / (65536 - self.flags["DROP"])


def make_call(tensors: dict[str, Tensor], given: Numbers, scale: float) -> Call:
    """Return a call as the kernels' arguments.

    Args:
        tensors: operands and masks by name.
        given: its numbers.
        scale: factor of the content and of the vector products.
    """
    q = tensors["q"]
    flags = _flags(tensors, given, scale)
    work = _work(q.dtype, flags)
    launches = {kernel: launch.launch_of(kernel, work) for kernel in launch.KERNELS}
    if flags["WIDE_Q"] or flags["WIDE_K"]:
        both = flags["WIDE_Q"] and flags["WIDE_K"]
        launches = {
            kernel: launch.wide_launch_of(kernel, work.dtype, work.dim, work.rank, both)
            for kernel in (*launch.KERNELS, "diagonals")
        }
    numbers = {
        "heads": q.size(1),
        "tgt_len": q.size(2),
        "src_len": tensors["k"].size(2),
        "start": given.start,
        "low": given.outer_low,
        "high": given.outer_high,
        "vector_low": given.vector_low,
        "width": given.vector_high - given.vector_low + 1,
        "scalar_low": given.scalar_low,
        "scalar_width": given.scalar_high - given.scalar_low + 1,
        # Always of 64 bits, so that one compiled kernel serves all seeds.
        "seed": int(tensors["seed"]) if "seed" in tensors else 1 << 40,
        "wide_low": given.lowest,
        "wide_width": given.highest - given.lowest + 1,
    }
    return Call(
        torch.promote_types(q.dtype, torch.float32),
        Window(given.outer_low, given.outer_high),
        Window(given.scalar_low, given.scalar_high),
        numbers,
        flags,
        {name: tensors[name] for name in MASKS if name in tensors},
        launches,
    )


def power(size: int) -> int:
    """The block that holds `size` channels: a power of two, as products need 16 at least."""
    return max(16, triton.next_power_of_2(size))


def _outer(low: Operands, causal: bool) -> Window:
    windows = []
    if low.value_vectors is not None or any(name in low.tensors for name in BANDS):
        windows.append(low.vectors)
    if any(name in low.tensors for name in _BY_SCALARS):
        windows.append(low.scalars)
    if windows:
        return Window(min(w.low for w in windows), max(w.high for w in windows))
    if causal:
        return Window(-1, 1)  # only tiles on the diagonal need the causal mask
    return Window(low.reach.lowest - 2, low.reach.lowest - 1)  # all keys are right of it


def _flags(tensors: dict[str, Tensor], given: Numbers, scale: float) -> dict:
    dim = tensors["q"].size(-1)
    rank = tensors["query_factors"].size(-1) if "query_factors" in tensors else 1
    return {
        "D": dim,
        "DP": power(dim),
        "RANK": rank,
        "RP": power(rank),
        "ACC": _ACCUMULATORS.get(tensors["q"].dtype, tl.float32),
        "SCALE": scale,
        "CAUSAL": bool(given.causal),
        "PADDING": "padding" in tensors,
        "WINDOW": given.window,
        "DOCUMENTS": "documents" in tensors,
        "DROP": given.drop,
        "ADD_Q": "query_products" in tensors,
        "ADD_K": "key_products" in tensors,
        "WIDE_Q": "query_vectors" in tensors,
        "WIDE_K": "key_vectors" in tensors,
        "PRODUCT": "query_multipliers" in tensors,
        "REPLACED": "content_band" in tensors,
        "VALUES": bool(given.values),
        "STATIC": "static" in tensors,
        "GATE": "gate" in tensors,
        "FACTORS": "query_factors" in tensors,
        "RESET": given.reset_kinds,
        "LEFT": given.vector_low >= given.lowest,
        "RIGHT": given.vector_high <= given.highest,
        "FAR_LEFT": given.outer_low >= given.lowest,
        "FAR_RIGHT": given.outer_high <= given.highest,
        "STATIC_GRAD": bool(given.static_grad),
        "GATE_GRAD": bool(given.gate_grad),
        "REST": bool(given.rest),
        "PRECISION": "tf32" if given.tf32 else "ieee",
    }


def _work(dtype: torch.dtype, flags: dict) -> launch.Work:
    tables = ("ADD_Q", "ADD_K", "PRODUCT", "REPLACED", "VALUES")
    return launch.Work(
        dtype,
        flags["DP"],
        flags["RP"] if flags["FACTORS"] else 0,
        tables=any(flags[name] for name in tables),
        product=flags["PRODUCT"],
        scalars=flags["STATIC_GRAD"] or flags["GATE_GRAD"],
        gate=flags["GATE_GRAD"],
    )
