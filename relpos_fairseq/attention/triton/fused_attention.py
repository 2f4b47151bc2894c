"""The kernels' forward and backward pass over tensors, as an operation of torch calls them."""

from __future__ import annotations

import math
import sys

import torch
import triton
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.operation import arranged, define, named
from relpos_fairseq.attention.triton.backward import delta_kernel, diagonals_kernel, keys_kernel, rows_kernel
from relpos_fairseq.attention.triton.forward import forward_kernel
from relpos_fairseq.attention.triton.kernel_args import (
    MASKS,
    NEAR_TABLES,
    Call,
    CallNumbers,
    OperandPointers,
    SavedPointers,
    Strides,
    describe,
    flags_of,
    make_call,
)
from relpos_fairseq.attention.triton.operands import multiply, operands_of

NAMES = (  # operands with gradients, see `operands`
    "q",
    "k",
    "v",
    "right_q",
    "query_products",
    "key_products",
    "query_multipliers",
    "key_multipliers",
    "content_band",
    "static",
    "gate",
    "query_factors",
    "key_factors",
    "reset",
    "wide_q",
    "wide_k",
    "query_vectors",
    "key_vectors",
)
CONTENT = ("q", "k", "v", "right_q", "wide_q", "wide_k")
FACTORS = ("query_factors", "key_factors")
LAID_OUT = (*CONTENT, *NEAR_TABLES)  # whose gradients have their strides
DENSE = ("content_band", "query_vectors", "key_vectors")  # which a kernel takes without strides
ALIKE = (  # which a kernel reads by the same strides
    ("q", "right_q", "wide_q"),
    ("k", "wide_k"),
    ("query_products", "query_multipliers"),
    ("key_products", "key_multipliers"),
)
PLACES = (*NAMES, *MASKS, "seed")
Tensors = dict[str, Tensor | None]


def attend(inputs: AttentionInputs) -> Tensor:
    """Output (B, H, T, D) of inputs that `refusal` does not refuse."""
    low = operands_of(inputs)
    given = dict(low.tensors)
    if low.first is not None:
        given["first"] = low.first
    if inputs.documents is not None:
        given["documents"] = inputs.documents
    if inputs.key_padding is not None:
        given["padding"] = inputs.key_padding.to(torch.uint8).contiguous()
    if inputs.dropout:
        given["seed"] = torch.randint(1 << 40, 1 << 62, (), dtype=torch.long)
    kinds, tensors = arranged(PLACES, given)
    outputs = 1 if low.value_vectors is None else 2
    found = _kernels(outputs, kinds, describe(inputs, low), float(inputs.scale), tensors)
    if low.value_vectors is None:
        return found[0]
    out, probs = found  # of the band, tails summed: (B, H, T, W)
    return out + multiply(probs, low.value_vectors.transpose(-1, -2))


def results(tensors: list[Tensor], kinds: int, numbers: list[int], scale: float) -> list[Tensor]:
    """Return room for what `forward` returns."""
    given = CallNumbers(*numbers)
    q = _laid_out(named(PLACES, kinds, tensors))["q"]
    exact = torch.promote_types(q.dtype, torch.float32)
    width = given.vector_high - given.vector_low + 1
    found = [torch.empty_like(q)]
    found += [q.new_empty((*q.shape[:3], width))] * given.values
    found += [q.new_empty(q.shape[:3], dtype=exact) for _ in range(2)]
    return [*found, torch.empty_like(q)] if given.rest else found


def forward(tensors: list[Tensor], kinds: int, numbers: list[int], scale: float) -> list[Tensor]:
    """Return the output, probabilities where values have vectors, and what gradients need."""
    tensors = named(PLACES, kinds, tensors)
    call, given = make_call(tensors, CallNumbers(*numbers), scale), _laid_out(tensors)
    q = given["q"]
    out = torch.empty_like(q)
    top, mass = (q.new_empty(q.shape[:3], dtype=call.exact) for _ in range(2))
    logits, probs = None, []
    if call.flags["VALUES"]:
        logits = top.new_full((*top.shape, call.numbers["width"]), -math.inf)
    rest = [torch.empty_like(out)] if call.flags["REST"] else []
    made = {"out": out, "rest": rest[0] if rest else None, "top": top, "mass": mass}
    _run("forward", forward_kernel, call, given, made | {"value": logits})
    if logits is not None:
        logits -= top[..., None]
        logits -= mass[..., None] * math.log(2)
        probs = [(logits.exp_() * call.inverse).to(q.dtype)]
    return [out, *probs, top, mass, *rest]


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
    tensors = named(PLACES, kinds, tensors)
    call, given = make_call(tensors, CallNumbers(*numbers), scale), _laid_out(tensors)
    dout, *dprobs = grads
    out, *probs = results[: len(grads)]
    top, mass, *rest = results[len(grads) :]
    if dout.stride() != out.stride():
        dout = torch.empty_like(out).copy_(dout)
    made = {"out": out, "rest": rest[0] if rest else None, "dout": dout, "top": top, "mass": mass}
    made["delta"] = torch.empty_like(top)
    if dprobs:
        made |= {"probs": probs[0], "dprobs": dprobs[0].contiguous()}
    _run("delta", delta_kernel, call, given, made)
    made |= _room(call, given)
    _run("rows", rows_kernel, call, given, made)
    _run("keys", keys_kernel, call, given, made)
    made |= _of_scalars(call, made)
    if given["query_vectors"] is not None or given["key_vectors"] is not None:
        made |= _of_vectors(call, given, made)
    names = (name for number, name in enumerate(tensors) if wanted >> number & 1)
    return [_fitted(made[f"d{name}"], name, given[name]) for name in names]


def gradients(tensors: list[Tensor], kinds: int, numbers: list[int], scale: float, wanted: int) -> list[Tensor]:
    """Return room for what `backward` returns."""
    tensors = named(PLACES, kinds, tensors)
    given = _laid_out(tensors)
    names = (name for number, name in enumerate(tensors) if wanted >> number & 1)
    return [_like(name, given[name]) for name in names]


_kernels = define(
    "attend_fused",
    sys.modules[__name__],
    ["CUDA", "CPU"],  # which interprets them
    ("attention by kernels", "use --attention-backend reference"),
)


def _laid_out(given: Tensors) -> Tensors:
    """Tensors whose gradients can have their strides; alike where a kernel takes them so."""
    laid: Tensors = dict.fromkeys(NAMES)
    for name in filter(given.__contains__, NAMES):
        tensor = given[name]
        # Factors that are broadcast over the batch are right with strides of 0.
        fits = name in FACTORS or torch.empty_like(tensor).stride() == tensor.stride()
        if name in DENSE or not fits or tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
        laid[name] = tensor
    for names in ALIKE:
        there = [name for name in names if laid[name] is not None]
        if any(laid[name].stride() != laid[there[0]].stride() for name in there):
            laid |= {name: laid[name].contiguous() for name in there}
    return laid


def _room(call: Call, given: Tensors) -> Tensors:
    """Where the kernels put gradients; cells that belong to no pair stay 0."""
    q = given["q"]
    batch, heads, rows, _ = q.shape
    made: Tensors = {}
    for name in (*CONTENT, *NEAR_TABLES, *FACTORS):
        if given[name] is None:
            continue
        if name in FACTORS:
            made[f"d{name}"] = q.new_empty(batch, heads, *given[name].shape[2:])
        else:
            room = torch.empty_like if name in CONTENT else torch.zeros_like
            made[f"d{name}"] = room(given[name])
    tiles = call.launches["rows"]
    blocks = triton.cdiv(rows, tiles.rows)
    made["dsums"] = q.new_zeros(batch, heads, blocks, 8, dtype=call.exact)
    if call.flags["STATIC_GRAD"] or call.flags["GATE_GRAD"]:
        size = (batch, heads, blocks, 2, call.outer.width + 4 * tiles.keys)
        made["dscalars"] = q.new_zeros(size, dtype=call.exact)
    return made


def _of_scalars(call: Call, made: Tensors) -> Tensors:
    """Sums over the batch and blocks of rows, and over distances that read one cell."""
    found: Tensors = {}
    sums = made["dsums"].sum((0, 2))  # (H, 8)
    window, margin = call.scalars, 2 * call.launches["rows"].keys
    first = window.low - call.outer.low + margin  # the cell of the window's lowest distance
    for place, name in enumerate(("static", "gate")):
        if not call.flags[f"{name.upper()}_GRAD"]:
            continue
        by_distance = made["dscalars"][:, :, :, place].sum((0, 2))  # (H, cells)
        grad = by_distance[:, first : first + window.width].clone()
        grad[:, 0] += by_distance[:, :first].sum(1) + sums[:, 2 * place]
        grad[:, -1] += by_distance[:, first + window.width :].sum(1) + sums[:, 2 * place + 1]
        found[f"d{name}"] = grad
    # The row's logit is one number for all keys, which softmax does not see.
    found["dreset"] = torch.stack([torch.zeros_like(sums[:, 4]), sums[:, 4]], dim=-1)
    return found


def _of_vectors(call: Call, given: Tensors, made: Tensors) -> Tensors:
    """Gradients of vectors over many distances: sums of what diagonals of tiles gave."""
    batch, heads, _, dim = given["q"].shape
    numbers, block = call.numbers, call.launches["diagonals"].keys
    start, lowest, width = (numbers[name] for name in ("start", "wide_low", "wide_width"))
    # Diagonal s of tiles has the distances from (s - 1) block + 1 - start, two blocks less one.
    first = (lowest + start + 1 - block) // block
    last = (lowest + width - 1 + start - 1) // block + 1
    skipped = lowest - ((first - 1) * block + 1 - start)
    chosen = {"first_diagonal": first, "diagonals": last - first + 1}
    found: Tensors = {}
    for table in ("query_vectors", "key_vectors"):
        if given[table] is None:
            continue
        parts = given["q"].new_empty(batch, heads, last - first + 1, 2, block, dim, dtype=call.exact)
        chosen["OF_KEYS"] = table == "key_vectors"
        _run("diagonals", diagonals_kernel, call, given, {**made, "parts": parts}, chosen)
        parts = parts.sum(0)
        both = torch.nn.functional.pad(parts[:, :, 0], (0, 0, 0, 0, 0, 1))
        both[:, 1:] += parts[:, :, 1]
        found[f"d{table}"] = both.flatten(1, 2)[:, skipped : skipped + width]
    return found


def _fitted(grad: Tensor, name: str, like: Tensor) -> Tensor:
    """A gradient summed over what was broadcast, in the tensor's type, laid out as `_like`."""
    grad = grad.sum_to_size(like.shape).to(like.dtype)
    return grad if name in LAID_OUT else grad.contiguous()


def _like(name: str, tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor) if name in LAID_OUT else tensor.new_empty(tensor.shape)


def _run(kind: str, kernel, call: Call, given: Tensors, made: Tensors, chosen: dict | None = None) -> None:
    """Launch a kernel; its arguments are found by name, `chosen` ones among them."""
    tiles = call.launches["forward" if kind == "delta" else kind]
    tensors = {**given, **made, **call.masks}
    nothing = given["q"]  # for pointers that the flags leave unread

    def pointer(name: str) -> Tensor:
        tensor = tensors.get(name.removesuffix("_ptr"))
        return nothing if tensor is None else tensor

    strides = _strides(tensors)
    values = {**call.numbers, **call.flags, **strides._asdict(), **(chosen or {})}
    values |= {"ROWS": tiles.rows, "KEYS": tiles.keys}
    values |= {"given": OperandPointers(*map(pointer, OperandPointers._fields)), "strides": strides}
    values |= {"saved": SavedPointers(*map(pointer, SavedPointers._fields)), "F": flags_of(values)}
    arguments = {name: pointer(name) if name.endswith("_ptr") else values[name] for name in kernel.arg_names}
    rows, keys = call.numbers["tgt_len"], call.numbers["src_len"]
    blocks = triton.cdiv(keys, tiles.keys) if kind == "keys" else triton.cdiv(rows, tiles.rows)
    if kind == "diagonals":
        blocks = chosen["diagonals"]
    grid = (nothing.size(0) * nothing.size(1) * blocks,)
    kernel[grid](**arguments, num_warps=tiles.warps, num_stages=tiles.stages)


def _strides(tensors: Tensors) -> Strides:
    """Return strides by the names of `Strides`, of the tensor that each begins with."""
    named = {
        "qp": "query_products" if tensors["query_multipliers"] is None else "query_multipliers",
        "kp": "key_products" if tensors["key_multipliers"] is None else "key_multipliers",
        "qf": "query_factors",
        "kf": "key_factors",
        "qv": "query_vectors",
        "kv": "key_vectors",
    }

    def stride(field: str) -> int:
        short, letter = field.rsplit("_", 1)
        tensor = tensors.get(named.get(short, short))
        if tensor is None:
            return 0
        # Tables over distances begin with heads, and `first` has the batch alone.
        axis = "bht".index(letter) if tensor.dim() == 4 else 0
        return tensor.stride(axis) if tensor.size(axis) > 1 else 0

    return Strides(*map(stride, Strides._fields))
