"""Attention calls of a case of `cases.py` under some lengths and masks, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace

import torch
from torch import Tensor

from cases import Case, build, terms_of
from relpos_fairseq.attention import AttentionInputs, attend
from relpos_fairseq.core.placement import Placement, PositionContext
from relpos_fairseq.core.positions import Positions, index_of_tokens

Remake = Callable[[Tensor, Tensor, Tensor], AttentionInputs]
CONTENT = ("q", "k", "v", "content_q", "content_k")


def shape_of(kind: str) -> dict:
    """Lengths and padding of a call."""
    return {
        "square": {"src_len": 6, "start": 0, "causal": False, "pad": None},
        "memory": {"src_len": 7, "start": 4, "causal": False, "pad": None},
        "causal": {"src_len": 6, "start": 0, "causal": True, "pad": None},
        "causal_memory": {"src_len": 7, "start": 5, "causal": True, "pad": None},
        "step": {"src_len": 7, "start": 6, "causal": True, "pad": None},
        "pad_left": {"src_len": 6, "start": 0, "causal": False, "pad": "left"},
        "pad_right": {"src_len": 6, "start": 0, "causal": False, "pad": "right"},
        "step_padded": {"src_len": 7, "start": 6, "causal": True, "pad": "left"},
        "block": {"src_len": 9, "start": 2, "stop": 5, "causal": False, "pad": "left"},
    }[kind]


def padding_of(side: str | None, batch: int, length: int) -> Tensor | None:
    """Row 0 is whole, row 1 lacks two tokens at `side`."""
    if side is None:
        return None
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[1, slice(0, 2) if side == "left" else slice(length - 2, length)] = True
    return padding


def call(
    case: Case,
    kind: str,
    *,
    batch: int = 2,
    heads: int = 2,
    dim: int = 4,
    seed: int = 3,
    drawn: list[int] | None = None,
    longest: int = 12,
) -> tuple[AttentionInputs, Placement, torch.nn.ModuleList, dict]:
    """Inputs of an attention call of the case, with everything that made them."""
    wanted = shape_of(kind)
    wanted["causal"] |= case.causal_only
    stack, layer = build(case, causal=wanted["causal"], heads=heads, dim=dim, longest=longest)
    length, start = wanted["src_len"], wanted["start"]
    stop = wanted.get("stop", length)
    padding = padding_of(wanted["pad"], batch, length)
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int) -> Tensor:
        size = (batch, heads, rows, dim)
        return torch.randn(size, generator=generator, dtype=torch.float64)

    segments = torch.arange(length).expand(batch, length) * 2 // length
    positions = Positions(
        tgt_len=stop - start,
        src_len=length,
        query_start=start,
        token_index=index_of_tokens(padding),
        segments=segments if case.flags.get("segment_encoding") else None,
        randomized=None if drawn is None else torch.tensor(drawn),
    )
    context = stack.context(positions)
    q, k, v = draw(stop - start), draw(length), draw(length)
    inputs = AttentionInputs(
        q=q,
        k=k,
        v=v,
        terms=terms_of(stack, layer, positions, batch),
        positions=positions,
        scale=stack.plan.scale,
        causal=wanted["causal"],
        key_padding=padding,
        **rotated(context, q, k),
    )
    return inputs, stack, layer, {"padding": padding, "segments": segments}


def rotated(context: PositionContext, q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """Q and k as the content meets them, under rope."""
    if context.rotation is None:
        return {}
    scheme, prepared = context.rotation
    start = context.positions.query_start
    return {"content_q": scheme.transform_query(q, prepared, start), "content_k": scheme.transform_key(k, prepared, 0)}


def weighted(out: Tensor) -> Tensor:
    """A scalar that no symmetry of the output leaves unseen."""
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()


def gradients(inputs: AttentionInputs, backend: str, parameters: list[Tensor], remake: Remake) -> list[Tensor]:
    """Output, then gradients by q, k, v and the parameters."""
    leaves = [x.detach().clone().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    out, _ = attend(remake(*leaves), backend)
    return [out.detach(), *torch.autograd.grad(weighted(out), [*leaves, *parameters], materialize_grads=True)]


def remaker(inputs: AttentionInputs, stack: Placement, layer: torch.nn.ModuleList) -> Remake:
    """A function that rebuilds the call from new q, k, v, terms included."""

    def remake(q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
        terms = terms_of(stack, layer, inputs.positions, q.size(0))
        return replace(inputs, q=q, k=k, v=v, terms=terms, **rotated(stack.context(inputs.positions), q, k))

    return remake


def hold(backend: str, inputs: AttentionInputs, parameters: list[Tensor], remake: Remake | None = None) -> None:
    """Hold a backend's output and gradients against the reference's; without `remake` the call's terms stay."""
    remake = remake or (lambda q, k, v: replace(inputs, q=q, k=k, v=v))
    found, expected = (gradients(inputs, one, parameters, remake) for one in (backend, "reference"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def hold_case(backend: str, case: Case, kind: str) -> AttentionInputs:
    """The same for a call of a case, by the parameters of its schemes; returns the call."""
    inputs, stack, layer, _ = call(case, kind)
    hold(backend, inputs, [*stack.parameters(), *layer.parameters()], remaker(inputs, stack, layer))
    return inputs


def tensors_in(value: object) -> list[Tensor]:
    """The tensors of a term's part that want gradients."""
    if isinstance(value, Tensor):
        return [value] if value.requires_grad else []
    parts = value if isinstance(value, tuple) else vars(value).values() if is_dataclass(value) else ()
    return [tensor for part in parts for tensor in tensors_in(part)]


def as_leaves(inputs: AttentionInputs, dtype: torch.dtype) -> tuple[AttentionInputs, dict[str, Tensor]]:
    """The call in another type, and by name all tensors that gradients are taken for."""
    made = inputs.mapped(lambda tensor: tensor.detach().to(dtype).clone().requires_grad_())
    leaves = {name: getattr(made, name) for name in CONTENT if getattr(made, name) is not None}
    for number, term in enumerate(made.terms):
        for name in term.present:
            parts = tensors_in(getattr(term, name))
            for place, tensor in enumerate(parts):
                leaves[f"{number}.{name}" if len(parts) == 1 else f"{number}.{name}.{place}"] = tensor
    return made, leaves
