"""Label-smoothed cross entropy from logits, with few passes over the vocabulary.

fairseq's `label_smoothed_cross_entropy` and `cross_entropy` keep log-probabilities, and their
backward passes write and add several tensors of that size: a sixth of a training step of a small
model with 8,000 words.  The gradient is known:

    loss = (1 - eps - e) nll + e sum_w -log p_w        with e = eps / (V - 1)
    d loss / d logits = p - (1 - eps - e) onehot(target) - e

so logits alone are kept, and rows are worked on in chunks that fit a cache.  Values and gradients
are fairseq's up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.attention.once import differentiable_once

CHUNK = {"cpu": 1 << 19}  # elements of logits at a time, 2 MB
LARGE_CHUNK = 1 << 26  # where a launch costs more than memory


def smoothed_loss(logits: Tensor, target: Tensor, epsilon: float, ignore_index: int) -> tuple[Tensor, Tensor]:
    """Return label-smoothed cross entropy and negative log-likelihood, each summed over tokens.

    Args:
        logits: (N, V).
        target: (N,) word ids.
        epsilon: probability that is spread over the other words.
        ignore_index: target that counts nothing.

    Returns:
        Two scalars, fp32 (fp64 for fp64).
    """
    return _SmoothedLoss.apply(logits, target, epsilon, ignore_index)


def _chunks(logits: Tensor) -> list[slice]:
    elements = CHUNK.get(logits.device.type, LARGE_CHUNK)
    rows = max(1, elements // max(logits.size(1), 1))
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


class _SmoothedLoss(torch.autograd.Function):
    """See the module; logits (N, V) are kept, nothing else of their size."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, epsilon: float, ignore_index: int) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(logits.dtype, torch.float32)
        column = target.unsqueeze(1)
        nll = logits.new_empty(column.shape, dtype=exact)
        smooth = torch.empty_like(nll)
        for part in _chunks(logits):
            lprobs = torch.log_softmax(logits[part], dim=-1, dtype=exact)
            torch.neg(lprobs.gather(-1, column[part]), out=nll[part])
            if epsilon:  # without, a word that is ruled out (-inf) is no loss: not 0 times inf
                torch.neg(lprobs.sum(-1, keepdim=True), out=smooth[part])
        padding = column.eq(ignore_index)
        nll = nll.masked_fill_(padding, 0.0).sum()
        each = epsilon / (logits.size(1) - 1) if epsilon else 0.0
        ctx.save_for_backward(logits, column, padding)
        ctx.rest, ctx.each, ctx.exact = 1.0 - epsilon - each, each, exact
        if not epsilon:
            return nll.clone(), nll
        return ctx.rest * nll + each * smooth.masked_fill_(padding, 0.0).sum(), nll

    @staticmethod
    @differentiable_once("the loss from logits", "take fairseq's own from log-probabilities")
    def backward(ctx: Any, of_loss: Tensor, of_nll: Tensor) -> tuple:
        logits, column, padding = ctx.saved_tensors
        kept = (~padding).to(ctx.exact)  # (N, 1)
        of_softmax = kept * (of_loss + of_nll)
        of_target = kept * -(of_loss * ctx.rest + of_nll)
        of_all = kept * (of_loss * -ctx.each)
        gradient = torch.empty_like(logits)
        for part in _chunks(logits):
            room = gradient[part] if ctx.exact == logits.dtype else None
            probs = torch.softmax(logits[part], dim=-1, dtype=ctx.exact, out=room)
            probs.mul_(of_softmax[part]).add_(of_all[part])
            at_target = probs.gather(-1, column[part]).add_(of_target[part])
            probs.scatter_(-1, column[part], at_target)  # each row once: repeatable on a GPU too
            if room is None:
                gradient[part] = probs
        return gradient, None, None, None
