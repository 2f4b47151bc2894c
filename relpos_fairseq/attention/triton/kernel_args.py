"""Define what the kernels are given: named tuples of pointers and strides, sizes, compile-time flags, block sizes.

Every kernel reads `operands` and `saved` and writes `results`, which are pointers, with their `strides`.  `sizes` are
integers that change from call to call, and `F` are the flags that it is compiled for.  Triton takes named tuples apart
when it compiles, so that nothing is left of them in a kernel.  An operand that a call lacks is given as `q`, and a flag
keeps the kernel from reading it.

Terms used throughout.  `distance` is j - (start + i), of key j and query i.  A *window* low..high is a range of
distances; a table over a window has one row for each of them, and every distance outside reads the first or the last
row: the *clipped ends*, left and right.  The *near window* is that of tables of vectors over few distances, whose
products with queries or keys are stored.  A *long table* has vectors for more distances, and its products are formed
tile by tile.  Outside the *outer window* no table at all changes with distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering import Lowered, Window
from relpos_fairseq.attention.triton.refusal import interpreted

# ---------------------------------------------------------------------------------------------------------------------
# What a kernel takes.  Pointers are tensors where the kernel is launched; B, H, T, S, D: batch, heads, queries, keys,
# head_dim; shapes with H|1 are those of one table for all heads or of a table for each.


class OperandPointers(NamedTuple):
    """The tensors that logits and output are computed from, as `operands_of` returns them, and the masks."""

    q: Any  # (B, H, T, D)
    right_q: Any  # (B, H, T, D) queries times the last row of a trilinear table
    long_q: Any  # (B, H, T, D) queries that are multiplied with query_vectors
    k: Any  # (B, H, S, D)
    long_k: Any  # (B, H, S, D) keys that are multiplied with key_vectors
    v: Any  # (B, H, S, D)
    query_products: Any  # (B, H, T, near_width) added to q.k
    query_multipliers: Any  # (B, H, T, near_width) multiplied with q.k
    near_content: Any  # (B, H, T, near_width) what replaces q.k: sum_c q_c k_c w_c of a trilinear table
    key_products: Any  # (B, H, S, near_width)
    key_multipliers: Any  # (B, H, S, near_width)
    query_vectors: Any  # (H|1, long_width, D) a long table: row 0 is for distance long_low
    key_vectors: Any  # (H|1, long_width, D)
    static: Any  # (H|1, scalar_width) added to logits: column 0 is for distance scalar_low
    gate: Any  # (H|1, scalar_width) multiplied with q.k
    query_factors: Any  # (B|1, H|1, T, RANK)
    key_factors: Any  # (B|1, H|1, S, RANK)
    reset: Any  # (H|1, 2) logits of the first token's row and column
    first: Any  # (B|1,) slot of the first token
    padding: Any  # (B, S) 1: excluded
    documents: Any  # (B, S) a query sees keys of its own document only


class SavedPointers(NamedTuple):
    """What the backward pass reads beside the operands."""

    out: Any  # (B, H, T, D) the output
    out_error: Any  # (B, H, T, D) what rounding took from it
    dout: Any  # (B, H, T, D) its gradient
    row_max: Any  # (B, H, T) the largest logit
    log2_sum: Any  # (B, H, T) log2 of the sum of exp(logit - row_max)
    delta: Any  # (B, H, T) sum over keys of probability times its gradient
    probs: Any  # (B, H, T, near_width) probabilities by distance, the clipped ends' summed
    dprobs: Any  # (B, H, T, near_width) their gradient


class ForwardResults(NamedTuple):
    """What the forward kernel writes."""

    out: Any  # (B, H, T, D)
    out_error: Any  # (B, H, T, D)
    row_max: Any  # (B, H, T)
    log2_sum: Any  # (B, H, T)
    near_logits: Any  # (B, H, T, near_width) logits by distance; of the clipped ends, the log of summed exponentials


class DeltaResults(NamedTuple):
    """What the kernel before the other backward kernels writes."""

    delta: Any  # (B, H, T)


class RowsResults(NamedTuple):
    """Gradients that the backward kernel over blocks of queries writes."""

    dq: Any  # (B, H, T, D)
    dright_q: Any  # (B, H, T, D)
    dlong_q: Any  # (B, H, T, D)
    dquery_products: Any  # (B, H, T, near_width)
    dquery_multipliers: Any  # (B, H, T, near_width)
    dnear_content: Any  # (B, H, T, near_width)
    dquery_factors: Any  # (B, H, T, RANK)
    dscalars: Any  # (B, H, blocks, 2, outer_width + 4 KEYS) sums by distance: static, gate
    dsums: Any  # (B, H, blocks, 8) sums: static's and gate's left and right clipped ends, the reset's column


class KeysResults(NamedTuple):
    """Gradients that the backward kernel over blocks of keys writes."""

    dk: Any  # (B, H, S, D)
    dlong_k: Any  # (B, H, S, D)
    dv: Any  # (B, H, S, D)
    dkey_products: Any  # (B, H, S, near_width)
    dkey_multipliers: Any  # (B, H, S, near_width)
    dkey_factors: Any  # (B, H, S, RANK)


class DiagonalsResults(NamedTuple):
    """What the backward kernel over diagonals of tiles writes."""

    parts: Any  # (B, H, diagonals, 2, X, D) gradients of a long table's vectors: X lower and X upper distances


class Strides(NamedTuple):
    """Strides of batch (b), heads (h) and rows (t); 0 where a tensor is broadcast."""

    q_b: int  # q, right_q, long_q and their gradients
    q_h: int
    q_t: int
    k_b: int  # k, long_k and their gradients
    k_h: int
    k_t: int
    v_b: int
    v_h: int
    v_t: int
    out_b: int  # out, out_error, dout
    out_h: int
    out_t: int
    qp_b: int  # query_products, query_multipliers and their gradients
    qp_h: int
    qp_t: int
    kp_b: int  # key_products, key_multipliers and their gradients
    kp_h: int
    kp_t: int
    qf_b: int  # query_factors
    qf_h: int
    qf_t: int
    kf_b: int  # key_factors
    kf_h: int
    kf_t: int
    static_h: int
    gate_h: int
    reset_h: int
    qv_h: int  # query_vectors
    kv_h: int  # key_vectors
    first_b: int


class Sizes(NamedTuple):
    """Lengths and windows of distances: integers for which no kernel is compiled anew.

    They are arguments of their own: Triton compiles anew for an integer of a tuple that is 1 or divisible by 16.
    """

    heads: int
    tgt_len: int
    src_len: int
    start: int  # slot of the first query
    outer_low: int
    outer_high: int
    near_low: int
    near_width: int
    scalar_low: int  # the window of static and gate
    scalar_width: int
    long_low: int  # the lowest distance of visible pairs
    long_width: int  # from there to the highest


class Flags(NamedTuple):
    """What a kernel is compiled for."""

    D: int  # channels of a head
    DP: int  # the same, padded to a power of two
    RANK: int  # channels of the factors
    RP: int  # the same, padded
    ROWS: int  # queries of a tile
    KEYS: int  # keys of a tile
    ACC: tl.dtype  # type of sums
    PRECISION: str  # of products of fp32
    SCALE: float  # of q.k and of products with vectors
    CAUSAL: bool
    PADDING: bool
    WINDOW: int  # distances that a query sees; 0: all
    DOCUMENTS: bool
    DROPOUT: int  # of 65536
    QUERY_PRODUCTS: bool  # which operands there are
    KEY_PRODUCTS: bool
    MULTIPLIERS: bool
    TRILINEAR: bool
    VALUES: bool  # values have vectors: probabilities are wanted by distance
    STATIC: bool
    GATE: bool
    FACTORS: bool
    LONG_Q: bool
    LONG_K: bool
    RESET: int  # bits 1, 2, 4: the reset replaces what vectors, scalars, factors add
    NEAR_LEFT: bool  # visible distances lie in the near window's clipped ends
    NEAR_RIGHT: bool
    OUTER_LEFT: bool  # visible distances lie outside the outer window
    OUTER_RIGHT: bool
    OUT_ERROR: bool  # the backward pass needs what rounding took from the output
    STATIC_GRAD: bool
    GATE_GRAD: bool
    OF_KEYS: bool  # the long table is that of keys


# ---------------------------------------------------------------------------------------------------------------------
# What functions inside a kernel hand on.


class HeadReset(NamedTuple):
    """The reset of one head in one batch row."""

    first: Any  # slot of the first token
    row: Any  # logit of its row
    column: Any  # logit of its column


class TileSide(NamedTuple):
    """The queries, or the keys, of a tile of n; a block that a call lacks is `content`."""

    first: Any  # index of the first of them
    index: Any  # (n,)
    inside: Any  # (n,) whether there is such a query or key
    content: Any  # (n, DP) for q.k
    right: Any  # (n, DP) for q.k in the right clipped end of a trilinear table
    long: Any  # (n, DP) for a long table
    factors: Any  # (n, RP)


class TileCells(NamedTuple):
    """Indices and distances of a tile's cells: (rows, keys), or (keys, rows) where a program owns keys."""

    i: Any  # queries (rows, 1) or (1, rows)
    j: Any  # keys (1, keys) or (keys, 1)
    d: Any  # distances (rows, keys) or (keys, rows)
    inside: Any  # whether there is query i
    there: Any  # whether there is key j


class TileLogits(NamedTuple):
    """Logits of a tile and what they are products of; a factor that a call lacks is 1."""

    s: Any  # logits
    content: Any  # scale q.k
    gate: Any
    by_query: Any  # query_multipliers
    by_key: Any  # key_multipliers


class SavedRows(NamedTuple):
    """What the backward pass reads of a tile's queries."""

    dout: Any  # (rows, DP)
    row_max: Any  # (rows,)
    log2_sum: Any  # (rows,)
    delta: Any  # (rows,)


OWN_FLAGS = {  # which only these kernels depend on
    "OUT_ERROR": ("forward", "delta"),
    "STATIC_GRAD": ("rows",),
    "GATE_GRAD": ("rows",),
    "OF_KEYS": ("diagonals",),
}


def make_flags(kind: str, values: dict) -> Flags:
    """Return a kernel's flags from values by name: constants to the compiler, plain where it is interpreted."""
    for name, kinds in OWN_FLAGS.items():
        values[name] = values[name] and kind in kinds
    chosen = (values[name] for name in Flags._fields)
    return Flags(*chosen) if interpreted() else Flags(*map(tl.constexpr, chosen))


# ---------------------------------------------------------------------------------------------------------------------
# A call: the integers that an operation of torch takes, and the kernels' arguments that follow from them.

NEAR_TABLES = ("query_products", "key_products", "query_multipliers", "key_multipliers", "near_content")
MASKS = ("first", "padding", "documents")  # tensors without gradients
_BY_SCALARS = ("static", "gate")


# The integers that an operation of torch takes: those of `Sizes` that no tensor tells, flags, and whether products of
# fp32 are computed in TF32.
_FLAGS = ("CAUSAL", "WINDOW", "DROPOUT", "RESET", "VALUES", "OUT_ERROR", "STATIC_GRAD", "GATE_GRAD", "TF32")
NUMBERS = (*Sizes._fields[Sizes._fields.index("start") :], *_FLAGS)


def describe(inputs: AttentionInputs, low: Lowered) -> tuple[int, ...]:
    """Return the integers of a call, by NUMBERS.

    Args:
        inputs: the call.
        low: its operands.
    """
    tensors, reach = low.tensors, Window.visible(inputs)
    outer = _outer_window(low, reach, inputs.causal)
    learning = {name for name in tensors if name != "value_vectors" and tensors[name].requires_grad}
    grads = torch.is_grad_enabled() and bool(learning)
    found = dict(
        start=inputs.positions.query_start,
        outer_low=outer.low,
        outer_high=outer.high,
        near_low=low.vectors.low,
        near_width=low.vectors.width,
        scalar_low=low.scalars.low,
        scalar_width=low.scalars.width,
        long_low=reach.low,
        long_width=reach.width,
        CAUSAL=int(inputs.causal),
        WINDOW=inputs.window or 0,
        DROPOUT=round(inputs.dropout * 65536),
        RESET=low.reset_replaces,
        VALUES=int("value_vectors" in tensors),
        # Where probabilities are peaked, the gradient of a logit is a small difference of two large numbers, one of
        # which is computed from the output: the output's rounding to half precision would be all of the difference.
        OUT_ERROR=int(grads and inputs.q.dtype in (torch.float16, torch.bfloat16)),
        STATIC_GRAD=int("static" in learning),
        GATE_GRAD=int("gate" in learning),
        TF32=int(torch.backends.cuda.matmul.allow_tf32),  # as torch's own products of fp32
    )
    return tuple(found[name] for name in NUMBERS)


def _outer_window(low: Lowered, reach: Window, causal: bool) -> Window:
    """Return the window that holds the windows of all tables."""
    windows = []
    if any(name in low.tensors for name in ("value_vectors", *NEAR_TABLES)):
        windows.append(low.vectors)
    if any(name in low.tensors for name in _BY_SCALARS):
        windows.append(low.scalars)
    if windows:
        return Window(min(w.low for w in windows), max(w.high for w in windows))
    if causal:
        return Window(-1, 1)  # only tiles on the diagonal need the causal mask
    return Window(reach.low - 2, reach.low - 1)  # all keys are right of it


@dataclass(frozen=True)
class Call:
    """The kernels' arguments, the tensors that have gradients aside.

    Args:
        exact: type of logits.
        sizes: lengths and windows.
        flags: compile-time arguments by name.
        seed: of dropout.
        masks: tensors without gradients by name.
        launches: block sizes by kernel.
    """

    exact: torch.dtype
    sizes: Sizes
    flags: dict
    seed: int
    masks: dict[str, Tensor]
    launches: dict[str, Launch]

    @property
    def outer_width(self) -> int:
        """Return the number of distances of the outer window."""
        return self.sizes.outer_high - self.sizes.outer_low + 1

    @property
    def dropout_scale(self) -> float:
        """Return what dropout multiplies the probabilities by that it keeps."""
        return 65536 / (65536 - self.flags["DROPOUT"])


def make_call(tensors: dict[str, Tensor], given: dict[str, int], scale: float) -> Call:
    """Return the kernels' arguments.

    Args:
        tensors: operands and masks by name.
        given: the call's integers by name.
        scale: factor of q.k and of products with vectors.
    """
    q = tensors["q"]
    lengths = {"heads": q.size(1), "tgt_len": q.size(2), "src_len": tensors["k"].size(2)}
    sizes = Sizes(**lengths, **{name: given[name] for name in given if name in Sizes._fields})
    flags: dict[str, Any] = {name: given[name] for name in given if name not in Sizes._fields}
    flags |= _flags(tensors, sizes, given, scale)
    return Call(
        torch.promote_types(q.dtype, torch.float32),
        sizes,
        flags,
        int(tensors["seed"]) if "seed" in tensors else 1 << 40,  # always of 64 bits: one kernel serves all seeds
        {name: tensors[name] for name in MASKS if name in tensors},
        _launches(q.dtype, flags),
    )


def padded(channels: int) -> int:
    """Return the smallest power of two, at least 16 as products need, that holds so many channels."""
    return max(16, triton.next_power_of_2(channels))


PRESENT = {  # flags by the operand whose presence they tell
    "PADDING": "padding",
    "DOCUMENTS": "documents",
    "QUERY_PRODUCTS": "query_products",
    "KEY_PRODUCTS": "key_products",
    "MULTIPLIERS": "query_multipliers",
    "TRILINEAR": "near_content",
    "STATIC": "static",
    "GATE": "gate",
    "FACTORS": "query_factors",
    "LONG_Q": "query_vectors",
    "LONG_K": "key_vectors",
}


def _flags(tensors: dict[str, Tensor], sizes: Sizes, given: dict[str, int], scale: float) -> dict:
    """Return the flags that follow from tensors and windows."""
    dim = tensors["q"].size(-1)
    rank = tensors["query_factors"].size(-1) if "query_factors" in tensors else 1
    highest = sizes.long_low + sizes.long_width - 1
    return {flag: name in tensors for flag, name in PRESENT.items()} | {
        "D": dim,
        "DP": padded(dim),
        "RANK": rank,
        "RP": padded(rank),
        "ACC": tl.float64 if tensors["q"].dtype == torch.float64 else tl.float32,
        "PRECISION": "tf32" if given["TF32"] else "ieee",
        "SCALE": scale,
        "NEAR_LEFT": sizes.near_low >= sizes.long_low,
        "NEAR_RIGHT": sizes.near_low + sizes.near_width - 1 <= highest,
        "OUTER_LEFT": sizes.outer_low >= sizes.long_low,
        "OUTER_RIGHT": sizes.outer_high <= highest,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Block sizes, warps and pipeline stages.  They follow from what is computed alone, and nothing is tuned at run time: a
# resumed run sums in the same order.  They are chosen so that ptxas keeps all in registers for sm_90 (255 a thread).
# Whatever a cell of a tile reads and keeps beside its logit costs registers: kernels that read tables of vectors have
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
        tables: products with tables of vectors are read.
        product: two of them multiply q.k.
        scalars: scalars want a gradient: sums along the diagonals of square tiles.
        gate: the gate is among them.
    """

    dtype: torch.dtype
    dim: int
    rank: int = 0
    tables: bool = False
    product: bool = False
    scalars: bool = False
    gate: bool = False


def _launches(dtype: torch.dtype, flags: dict) -> dict[str, Launch]:
    """Return every kernel's launch."""
    work = Work(
        dtype,
        flags["DP"],
        flags["RP"] if flags["FACTORS"] else 0,
        any(flags[name] for name in ("QUERY_PRODUCTS", "KEY_PRODUCTS", "MULTIPLIERS", "TRILINEAR", "VALUES")),
        flags["MULTIPLIERS"],
        flags["STATIC_GRAD"] or flags["GATE_GRAD"],
        flags["GATE_GRAD"],
    )
    if not (flags["LONG_Q"] or flags["LONG_K"]):
        return {kernel: launch_of(kernel, work) for kernel in KERNELS}
    both = flags["LONG_Q"] and flags["LONG_K"]
    return {
        kernel: long_table_launch_of(kernel, dtype, work.dim, work.rank, both) for kernel in (*KERNELS, "diagonals")
    }


def launch_of(kernel: str, work: Work) -> Launch:
    """Return the launch of a kernel of KERNELS."""
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
    """Return the launch for fp32, whose products are formed in registers, an operand's whole rows at a time."""
    if kernel == "keys":
        return Launch(32, 32, 8, 1)
    if kernel == "forward":
        return Launch(16, 32, 4, 1)
    return Launch(16, 16, 4, 1) if work.scalars else Launch(32, 16, 8, 1)


def long_table_launch_of(kernel: str, dtype: torch.dtype, dim: int, rank: int = 0, both: bool = False) -> Launch:
    """Return the launch of a kernel that reads long tables: tiles are square.

    Args:
        kernel: one of KERNELS, or "diagonals".
        dtype: of queries and keys.
        dim: head_dim, a power of two.
        rank: of static factors, a power of two, or 0.
        both: queries and keys have such tables.
    """
    total = (dim + rank) * (2 if dtype in (torch.float32, torch.float64) else 1)
    if kernel == "forward" and total <= 64 and not both:
        return Launch(64, 64, 8, 2)
    return Launch(32, 32, 8 if kernel == "diagonals" and both else 4, 1)
