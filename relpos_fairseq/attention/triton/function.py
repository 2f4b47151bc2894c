"""The kernels' forward and backward pass as one function of autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.triton import launch
from relpos_fairseq.attention.triton.backward import delta_kernel, keys_kernel, rows_kernel
from relpos_fairseq.attention.triton.forward import forward_kernel
from relpos_fairseq.attention.triton.lowering import Lowered, lower
from relpos_fairseq.attention.triton.windows import meet

NAMES = (
    "q", "k", "v", "right", "aq", "ak", "pq", "pk", "band", "static", "gate", "f", "g", "theta",
)  # fmt: skip
_ACCUMULATORS = {torch.float64: tl.float64}


@dataclass(frozen=True)
class Call:
    """What the kernels are told beside tensors.

    Args:
        inputs: the call.
        low: the call, lowered.
        seed: of dropout.
    """

    inputs: AttentionInputs
    low: Lowered
    seed: int

    @property
    def threshold(self) -> int:
        """Of 65536 values, how many drop a cell."""
        return round(self.inputs.dropout * 65536)


def attend(inputs: AttentionInputs) -> Tensor:
    """Output (B, H, T, D) of inputs that `refusal` does not refuse."""
    low = lower(inputs)
    seed = 1 << 40
    if inputs.dropout:
        # Always of 64 bits, so that one compiled kernel serves all seeds.
        seed = int(torch.randint(1 << 40, 1 << 62, (), dtype=torch.long))
    call = Call(inputs, low, seed)
    out, probs = _Attention.apply(call, *(low.tensors.get(name) for name in NAMES))
    if low.value_vectors is not None:
        out = out + meet(probs, low.value_vectors.transpose(-1, -2))
    return out


class _Attention(torch.autograd.Function):
    """Output, and where values have vectors the band's probabilities (B, H, T, W), tails summed."""

    @staticmethod
    def forward(ctx, call: Call, *tensors: Tensor | None) -> tuple[Tensor, Tensor | None]:
        given = _laid_out(dict(zip(NAMES, tensors, strict=True)))
        q, exact = given["q"], call.inputs.exact
        batch, heads, rows, _ = q.shape
        out = torch.empty_like(q)
        lse = q.new_empty(batch * heads, rows, dtype=exact)
        logits = None
        if call.low.value_vectors is not None:
            size = (batch, heads, rows, call.low.vectors.width)
            logits = torch.full(size, float("-inf"), dtype=exact, device=q.device)
        made = {"out": out, "lse": lse, "value": logits}
        _run("forward", forward_kernel, call, given, made)
        probs = None
        if logits is not None:
            inverse = 65536 / (65536 - call.threshold)
            logits = logits - lse.view(batch, heads, rows, 1) * torch.log(lse.new_tensor(2.0))
            probs = (logits.exp() * inverse).to(given["v"].dtype)
        ctx.call = call
        ctx.save_for_backward(out, lse, probs, *given.values())
        return out, probs

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor, dprobs: Tensor | None) -> tuple:
        call = ctx.call
        out, lse, probs, *tensors = ctx.saved_tensors
        given = dict(zip(NAMES, tensors, strict=True))
        if dout.stride() != out.stride():
            dout = torch.empty_like(out).copy_(dout)
        if dprobs is not None:
            dprobs = dprobs.contiguous()
        made = {"out": out, "dout": dout, "lse": lse, "probs": probs, "dprobs": dprobs}
        made["delta"] = torch.empty_like(lse)
        _run("delta", delta_kernel, call, given, made)
        made |= _gradients(call, given)
        _run("rows", rows_kernel, call, given, made)
        _run("keys", keys_kernel, call, given, made)
        made |= _scalar_gradients(call, given, made)
        grads = [None if given[n] is None else _fitted(made[f"d{n}"], given[n]) for n in NAMES]
        return None, *grads


def _laid_out(given: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Tensors whose gradients may have the same strides, pairs alike."""
    laid = {}
    for name, tensor in given.items():
        if tensor is not None and name not in ("f", "g"):
            own = tensor.stride(-1) == 1 and torch.empty_like(tensor).stride() == tensor.stride()
            tensor = tensor if own and name != "band" else tensor.contiguous()
        elif tensor is not None and tensor.stride(-1) != 1:
            tensor = tensor.contiguous()
        laid[name] = tensor
    for one, other in (("q", "right"), ("aq", "pq"), ("ak", "pk")):
        pair = laid[one], laid[other]
        if None not in pair and pair[0].stride() != pair[1].stride():
            laid[one], laid[other] = (tensor.contiguous() for tensor in pair)
    return laid


def _gradients(call: Call, given: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Where the kernels put gradients; cells that belong to no pair stay 0."""
    q, exact = given["q"], call.inputs.exact
    batch, heads, rows, _ = q.shape
    made: dict[str, Tensor | None] = {}
    for name in ("q", "k", "v", "right"):
        made[f"d{name}"] = None if given[name] is None else torch.empty_like(given[name])
    for name in ("aq", "ak", "pq", "pk", "band"):
        made[f"d{name}"] = None if given[name] is None else torch.zeros_like(given[name])
    for name in ("f", "g"):
        if given[name] is not None:
            made[f"d{name}"] = q.new_empty(batch, heads, *given[name].shape[2:])
    tiles = launch_for("rows", call, given)
    blocks = triton.cdiv(rows, tiles.rows)
    low, high = _window(call.low)
    if given["static"] is not None or given["gate"] is not None:
        size = (batch, heads, blocks, 2, high - low + 1 + 4 * tiles.keys)
        made["dscalars"] = q.new_zeros(size, dtype=exact)
    made["dsums"] = q.new_zeros(batch, heads, blocks, 8, dtype=exact)
    return made


def _scalar_gradients(
    call: Call, given: dict[str, Tensor | None], made: dict[str, Tensor | None]
) -> dict[str, Tensor]:
    """Sums over rows of the batch and blocks, and over distances that read one cell."""
    found = {}
    sums = made["dsums"].sum((0, 2))  # (H, 8)
    margin = 2 * launch_for("rows", call, given).keys
    for place, name in enumerate(("static", "gate")):
        if given[name] is None:
            continue
        window, low = call.low.scalars, _window(call.low)[0]
        by_distance = made["dscalars"][:, :, :, place].sum((0, 2))  # (H, cells)
        first = window.low - low + margin  # the cell of the window's lowest distance
        grad = by_distance[:, first : first + window.width].clone()
        grad[:, 0] += by_distance[:, :first].sum(1) + sums[:, 2 * place]
        grad[:, -1] += by_distance[:, first + window.width :].sum(1) + sums[:, 2 * place + 1]
        found[f"d{name}"] = grad
    if given["theta"] is not None:
        found["dtheta"] = sums[:, 4:6]
    return found


def _fitted(grad: Tensor, like: Tensor) -> Tensor:
    """A gradient summed over what was broadcast, in the tensor's type."""
    return grad.sum_to_size(like.shape).to(like.dtype)


def _window(low: Lowered) -> tuple[int, int]:
    """Distances outside of which nothing changes."""
    bounds, scalars, tables = low.reach, low.scalars, low.tensors
    windows = []
    if any(name in tables for name in ("aq", "ak", "pq", "pk", "band")) or (
        low.value_vectors is not None
    ):
        windows.append(low.vectors)
    if "static" in tables or "gate" in tables:
        windows.append(scalars)
    if windows:
        return min(w.low for w in windows), max(w.high for w in windows)
    if bounds.highest == 0:
        return -1, 1  # nothing but the diagonal needs a causal mask
    return bounds.lowest - 2, bounds.lowest - 1  # all is right of the window


def launch_for(kernel: str, call: Call, given: dict[str, Tensor | None]) -> launch.Launch:
    """The launch of a kernel for a call."""
    scalars = any(given[n] is not None and _wants_gradient(n, call) for n in ("static", "gate"))
    f = given["f"]
    rank = 0 if f is None else _power(f.size(-1))
    q = given["q"]
    return launch.launch_of(kernel, q.dtype, _power(q.size(-1)), rank, scalars)


def _wants_gradient(name: str, call: Call) -> bool:
    return call.low.tensors[name].requires_grad


def _power(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def _run(
    kind: str, kernel, call: Call, given: dict[str, Tensor | None], made: dict[str, Tensor | None]
) -> None:
    """Launch a kernel: its arguments are found by name."""
    tiles = launch_for("forward" if kind == "delta" else kind, call, given)
    values = _numbers(call, given) | _strides(given, made["out"]) | _flags(call, given)
    values |= {"ROWS": tiles.rows, "KEYS": tiles.keys}
    inputs = call.inputs
    tensors = {**given, **made, "first": call.low.first, "documents": inputs.documents}
    tensors["padding"] = None
    if inputs.key_padding is not None:
        tensors["padding"] = inputs.key_padding.to(torch.uint8).contiguous()
    nothing = given["q"]  # for pointers that the flags leave unread
    arguments = {}
    for name in kernel.arg_names:
        if name.endswith("_ptr"):
            tensor = tensors.get(name.removesuffix("_ptr"))
            arguments[name] = nothing if tensor is None else tensor
        else:
            arguments[name] = values[name]
    batch, heads, tgt_len, _ = given["q"].shape
    length, block = (
        (given["k"].size(2), tiles.keys) if kind == "keys" else (tgt_len, tiles.rows)
    )
    grid = (batch * heads * triton.cdiv(length, block),)
    kernel[grid](**arguments, num_warps=tiles.warps, num_stages=tiles.stages)


def _numbers(call: Call, given: dict[str, Tensor | None]) -> dict[str, int]:
    low, high = _window(call.low)
    return {
        "heads": given["q"].size(1),
        "tgt_len": given["q"].size(2),
        "src_len": given["k"].size(2),
        "start": call.inputs.positions.query_start,
        "low": low,
        "high": high,
        "vector_low": call.low.vectors.low,
        "width": call.low.vectors.width,
        "scalar_low": call.low.scalars.low,
        "scalar_width": call.low.scalars.width,
        "seed": call.seed,
    }


def _strides(given: dict[str, Tensor | None], out: Tensor) -> dict[str, int]:
    strides = {}
    tables = {"q": given["q"], "k": given["k"], "v": given["v"], "out": out}
    for name, other in (("aq", "pq"), ("ak", "pk")):
        tables[name] = given[name] if given[name] is not None else given[other]
    tables |= {"f": given["f"], "g": given["g"]}
    for name, tensor in tables.items():
        for axis, letter in enumerate("bht"):
            known = tensor is not None and tensor.size(axis) > 1
            strides[f"{name}_{letter}"] = tensor.stride(axis) if known else 0
    for name in ("static", "gate", "theta"):
        known = given[name] is not None and given[name].size(0) > 1
        strides[f"{name}_h"] = given[name].stride(0) if known else 0
    return strides


def _flags(call: Call, given: dict[str, Tensor | None]) -> dict:
    inputs, low = call.inputs, call.low
    f, dim = given["f"], given["q"].size(-1)
    rank = 1 if f is None else f.size(-1)
    first, last = _window(low)
    reach = low.reach
    return {
        "D": dim,
        "DP": _power(dim),
        "RANK": rank,
        "RP": _power(rank),
        "ACC": _ACCUMULATORS.get(inputs.q.dtype, tl.float32),
        "SCALE": float(inputs.scale),
        "CAUSAL": inputs.causal,
        "PADDING": inputs.key_padding is not None,
        "WINDOW": inputs.window or 0,
        "DOCUMENTS": inputs.documents is not None,
        "DROP": call.threshold,
        "ADD_Q": given["aq"] is not None,
        "ADD_K": given["ak"] is not None,
        "PRODUCT": given["pq"] is not None,
        "REPLACED": given["band"] is not None,
        "VALUES": low.value_vectors is not None,
        "STATIC": given["static"] is not None,
        "GATE": given["gate"] is not None,
        "FACTORS": f is not None,
        "RESET": low.reset,
        "LEFT": low.vectors.low >= reach.lowest,
        "RIGHT": low.vectors.high <= reach.highest,
        "FAR_LEFT": first >= reach.lowest,
        "FAR_RIGHT": last <= reach.highest,
        "STATIC_GRAD": given["static"] is not None and _wants_gradient("static", call),
        "GATE_GRAD": given["gate"] is not None and _wants_gradient("gate", call),
        "PRECISION": precision(),
    } | {"first_b": 1 if low.first is not None and low.first.size(0) > 1 else 0}


def precision() -> str:
    """How fp32 products are formed: as torch's own matrix products are."""
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
