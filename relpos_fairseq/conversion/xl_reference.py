"""The released model's formula on its own tensors, to compare the converted one with."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from relpos_fairseq.conversion.transformer_xl_original import OriginalXL, embeddings, projections


def log_probs(released: OriginalXL, segments: list[Tensor]) -> list[Tensor]:
    """Log-probabilities (B, T, types) of the next type, segment (B, T) after segment."""
    state = {name: value.double() for name, value in released.state.items()}
    memory: list[Tensor | None] = [None] * released.layers
    found = []
    for types in segments:
        h = math.sqrt(released.width) * _embedded(state, types)
        inputs = []
        for layer in range(released.layers):
            h, memory[layer] = _moved(released, state, layer, h, memory[layer])
            inputs.append(h)
            part = {n: v for n, v in state.items() if n.startswith(f"layers.{layer}.")}
            part = {name.split(".", 2)[2]: value for name, value in part.items()}
            h = _layer(released, state, part, layer, h, memory[layer])
        length = released.mem_len or 0
        joined = [x if m is None else torch.cat([m, x], 1) for m, x in zip(memory, inputs)]  # noqa: B905
        memory = [x[:, x.size(1) - min(length, x.size(1)) :] for x in joined]
        found.append(_outputs(released, state, h))
    return found


def _embedded(state: dict[str, Tensor], types: Tensor) -> Tensor:
    tables = embeddings(state)
    wide = []
    for number, table in enumerate(tables):
        spread = state.get(f"word_emb.emb_projs.{number}")
        wide.append(table if spread is None else table @ spread.t())
    return torch.cat(wide)[types]


def _norm(part: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], part[f"{name}.weight"], part[f"{name}.bias"])


def _layer(
    released: OriginalXL,
    state: dict[str, Tensor],
    part: dict[str, Tensor],
    layer: int,
    h: Tensor,
    memory: Tensor | None,
) -> Tensor:
    """One layer: (B, T, E), with what it remembers (B, M, E)."""
    seen = h if memory is None else torch.cat([memory, h], 1)
    if released.pre_norm:
        seen = _norm(part, "dec_attn.layer_norm", seen)
    new, heads = h.size(1), released.heads
    q, k, v = (
        (seen @ weight.to(seen).t()).unflatten(-1, (heads, -1)).transpose(1, 2)
        for weight in projections(released, layer)
    )
    q = q[:, :, -new:]
    size = k.size(2)
    offset = torch.arange(size - new, size)[:, None] - torch.arange(size)  # i - j
    logits = _logits(released, state, part, layer, q, k, offset) / math.sqrt(q.size(-1))
    hidden = offset < 0
    if released.same_length:
        hidden |= offset >= (released.mem_len or 0)
    probs = logits.masked_fill(hidden, -math.inf).softmax(-1)
    out = h + (probs @ v).transpose(1, 2).flatten(2) @ part["dec_attn.o_net.weight"].t()
    out = out if released.pre_norm else _norm(part, "dec_attn.layer_norm", out)
    inner = _norm(part, "pos_ff.layer_norm", out) if released.pre_norm else out
    inner = F.linear(inner, part["pos_ff.CoreNet.0.weight"], part["pos_ff.CoreNet.0.bias"]).relu()
    out = out + F.linear(inner, part["pos_ff.CoreNet.3.weight"], part["pos_ff.CoreNet.3.bias"])
    return out if released.pre_norm else _norm(part, "pos_ff.layer_norm", out)


def _moved(
    released: OriginalXL, state: dict[str, Tensor], layer: int, h: Tensor, memory: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Add the absolute positions of memory and segment to both, as far as the layer has any."""
    if not released.absolute or (released.attn_type == 2 and layer > 0):
        return h, memory
    old = 0 if memory is None else memory.size(1)
    if released.attn_type == 2:
        added = _waves(torch.arange(old + h.size(1), dtype=h.dtype).flip(0), released.width)
    else:
        added = state["r_emb"][layer].flatten(1)[-old - h.size(1) :]
    return h + added[old:], None if memory is None else memory + added[:old]


def _waves(distance: Tensor, width: int) -> Tensor:
    """(N, width) sinusoids of (N,) distances."""
    steps = torch.arange(0, width, 2, dtype=distance.dtype) / width
    angles = distance[:, None] * 10000**-steps
    return torch.cat([angles.sin(), angles.cos()], -1)


def _logits(
    released: OriginalXL,
    state: dict[str, Tensor],
    part: dict[str, Tensor],
    layer: int,
    q: Tensor,
    k: Tensor,
    offset: Tensor,
) -> Tensor:
    """(B, H, T, S), not yet divided."""
    if released.absolute:
        return q @ k.transpose(-1, -2)
    past = offset.clamp(min=0)
    if released.attn_type == 0:
        reach = int(past.max()) + 1
        distance = torch.arange(reach, dtype=q.dtype)
        if released.clamp_len:
            distance = distance.clamp(max=released.clamp_len)
        waves = _waves(distance, released.width) @ part["dec_attn.r_net.weight"].t()
        vectors = waves.unflatten(-1, (released.heads, -1))  # (N, H, D)
        u, v = state["r_w_bias"][:, None], state["r_r_bias"][:, None]
        moved = torch.einsum("bhid,nhd->bhin", q + v, vectors)
    else:
        vectors, scalars = state["r_emb"][layer].flip(0), state["r_bias"][layer].flip(0)
        if released.clamp_len:
            vectors, scalars = vectors[: released.clamp_len], scalars[: released.clamp_len]
        past = past.clamp(max=len(vectors) - 1)
        u = state["r_w_bias"][layer][:, None]
        moved = torch.einsum("bhid,nhd->bhin", q, vectors) + scalars.t()[None, :, None]
    shape = (*moved.shape[:2], *past.shape)
    return (q + u) @ k.transpose(-1, -2) + moved.gather(-1, past.expand(shape))


def _outputs(released: OriginalXL, state: dict[str, Tensor], h: Tensor) -> Tensor:
    """Log-probabilities of all types: the first band's, and the others' within their clusters."""
    weights = [
        state[f"crit.out_layers.{number}.weight"]
        for number in range(len(released.bands))
        if f"crit.out_layers.{number}.weight" in state
    ]
    found = []
    clusters = len(released.cutoffs)
    first: Tensor | None = None
    for number, (start, end) in enumerate(released.bands):
        own, take = (0, slice(start, end)) if len(weights) == 1 else (number, slice(None))
        weight, bias = weights[own][take], state[f"crit.out_layers.{own}.bias"][take]
        if number == 0 and clusters:
            weight = torch.cat([weight, state["crit.cluster_weight"]])
            bias = torch.cat([bias, state["crit.cluster_bias"]])
        inner = state.get(f"crit.out_projs.{number}")
        own_logits = F.linear(h if inner is None else h @ inner, weight, bias).log_softmax(-1)
        if first is None:
            first = own_logits
            found.append(own_logits[..., : end - start])
        else:
            found.append(own_logits + first[..., -number, None])
    return torch.cat(found, -1)
