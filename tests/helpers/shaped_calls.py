"""Attention calls of any sizes and masks, and what they must equal.

The native kernel takes 96 queries and up to 576 keys at a time, in steps of 96 keys; registers hold
blocks of up to 12 rows and 32 columns; keys meet long tables by 24.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from cases import CLIPPED, Case, build, terms_of
from helpers.scheme_calls import as_leaves, rotated
from relpos_fairseq.attention import AttentionInputs, attend
from relpos_fairseq.core.positions import Positions, index_of_tokens

EXACT = {"rtol": 1e-10, "atol": 1e-10}


@dataclass(frozen=True)
class Shape:
    """Sizes and masks of a call.

    Args:
        tgt_len: queries.
        before: slots before the first query.
        after: keys after the last query.
        batch: rows.
        heads: heads.
        dim: channels of queries and keys.
        value_dim: channels of values; None: dim.
        clip: distances in tables that are clipped; 0: all have a row.
        causal: no key in a query's future.
        window: slots that a query sees; None: all.
        masks: of "left", "right", "dead" (a row without keys), "documents".
        reset: whether schemes that have a reset use it; None: as they do.
    """

    tgt_len: int
    before: int = 0
    after: int = 0
    batch: int = 2
    heads: int = 2
    dim: int = 4
    value_dim: int | None = None
    clip: int = 3
    causal: bool = False
    window: int | None = None
    masks: tuple[str, ...] = ()
    reset: str | None = None

    @property
    def src_len(self) -> int:
        """Keys."""
        return self.before + self.tgt_len + self.after


def padding_of(shape: Shape) -> Tensor | None:
    """(B, S) True at excluded keys, or None; the last rows of the batch differ from the first."""
    if not {"left", "right", "dead"} & set(shape.masks):
        return None
    padding = torch.zeros(shape.batch, shape.src_len, dtype=torch.bool)
    if "left" in shape.masks:
        padding[-1, : shape.src_len * 2 // 5] = True
    if "right" in shape.masks:
        padding[-1, shape.src_len - shape.src_len // 4 :] = True
    if "dead" in shape.masks:
        padding[0] = True
    return padding


def documents_of(shape: Shape) -> Tensor | None:
    """(B, S) document of each slot, or None."""
    if "documents" not in shape.masks:
        return None
    generator = torch.Generator().manual_seed(shape.src_len)
    starts = torch.rand(shape.batch, shape.src_len, generator=generator) < 6 / shape.src_len
    return starts.long().cumsum(1)


def make_inputs(scheme: str, shape: Shape, **options: str) -> AttentionInputs:
    """A call in fp64 whose positions weigh about as much as its content.

    Args:
        scheme: name of a scheme or hybrid.
        shape: sizes and masks.
        options: flags, without their `position_`.
    """
    flags = {f"position_{name}": value for name, value in options.items()}
    if "segment_encoding" in options:
        flags["segment_encoding"] = flags.pop("position_segment_encoding")
    if set(scheme.split("+")) & set(CLIPPED):
        flags.setdefault("position_clip_distance", str(shape.clip))
    if "+" in scheme:
        flags.setdefault("position_scale", "2")  # whatever its members' scales are
    if shape.reset is not None:
        flags["position_reset_cls"] = shape.reset
    stack, layer = build(
        Case(scheme, flags), causal=shape.causal, heads=shape.heads, dim=shape.dim, longest=shape.src_len
    )
    generator = torch.Generator().manual_seed(shape.tgt_len)

    def draw(length: int, channels: int | None = None) -> Tensor:
        size = (shape.batch, length, shape.heads, channels or shape.dim)  # as fairseq's layers
        return torch.randn(size, generator=generator, dtype=torch.float64).transpose(1, 2)

    padding = padding_of(shape)
    slots = torch.arange(shape.src_len).expand(shape.batch, -1)
    positions = Positions(
        shape.tgt_len,
        shape.src_len,
        shape.before,
        index_of_tokens(padding),
        segments=(slots > shape.src_len // 3).long(),
    )
    q, k = draw(shape.tgt_len), draw(shape.src_len)
    v = draw(shape.src_len, shape.value_dim)
    with torch.no_grad():
        terms = terms_of(stack, layer, positions, q.size(0))
    if shape.value_dim is not None:
        terms = tuple(with_value_channels(term, shape.value_dim) for term in terms)
    return AttentionInputs(
        q,
        k,
        v,
        terms,
        positions,
        stack.plan.scale,
        causal=shape.causal,
        key_padding=padding,
        window=shape.window,
        documents=documents_of(shape),
        **rotated(stack.context(positions), q, k),
    )


def with_value_channels(term, channels: int):
    """A term whose value vectors have another number of channels."""
    if term.value_vectors is None:
        return term
    generator = torch.Generator().manual_seed(channels)
    size = (*term.value_vectors.shape[:2], channels)
    vectors = torch.randn(size, generator=generator, dtype=torch.float64)
    return replace(term, value_vectors=vectors)


def results(inputs: AttentionInputs, leaves: dict, backend: str) -> dict[str, Tensor]:
    """The output and every gradient by name."""
    out, _ = attend(inputs, backend)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    found = torch.autograd.grad(out, list(leaves.values()), upstream.to(out.dtype), materialize_grads=True)
    return {"output": out.detach()} | dict(zip(leaves, found, strict=True))


def compare(inputs: AttentionInputs, dtype: torch.dtype = torch.float64, backend: str = "native") -> dict[str, Tensor]:
    """Hold a backend's output and all gradients against the reference's in fp64; returns them.

    In fp32, tolerated is what eager attention in fp32 errs by, a few times over.
    """
    made, leaves = as_leaves(inputs, dtype)
    found = results(made, leaves, backend)
    exact, wanted = as_leaves(made, torch.float64)
    expected = results(exact, wanted, "reference")
    eager = None if dtype == torch.float64 else results(made, leaves, "reference")
    # A gradient that cancels, as where one key has all of a row, has errors of its parts' size.
    channels = inputs.v.size(-1)
    parts = (*leaves.values(), *expected.values())
    size = max(float(x.detach().abs().max()) for x in parts) * channels**0.5
    for name, right in expected.items():
        tolerance = EXACT
        if eager is not None:
            error = float((eager[name].double() - right).abs().max())
            tolerance = {"rtol": 0, "atol": 20 * error + 16 * torch.finfo(dtype).eps * size}
        torch.testing.assert_close(found[name].double(), right, **tolerance, msg=lambda m, name=name: f"{name}: {m}")
    return found
