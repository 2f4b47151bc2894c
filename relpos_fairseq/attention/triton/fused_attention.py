"""Launch the kernels of fused attention, forward and backward, as an operation of torch."""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.operation import Given, arranged, define, named
from relpos_fairseq.attention.triton import kernel_args as args
from relpos_fairseq.attention.triton.backward import diagonal_gradients, key_gradients, query_gradients, sum_delta
from relpos_fairseq.attention.triton.forward import attend_queries
from relpos_fairseq.attention.triton.kernel_args import MASKS, NEAR_TABLES, NUMBERS, Call, Sizes, describe, make_call
from relpos_fairseq.attention.triton.operands import multiply, operands_of

RESULTS = {  # what every kernel writes
    "forward": args.ForwardResults,
    "delta": args.DeltaResults,
    "rows": args.RowsResults,
    "keys": args.KeysResults,
    "diagonals": args.DiagonalsResults,
}
NAMES = tuple(name for name in args.OperandPointers._fields if name not in MASKS)  # operands with gradients
CONTENT = ("q", "k", "v", "right_q", "long_q", "long_k")
FACTORS = ("query_factors", "key_factors")
LAID_OUT = (*CONTENT, *NEAR_TABLES)  # whose gradients have the operand's strides
DENSE = ("near_content", "query_vectors", "key_vectors")  # which a kernel takes without strides
SAME_STRIDES = (  # which a kernel reads by the same strides
    ("q", "right_q", "long_q"),
    ("k", "long_k"),
    ("query_products", "query_multipliers"),
    ("key_products", "key_multipliers"),
)
STRIDES_OF = {  # prefixes of `Strides` that are no operand's name
    "qp": "query_products",
    "kp": "key_products",
    "qf": "query_factors",
    "kf": "key_factors",
    "qv": "query_vectors",
    "kv": "key_vectors",
}
PLACES = (*NAMES, *MASKS, "seed")
Tensors = dict[str, Tensor | None]


def fused_attention(inputs: AttentionInputs) -> Tensor:
    """Return the output (B, H, T, D) of inputs that `refusal` does not refuse."""
    low = operands_of(inputs)
    numbers = describe(inputs, low)
    given = dict(low.tensors)
    value_vectors = given.pop("value_vectors", None)
    if low.first is not None:
        given["first"] = low.first
    if inputs.documents is not None:
        given["documents"] = inputs.documents
    if inputs.key_padding is not None:
        given["padding"] = inputs.key_padding.to(torch.uint8).contiguous()
    if inputs.dropout:
        given["seed"] = torch.randint(1 << 40, 1 << 62, (), dtype=torch.long)
    present, tensors = arranged(PLACES, given)
    outputs = 1 if value_vectors is None else 2
    out, *probs = _kernels(outputs, present, numbers, float(inputs.scale), tensors)
    if value_vectors is None:
        return out
    return out + multiply(probs[0], value_vectors.transpose(-1, -2))  # probabilities by distance: (B, H, T, near_width)


# ---------------------------------------------------------------------------------------------------------------------
# The operation of torch: `operation.Kernel`.


def results(given: Given) -> list[Tensor]:
    """Return empty tensors of the shapes, types and strides of what `forward` returns."""
    numbers = dict(zip(NUMBERS, given.numbers, strict=True))
    q = _lay_out(named(PLACES, given.present, given.tensors))["q"]
    exact = torch.promote_types(q.dtype, torch.float32)
    found = [torch.empty_like(q)]
    found += [q.new_empty((*q.shape[:3], numbers["near_width"]))] * numbers["VALUES"]
    found += [q.new_empty(q.shape[:3], dtype=exact) for _ in range(2)]
    return [*found, torch.empty_like(q)] if numbers["OUT_ERROR"] else found


def forward(given: Given) -> list[Tensor]:
    """Return the output, probabilities by distance where values have vectors, and what gradients need."""
    tensors = named(PLACES, given.present, given.tensors)
    call, laid = make_call(tensors, dict(zip(NUMBERS, given.numbers, strict=True)), given.scale), _lay_out(tensors)
    q = laid["q"]
    made: Tensors = {"out": torch.empty_like(q)}
    made |= {name: q.new_empty(q.shape[:3], dtype=call.exact) for name in ("row_max", "log2_sum")}
    if call.flags["OUT_ERROR"]:
        made["out_error"] = torch.empty_like(q)
    if call.flags["VALUES"]:
        made["near_logits"] = q.new_full((*q.shape[:3], call.sizes.near_width), -math.inf, dtype=call.exact)
    _run("forward", call, laid, made)
    probs = []
    if call.flags["VALUES"]:
        logits = made["near_logits"]
        logits -= made["row_max"][..., None]
        logits -= made["log2_sum"][..., None] * math.log(2)
        probs = [(logits.exp_() * call.dropout_scale).to(q.dtype)]
    error = [made["out_error"]] if call.flags["OUT_ERROR"] else []
    return [made["out"], *probs, made["row_max"], made["log2_sum"], *error]


def backward(grads: list[Tensor], results: list[Tensor], given: Given, wanted: int) -> list[Tensor]:
    """Return the gradients of those tensors whose bits `wanted` has, in their order."""
    tensors = named(PLACES, given.present, given.tensors)
    call, laid = make_call(tensors, dict(zip(NUMBERS, given.numbers, strict=True)), given.scale), _lay_out(tensors)
    dout, *dprobs = grads
    out, *probs = results[: len(grads)]
    row_max, log2_sum, *error = results[len(grads) :]
    if dout.stride() != out.stride():
        dout = torch.empty_like(out).copy_(dout)
    made = {"out": out, "dout": dout, "row_max": row_max, "log2_sum": log2_sum, "delta": torch.empty_like(row_max)}
    made["out_error"] = error[0] if error else None
    if dprobs:
        made |= {"probs": probs[0], "dprobs": dprobs[0].contiguous()}
    _run("delta", call, laid, made)
    made |= _empty_gradients(call, laid)
    _run("rows", call, laid, made)
    _run("keys", call, laid, made)
    made |= _scalar_gradients(call, made)
    if laid["query_vectors"] is not None or laid["key_vectors"] is not None:
        made |= _vector_gradients(call, laid, made)
    names = (name for number, name in enumerate(tensors) if wanted >> number & 1)
    return [_fitted(made[f"d{name}"], name, laid[name]) for name in names]


def gradients(given: Given, wanted: int) -> list[Tensor]:
    """Return empty tensors of the shapes, types and strides of what `backward` returns."""
    tensors = named(PLACES, given.present, given.tensors)
    laid = _lay_out(tensors)
    names = (name for number, name in enumerate(tensors) if wanted >> number & 1)
    return [_like(name, laid[name]) for name in names]


_kernels = define(
    "attend_fused",
    sys.modules[__name__],
    ["CUDA", "CPU"],  # which interprets them
    ("attention by kernels", "use --attention-backend reference"),
)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors before and after the kernels.


def _lay_out(given: Tensors) -> Tensors:
    """Return every operand as the kernels read it (None: absent); copied only where its strides do not fit."""
    laid: Tensors = dict.fromkeys(NAMES)
    for name in filter(given.__contains__, NAMES):
        tensor = given[name]
        # A gradient is given its operand's strides.  Factors may be broadcast over the batch by strides of 0.
        fits = name in FACTORS or torch.empty_like(tensor).stride() == tensor.stride()
        if name in DENSE or not fits or tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
        laid[name] = tensor
    for names in SAME_STRIDES:
        there = [name for name in names if laid[name] is not None]
        if any(laid[name].stride() != laid[there[0]].stride() for name in there):
            laid |= {name: laid[name].contiguous() for name in there}
    return laid


def _empty_gradients(call: Call, given: Tensors) -> Tensors:
    """Return the tensors that the kernels write gradients to; cells that belong to no query and key stay 0."""
    q = given["q"]
    batch, heads, rows, _ = q.shape
    made: Tensors = {}
    for name in (*CONTENT, *NEAR_TABLES, *FACTORS):
        if given[name] is None:
            continue
        if name in FACTORS:
            made[f"d{name}"] = q.new_empty(batch, heads, *given[name].shape[2:])
        else:
            empty = torch.empty_like if name in CONTENT else torch.zeros_like
            made[f"d{name}"] = empty(given[name])
    tiles = call.launches["rows"]
    blocks = triton.cdiv(rows, tiles.rows)
    made["dsums"] = q.new_zeros(batch, heads, blocks, 8, dtype=call.exact)
    if call.flags["STATIC_GRAD"] or call.flags["GATE_GRAD"]:
        size = (batch, heads, blocks, 2, call.outer_width + 4 * tiles.keys)
        made["dscalars"] = q.new_zeros(size, dtype=call.exact)
    return made


def _scalar_gradients(call: Call, made: Tensors) -> Tensors:
    """Return the gradients of static, gate and reset: sums over batch, blocks of queries, and a cell's distances."""
    found: Tensors = {}
    sums = made["dsums"].sum((0, 2))  # (H, 8)
    low, width = call.sizes.scalar_low, call.sizes.scalar_width
    first = low - call.sizes.outer_low + 2 * call.launches["rows"].keys  # the cell of the window's lowest distance
    for place, name in enumerate(("static", "gate")):
        if not call.flags[f"{name.upper()}_GRAD"]:
            continue
        by_distance = made["dscalars"][:, :, :, place].sum((0, 2))  # (H, cells)
        grad = by_distance[:, first : first + width].clone()
        grad[:, 0] += by_distance[:, :first].sum(1) + sums[:, 2 * place]
        grad[:, -1] += by_distance[:, first + width :].sum(1) + sums[:, 2 * place + 1]
        found[f"d{name}"] = grad
    # The row's logit is one number for all keys: softmax does not depend on it.
    found["dreset"] = torch.stack([torch.zeros_like(sums[:, 4]), sums[:, 4]], dim=-1)
    return found


def _vector_gradients(call: Call, given: Tensors, made: Tensors) -> Tensors:
    """Return the gradients (H, long_width, D) of long tables: sums of what diagonals of tiles gave."""
    batch, heads, _, dim = given["q"].shape
    block, start = call.launches["diagonals"].keys, call.sizes.start
    lowest, width = call.sizes.long_low, call.sizes.long_width
    # Diagonal s of tiles has the distances from (s - 1) block + 1 - start on, two blocks less one.
    first = (lowest + start + 1 - block) // block
    last = (lowest + width - 1 + start - 1) // block + 1
    skipped = lowest - ((first - 1) * block + 1 - start)
    found: Tensors = {}
    for table in ("query_vectors", "key_vectors"):
        if given[table] is None:
            continue
        parts = given["q"].new_empty(batch, heads, last - first + 1, 2, block, dim, dtype=call.exact)
        of_keys = table == "key_vectors"
        _run("diagonals", call, given, {**made, "parts": parts}, (first, last - first + 1), of_keys)
        # the upper distances of a diagonal are the lower ones of the next: (H, diagonals + 1, X, D)
        parts = parts.sum(0)
        both = torch.nn.functional.pad(parts[:, :, 0], (0, 0, 0, 0, 0, 1))
        both[:, 1:] += parts[:, :, 1]
        found[f"d{table}"] = both.flatten(1, 2)[:, skipped : skipped + width]
    return found


def _fitted(grad: Tensor, name: str, like: Tensor) -> Tensor:
    """Return a gradient summed over what was broadcast, in the tensor's type, with the strides of `_like`."""
    grad = grad.sum_to_size(like.shape).to(like.dtype)
    return grad if name in LAID_OUT else grad.contiguous()


def _like(name: str, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor) if name in LAID_OUT else tensor.new_empty(tensor.shape)


# ---------------------------------------------------------------------------------------------------------------------
# A launch.

VARYING = [*Sizes._fields[1:], "seed", "first_diagonal", "diagonals"]  # change from call to call


@triton.jit(do_not_specialize=VARYING, repr=lambda compiled: f"{compiled.constants['KIND']}_kernel")
def attention_kernel(
    operands,
    saved,
    results,
    strides,
    heads,
    tgt_len,
    src_len,
    start,
    outer_low,
    outer_high,
    near_low,
    near_width,
    scalar_low,
    scalar_width,
    long_low,
    long_width,
    seed,
    first_diagonal,
    diagonals,
    F: tl.constexpr,
    KIND: tl.constexpr,
):
    """Run the kernel of RESULTS that KIND names; the compiler drops the arguments that the kernel does not use."""
    sizes = Sizes(
        heads,
        tgt_len,
        src_len,
        start,
        outer_low,
        outer_high,
        near_low,
        near_width,
        scalar_low,
        scalar_width,
        long_low,
        long_width,
    )
    if KIND == "forward":
        attend_queries(operands, results, strides, sizes, seed, F)
    elif KIND == "delta":
        sum_delta(saved, results, strides, sizes, F)
    elif KIND == "rows":
        query_gradients(operands, saved, results, strides, sizes, seed, F)
    elif KIND == "keys":
        key_gradients(operands, saved, results, strides, sizes, seed, F)
    else:
        diagonal_gradients(operands, saved, results, strides, sizes, seed, first_diagonal, diagonals, F)


def _run(
    kind: str, call: Call, given: Tensors, made: Tensors, diagonals: tuple[int, int] = (0, 0), of_keys: bool = False
) -> None:
    """Launch a kernel of RESULTS; `diagonals` are the first diagonal of tiles and their number."""
    tiles = call.launches["forward" if kind == "delta" else kind]
    tensors = {**given, **made, **call.masks}
    nothing = given["q"]  # for pointers that the flags leave unread

    def pointers(record: Any) -> tuple[Tensor, ...]:
        found = (tensors.get(name) for name in record._fields)
        return record(*(nothing if tensor is None else tensor for tensor in found))

    blocks = triton.cdiv(call.sizes.tgt_len, tiles.rows)
    if kind == "keys":
        blocks = triton.cdiv(call.sizes.src_len, tiles.keys)
    elif kind == "diagonals":
        blocks = diagonals[1]
    attention_kernel[(nothing.size(0) * nothing.size(1) * blocks,)](
        pointers(args.OperandPointers),
        pointers(args.SavedPointers),
        pointers(RESULTS[kind]),
        _strides(tensors),
        *call.sizes,
        call.seed,
        *diagonals,
        args.make_flags(kind, {**call.flags, "ROWS": tiles.rows, "KEYS": tiles.keys, "OF_KEYS": of_keys}),
        kind,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def _strides(tensors: Tensors) -> args.Strides:
    """Return the strides of the tensor that each field of `Strides` begins with."""
    names = STRIDES_OF
    if tensors["query_multipliers"] is not None:
        names = names | {"qp": "query_multipliers", "kp": "key_multipliers"}

    def stride(field: str) -> int:
        prefix, letter = field.rsplit("_", 1)
        tensor = tensors.get(names.get(prefix, prefix))
        if tensor is None:
            return 0
        # Tables over distances begin with heads, and `first` has the batch alone.
        axis = "bht".index(letter) if tensor.dim() == 4 else 0
        return tensor.stride(axis) if tensor.size(axis) > 1 else 0

    return args.Strides(*map(stride, args.Strides._fields))
