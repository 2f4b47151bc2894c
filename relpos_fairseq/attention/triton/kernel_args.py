"""Define what the kernels are given: named tuples of pointers and strides, sizes, compile-time flags, block sizes."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering import Window
from relpos_fairseq.attention.triton.operands import Operands
from relpos_fairseq.attention.triton.refusal import interpreted

# ---- Block sizes, warps and pipeline stages of every kernel.
# They follow from what is computed alone, and nothing is tuned at run time: a resumed run sums in the
# same order.  Chosen so that ptxas keeps all in registers for sm_90 (255 a thread).  What a cell of a
# tile reads and keeps beside its logit costs registers: kernels that meet tables of vectors have
# eight cells a thread, others up to 32.


KERNELS = ("forward", "rows", "keys")


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Args:
        rows: queries of a tile.
        keys: keys of a tile.
        warps: warps of a program.
        stages: stages of the software pipeline.
    """

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Work:
    """What a call's kernels do, as far as registers go.

    Args:
        dtype: of queries and keys.
        dim: head_dim, a power of two.
        rank: of static factors, a power of two, or 0.
        tables: tables of vectors are met.
        product: two of them multiply the content.
        scalars: scalars want a gradient: sums along the diagonals of square tiles.
        gate: the gate among them.
    """

    dtype: torch.dtype
    dim: int
    rank: int = 0
    tables: bool = False
    product: bool = False
    scalars: bool = False
    gate: bool = False


def launch_of(kernel: str, work: Work) -> Launch:
    if work.dtype in (torch.float32, torch.float64):
        return _full_precision(kernel, work)
    wide = work.dim + work.rank > 64
    heavy = work.tables or work.rank > 0
    if kernel == "forward":
        if work.dim > 64:
            return Launch(64, 32, 8, 2)
        return Launch(64, 64, 8, 2) if heavy else Launch(128, 64, 8, 2)
    if kernel == "keys":
        if work.dim > 64:
            return Launch(32, 32, 8, 2)
        return Launch(32, 64, 8, 1 if work.product else 2)
    if work.scalars:
        plain = not (work.gate or wide or heavy)
        return Launch(64, 64, 8, 2) if plain else Launch(32, 32, 4, 2)
    return Launch(64, 32, 8, 2) if heavy or wide else Launch(128, 64, 8, 2)


def _full_precision(kernel: str, work: Work) -> Launch:
    """Products of fp32 are formed in registers, an operand's whole rows at a time."""
    if kernel == "keys":
        return Launch(32, 32, 8, 1)
    if kernel == "forward":
        return Launch(16, 32, 4, 1)
    return Launch(16, 16, 4, 1) if work.scalars else Launch(32, 16, 8, 1)


def long_table_launch_of(kernel: str, dtype: torch.dtype, dim: int, rank: int = 0, both: bool = False) -> Launch:
    """The launch of a kernel where there are vectors over many distances: tiles are square.

    Args:
        kernel: one of KERNELS, or "diagonals".
        dtype: of queries and keys.
        dim: head_dim, a power of two.
        rank: of static factors, a power of two, or 0.
        both: queries and keys have such vectors.
    """
    total = (dim + rank) * (2 if dtype in (torch.float32, torch.float64) else 1)
    if kernel == "forward" and total <= 64 and not both:
        return Launch(64, 64, 8, 2)
    return Launch(32, 32, 8 if kernel == "diagonals" and both else 4, 1)


# ---- The records that the kernels take and hand on: an operand is named once, wherever it goes.
# Triton takes named tuples apart when it compiles, and nothing is left of them in a kernel.  An
# operand that a call does not have stands as `q`, and the flag that says so leaves it unread.


# The operands, as `operands.Operands` has them, and masks; in a kernel, pointers.
OperandPointers = namedtuple(
    "Given",
    [
        "q",
        "right_q",
        "wide_q",  # (B, H, T, D)
        "k",
        "wide_k",
        "v",  # (B, H, S, D)
        "query_products",
        "query_multipliers",
        "content_band",  # (B, H, T, width)
        "key_products",
        "key_multipliers",  # (B, H, S, width)
        "query_vectors",
        "key_vectors",  # (H|1, wide_width, D) from distance wide_low on
        "static",
        "gate",  # (H|1, scalar_width) from distance scalar_low on
        "query_factors",  # (B|1, H|1, T, RANK)
        "key_factors",  # (B|1, H|1, S, RANK)
        "reset",  # (H|1, 2)
        "first",  # (B|1,)
        "padding",
        "documents",  # (B, S)
    ],
)

# What the backward pass begins with; in a kernel, pointers.
SavedPointers = namedtuple(
    "Saved",
    [
        "dout",  # (B, H, T, D)
        "top",
        "mass",
        "delta",  # (B, H, T) largest logit, log2 of sum exp(logit - top), mean gradient
        "dprobs",  # (B, H, T, width) of the band's probabilities, of their sums in the tails
    ],
)

# Of batch, heads, rows; 0 where a tensor is broadcast.  qp and kp: products and multipliers, qf and
# kf: factors, qv and kv: vectors, of queries and of keys; out: the output and its gradient.
_WHOLE = ("q", "k", "v", "out", "qp", "kp", "qf", "kf")
_BY_HEAD = ("static", "gate", "reset", "qv", "kv")
Strides = namedtuple(
    "Strides",
    [*(f"{tensor}_{axis}" for tensor in _WHOLE for axis in "bht"), *(f"{tensor}_h" for tensor in _BY_HEAD), "first_b"],
)

# Sizes, the first query's slot, windows of distances, and dropout's seed.
Sizes = namedtuple(
    "Sizes",
    [
        "heads",
        "tgt_len",
        "src_len",
        "start",
        "low",
        "high",  # at and outside of which nothing changes with distance
        "vector_low",
        "width",
        "scalar_low",
        "scalar_width",
        "wide_low",
        "wide_width",
        "seed",
    ],
)
# Those change from call to call, and no kernel is compiled anew for them: that needs arguments of
# their own, from which a kernel makes its record.
VARYING = [name for name in Sizes._fields if name != "heads"]

# What a kernel is compiled for.
Flags = namedtuple(
    "Flags",
    [
        "D",
        "DP",
        "RANK",
        "RP",  # channels and factors, as they are and padded to a power of two
        "ROWS",
        "KEYS",
        "ACC",
        "PRECISION",
        "SCALE",  # a tile; types of sums and of products in fp32
        "CAUSAL",
        "PADDING",
        "WINDOW",
        "DOCUMENTS",  # masks
        "DROP",  # dropout, of 65536
        # which operands there are; bits 1, 2, 4 of RESET: it replaces vectors, scalars, factors
        "ADD_Q",
        "ADD_K",
        "PRODUCT",
        "REPLACED",
        "VALUES",
        "STATIC",
        "GATE",
        "FACTORS",
        "RESET",
        "WIDE_Q",
        "WIDE_K",
        # which tails are among visible distances: of vectors, of all tables
        "LEFT",
        "RIGHT",
        "FAR_LEFT",
        "FAR_RIGHT",
    ],
)

# A head's reset: the first token's slot, the logits of its row and of its column.
HeadReset = namedtuple("Reset", ["first", "row", "column"])

# A tile's queries, or its keys; a block that a call does not have is the content's.
TileSide = namedtuple(
    "Side",
    [
        "first",
        "index",
        "inside",  # (n,)
        "content",
        "right",
        "wide",  # (n, DP): for the content, for its right tail, for wide tables
        "factors",  # (n, RP)
    ],
)

# Where a tile's cells stand: i, inside (rows, 1), j, there (1, keys), distances d (rows, keys); or,
# where keys own gradients, (1, rows), (keys, 1), (keys, rows).
TileCells = namedtuple("Cells", ["i", "j", "d", "inside", "there"])

# A tile's logits, its content, and what multiplies it: 1 where a call does not have it.
TileLogits = namedtuple("Logits", ["s", "content", "gate", "by_query", "by_key"])

# What the backward pass begins with, of a tile's rows: (rows, DP), and (rows,) each.
SavedRows = namedtuple("Known", ["dout", "top", "mass", "delta"])


def flags_of(values: dict) -> Flags:
    """Return a kernel's flags: constants to the compiler, plain where it is interpreted."""
    chosen = (values[name] for name in Flags._fields)
    return Flags(*chosen) if interpreted() else Flags(*map(tl.constexpr, chosen))


# ---- What the kernels are told beside tensors: numbers, flags that a kernel is compiled for, masks.


_ACCUMULATORS = {torch.float64: tl.float64}
NEAR_TABLES = (  # operands over the window of vectors
    "query_products",
    "key_products",
    "query_multipliers",
    "key_multipliers",
    "content_band",
)
_BY_SCALARS = ("static", "gate")
MASKS = ("first", "padding", "documents")  # tensors without gradients


class CallNumbers(NamedTuple):
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


def describe(inputs: AttentionInputs, low: Operands) -> CallNumbers:
    """Return the numbers of a lowered call.

    Args:
        inputs: the call.
        low: the same, lowered.
    """
    tensors, outer = low.tensors, _outer(low, inputs.causal)
    grads = torch.is_grad_enabled() and any(x.requires_grad for x in tensors.values())
    learns = {name: name in tensors and tensors[name].requires_grad for name in _BY_SCALARS}
    return CallNumbers(
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


def make_call(tensors: dict[str, Tensor], given: CallNumbers, scale: float) -> Call:
    """Return a call as the kernels' arguments.

    Args:
        tensors: operands and masks by name.
        given: its numbers.
        scale: factor of the content and of the vector products.
    """
    q = tensors["q"]
    flags = _flags(tensors, given, scale)
    work = _work(q.dtype, flags)
    launches = {kernel: launch_of(kernel, work) for kernel in KERNELS}
    if flags["WIDE_Q"] or flags["WIDE_K"]:
        both = flags["WIDE_Q"] and flags["WIDE_K"]
        launches = {
            kernel: long_table_launch_of(kernel, work.dtype, work.dim, work.rank, both)
            for kernel in (*KERNELS, "diagonals")
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
    if low.value_vectors is not None or any(name in low.tensors for name in NEAR_TABLES):
        windows.append(low.vectors)
    if any(name in low.tensors for name in _BY_SCALARS):
        windows.append(low.scalars)
    if windows:
        return Window(min(w.low for w in windows), max(w.high for w in windows))
    if causal:
        return Window(-1, 1)  # only tiles on the diagonal need the causal mask
    return Window(low.reach.lowest - 2, low.reach.lowest - 1)  # all keys are right of it


def _flags(tensors: dict[str, Tensor], given: CallNumbers, scale: float) -> dict:
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


def _work(dtype: torch.dtype, flags: dict) -> Work:
    tables = ("ADD_Q", "ADD_K", "PRODUCT", "REPLACED", "VALUES")
    return Work(
        dtype,
        flags["DP"],
        flags["RP"] if flags["FACTORS"] else 0,
        tables=any(flags[name] for name in tables),
        product=flags["PRODUCT"],
        scalars=flags["STATIC_GRAD"] or flags["GATE_GRAD"],
        gate=flags["GATE_GRAD"],
    )
