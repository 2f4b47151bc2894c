"""What the kernels are told beside tensors: numbers, flags that a kernel is compiled for, masks."""

from __future__ import annotations

from dataclasses import dataclass

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
_BY_VECTORS = (
    "query_products",
    "key_products",
    "query_multipliers",
    "key_multipliers",
    "content_band",
)
_BY_SCALARS = ("static", "gate")


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
    masks: dict[str, Tensor | None]
    launches: dict[str, Launch]

    @property
    def inverse(self) -> float:
        """What dropout multiplies the kept by."""
        return 65536 / (65536 - self.flags["DROP"])


def make_call(inputs: AttentionInputs, low: Operands, seed: int) -> Call:
    """Describe a lowered call.

    Args:
        inputs: the call.
        low: the same, lowered.
        seed: of dropout.
    """
    tensors = low.tensors
    outer = _outer(low, inputs.causal)
    flags = _flags(inputs, low, outer)
    work = _work(tensors["q"].dtype, flags)
    launches = {kernel: launch.launch_of(kernel, work) for kernel in launch.KERNELS}
    if flags["WIDE_Q"] or flags["WIDE_K"]:
        both = flags["WIDE_Q"] and flags["WIDE_K"]
        launches = {
            kernel: launch.wide_launch_of(kernel, work.dtype, work.dim, work.rank, both)
            for kernel in (*launch.KERNELS, "diagonals")
        }
    padding = inputs.key_padding
    masks = {
        "first": low.first,
        "documents": inputs.documents,
        "padding": None if padding is None else padding.to(torch.uint8).contiguous(),
    }
    numbers = {
        "heads": tensors["q"].size(1),
        "tgt_len": tensors["q"].size(2),
        "src_len": tensors["k"].size(2),
        "start": inputs.positions.query_start,
        "low": outer.low,
        "high": outer.high,
        "vector_low": low.vectors.low,
        "width": low.vectors.width,
        "scalar_low": low.scalars.low,
        "scalar_width": low.scalars.width,
        "seed": seed,
        "wide_low": low.reach.lowest,
        "wide_width": low.reach.highest - low.reach.lowest + 1,
        "first_b": int(low.first is not None and low.first.size(0) > 1),
    }
    return Call(inputs.exact, outer, low.scalars, numbers, flags, masks, launches)


def power(size: int) -> int:
    """The block that holds `size` channels: a power of two, as products need 16 at least."""
    return max(16, triton.next_power_of_2(size))


def _outer(low: Operands, causal: bool) -> Window:
    windows = []
    if low.value_vectors is not None or any(name in low.tensors for name in _BY_VECTORS):
        windows.append(low.vectors)
    if any(name in low.tensors for name in _BY_SCALARS):
        windows.append(low.scalars)
    if windows:
        return Window(min(w.low for w in windows), max(w.high for w in windows))
    if causal:
        return Window(-1, 1)  # only tiles on the diagonal need the causal mask
    return Window(low.reach.lowest - 2, low.reach.lowest - 1)  # all keys are right of it


def _flags(inputs: AttentionInputs, low: Operands, outer: Window) -> dict:
    tensors, reach = low.tensors, low.reach
    dim = tensors["q"].size(-1)
    rank = tensors["query_factors"].size(-1) if "query_factors" in tensors else 1
    grads = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    learns = {name: name in tensors and tensors[name].requires_grad for name in _BY_SCALARS}
    return {
        "D": dim,
        "DP": power(dim),
        "RANK": rank,
        "RP": power(rank),
        "ACC": _ACCUMULATORS.get(inputs.q.dtype, tl.float32),
        "SCALE": float(inputs.scale),
        "CAUSAL": inputs.causal,
        "PADDING": inputs.key_padding is not None,
        "WINDOW": inputs.window or 0,
        "DOCUMENTS": inputs.documents is not None,
        "DROP": round(inputs.dropout * 65536),
        "ADD_Q": "query_products" in tensors,
        "ADD_K": "key_products" in tensors,
        "WIDE_Q": "query_vectors" in tensors,
        "WIDE_K": "key_vectors" in tensors,
        "PRODUCT": "query_multipliers" in tensors,
        "REPLACED": "content_band" in tensors,
        "VALUES": low.value_vectors is not None,
        "STATIC": "static" in tensors,
        "GATE": "gate" in tensors,
        "FACTORS": "query_factors" in tensors,
        "RESET": low.reset_kinds,
        "LEFT": low.vectors.low >= reach.lowest,
        "RIGHT": low.vectors.high <= reach.highest,
        "FAR_LEFT": outer.low >= reach.lowest,
        "FAR_RIGHT": outer.high <= reach.highest,
        "STATIC_GRAD": learns["static"],
        "GATE_GRAD": learns["gate"],
        # Where probabilities are peaked, a gradient is the difference of a probability's own and
        # their mean, which the output gives: its rounding to half precision would be all of it.
        "REST": grads and inputs.q.dtype in (torch.float16, torch.bfloat16),
        "PRECISION": precision(),
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


def precision() -> str:
    """How fp32 products are formed: as torch's own matrix products are."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
