"""Evaluate the formula on slices of query rows: exact, for every scheme, in memory linear in length.

A slice of n rows forms its (n, S) logits from products with tables over the distances that occur in
it (`relative_shift`).  It keeps only its inputs for the backward pass and is evaluated again there,
with the same dropout, so that a call never holds more than the matrices of one slice.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs, drop
from relpos_fairseq.attention.operation import differentiable_once
from relpos_fairseq.attention.reference import GatheredProducts, attention_of
from relpos_fairseq.attention.relative_shift import ShiftedProducts
from relpos_fairseq.attention.step import attend_step, supports_step
from relpos_fairseq.core.relations import DistanceRelation

name = "blocked"

# Elements of one slice's logits: 8 MiB in fp32 stays near a CPU's cache; a GPU wants more work.
SLICE_ELEMENTS = {"cpu": 1 << 21, "cuda": 1 << 26}
LEAST_ROWS = 16


def refusal(inputs: AttentionInputs) -> str | None:
    """Return the terms that cannot be evaluated on slices, or None."""
    for term in inputs.terms:
        if term.relation is None or isinstance(term.relation, DistanceRelation):
            continue
        odd = [field for field in term.present if field not in ("static", "gate", "reset")]
        if odd:
            return f"{' and '.join(odd)} over {term.relation}"
    return None


def attend(inputs: AttentionInputs, need_weights: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return the output (B, H, T, Dv) and, with need_weights, the probabilities (B, H, T, S) after dropout."""
    if supports_step(inputs.terms, inputs.positions):
        out, probs = attend_step(inputs)
        return out, probs if need_weights else None
    exact = inputs.mapped(lambda tensor: tensor.to(inputs.exact).contiguous())
    seed = int(torch.randint(2**62, ())) if inputs.dropout else 0
    out, probs = _Slices.apply(exact.mapped(_shape_of), seed, need_weights, *exact.tensors())
    return out.to(inputs.v.dtype), probs


def slice_rows(inputs: AttentionInputs) -> int:
    """Return how many query rows a slice has; this depends on shapes and device only."""
    budget = SLICE_ELEMENTS.get(inputs.positions.device.type, SLICE_ELEMENTS["cuda"])
    mixed = sum(len(term.mixing.hidden_bias) for term in inputs.terms if term.mixing is not None)
    row = inputs.q.size(0) * (inputs.q.size(1) + mixed) * inputs.positions.src_len
    return max(budget // max(row, 1), LEAST_ROWS)


class _Slices(torch.autograd.Function):
    """Evaluate attention slice by slice; evaluate each slice again in the backward pass, for its gradients."""

    @staticmethod
    def forward(
        ctx, shape: AttentionInputs, seed: int, need_weights: bool, *tensors: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        outs, kept = [], []
        for start, _, part in _slices(shape.with_tensors(tensors)):
            out, probs = _attend_slice(part, seed + start)
            outs.append(out)
            if need_weights:
                # A causal slice has no keys in its queries' future.
                kept.append(F.pad(probs, (0, shape.positions.src_len - probs.size(-1))))
        ctx.shape, ctx.seed = shape, seed
        ctx.save_for_backward(*tensors)
        out = torch.cat(outs, dim=2)  # (B, H, T, Dv)
        return out, torch.cat(kept, dim=2) if need_weights else None  # (B, H, T, S)

    @staticmethod
    @differentiable_once("attention by slices", "use --attention-backend reference")
    def backward(ctx, d_out: Tensor, d_probs: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors, wanted = ctx.saved_tensors, ctx.needs_input_grad[3:]
        gradients = [torch.zeros_like(tensor) for tensor in tensors]
        parts = _slices(ctx.shape.with_tensors(tensors))
        # Views of the gradients at the same rows and keys, to which the gradients of a slice are added.
        totals = _slices(ctx.shape.with_tensors(gradients))
        for (start, stop, part), (_, _, total) in zip(parts, totals, strict=True):
            leaves = [leaf.detach().requires_grad_(want) for leaf, want in zip(part.tensors(), wanted, strict=True)]
            with torch.enable_grad():
                out, probs = _attend_slice(part.with_tensors(leaves), ctx.seed + start)
            results, upstream = [out], [d_out[:, :, start:stop]]
            if d_probs is not None:
                results.append(probs)
                upstream.append(d_probs[:, :, start:stop, : probs.size(-1)])
            _add_gradients(results, upstream, leaves, total.tensors())
        some = (grad if want else None for grad, want in zip(gradients, wanted, strict=True))
        return None, None, None, *some


def _slices(inputs: AttentionInputs) -> Iterator[tuple[int, int, AttentionInputs]]:
    """Yield (start, stop, call) for each slice: its query rows [start, stop), and the call for these and their keys."""
    rows, tgt_len = slice_rows(inputs), inputs.positions.tgt_len
    for start in range(0, tgt_len, rows):
        stop = min(start + rows, tgt_len)
        part = inputs.rows(start, stop)
        yield start, stop, part.keys(part.positions.query_stop) if inputs.causal else part


def _attend_slice(inputs: AttentionInputs, seed: int) -> tuple[Tensor, Tensor]:
    """Return the output (B, H, n, Dv) and the probabilities (B, H, n, S) of a slice of n rows."""
    # Randomized and contextual positions have no fixed distances to shift by, so that tables are gathered.
    counted = any(term.contextual is not None for term in inputs.terms)
    gathers = counted or inputs.positions.randomized is not None
    products = GatheredProducts(inputs) if gathers else ShiftedProducts(inputs)
    if not inputs.dropout:
        return attention_of(products)
    generator = torch.Generator(inputs.q.device).manual_seed(seed)
    return attention_of(products, lambda probs: drop(probs, inputs.dropout, generator))


def _add_gradients(results: list[Tensor], upstream: list[Tensor], leaves: list[Tensor], totals: list[Tensor]) -> None:
    """Backpropagate `upstream` from `results`, and add each leaf's gradient to its entry of `totals` in place."""
    wanted = [(x, total) for x, total in zip(leaves, totals, strict=True) if x.requires_grad]
    found = torch.autograd.grad(results, [x for x, _ in wanted], upstream, allow_unused=True)
    for grad, (_, total) in zip(found, wanted, strict=True):
        if grad is not None:
            total += grad


def _shape_of(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape on the meta device: autograd keeps the data elsewhere."""
    return tensor.detach().to("meta")
