"""The tiles' forward and backward pass."""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.once import differentiable_once
from relpos_fairseq.attention.tiles.backward import Backward
from relpos_fairseq.attention.tiles.forward import Forward
from relpos_fairseq.attention.tiles.plan import Plan, tile_rows
from relpos_fairseq.attention.tiles.planning import make_plan


def attend(inputs: AttentionInputs, rows: int | None = None) -> Tensor:
    """Output (B, H, T, Dv) of a call that `refusal` does not refuse.

    Args:
        inputs: the call.
        rows: rows of a tile; by default a fixed rule's.
    """
    plan = make_plan(inputs, min(rows or tile_rows(inputs), inputs.positions.tgt_len))
    exact = inputs.exact
    q, k, v = (part.to(exact) for part in (inputs.q, inputs.k, inputs.v))
    seed = None
    if inputs.dropout:
        seed = int(torch.randint(2**62, (), dtype=torch.long))
    return _Tiles.apply(plan, seed, q, k, v, *plan.tables).to(inputs.v.dtype)


class _Tiles(torch.autograd.Function):
    """softmax(logits) v, with logits formed tile by tile in both directions."""

    @staticmethod
    def forward(
        ctx, plan: Plan, seed: int | None, q: Tensor, k: Tensor, v: Tensor, *tables: Tensor
    ) -> Tensor:
        run = Forward(plan, seed, q, k, v, list(tables))
        out = run.run()
        kept = [tensor for part in run.vectors for tensor in part.kept()]
        ctx.plan, ctx.seed, ctx.count = plan, seed, len(tables)
        ctx.save_for_backward(q, k, v, *tables, *kept)
        return out

    @staticmethod
    @differentiable_once("attention by tiles", "use --attention-backend reference")
    def backward(ctx, grad: Tensor) -> tuple:
        q, k, v, *others = ctx.saved_tensors
        tables, kept = others[: ctx.count], others[ctx.count :]
        wanted = list(ctx.needs_input_grad[5:])
        run = Backward(ctx.plan, ctx.seed, q, k, v, tables, wanted)
        return None, None, *run.run(grad, kept)
