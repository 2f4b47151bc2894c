"""`relpos_cross_entropy` and `relpos_label_smoothed_cross_entropy`: fairseq's losses, computed faster from logits.

Options, values and gradients are those of fairseq's criterions of these names.  The loss is computed from
logits where a model's probabilities are the softmax of its output, and elsewhere as fairseq does.  Any
model may use them.

fairseq keeps log-probabilities, and its backward passes write and add several tensors of that size: a
sixth of a training step of a small model with 8,000 words.  The gradient is known in closed form:

    loss = (1 - eps - e) nll + e sum_w -log p_w        with e = eps / (V - 1)
    d loss / d logits = p - (1 - eps - e) onehot(target) - e

so that only logits are kept, and rows are processed in chunks that fit a cache.  Values and gradients are
fairseq's up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.models.transformer import TransformerModelBase
from torch import Tensor

from relpos_fairseq.attention.operation import differentiable_once
from relpos_fairseq.models.relpos_transformer_lm import RelPosLanguageModel

CHUNK = {"cpu": 1 << 19}  # elements of logits at a time, 2 MB
LARGE_CHUNK = 1 << 26  # on a GPU, where launching kernels costs more than memory


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


_OF_MODELS = {owner.get_normalized_probs for owner in (BaseFairseqModel, TransformerModelBase, RelPosLanguageModel)}
_SCRIPTABLE = "get_normalized_probs_scriptable"


def has_plain_softmax(model: Any) -> bool:
    """Tell whether a model's probabilities are the softmax of its output.

    A subclass or a caller that puts another `get_normalized_probs` in its place makes probabilities
    of its own.
    """
    decoder = getattr(model, "decoder", None)
    if not isinstance(decoder, FairseqDecoder) or decoder.adaptive_softmax is not None:
        return False
    return (
        _function(model.get_normalized_probs) in _OF_MODELS
        and _function(getattr(model, _SCRIPTABLE)) is getattr(BaseFairseqModel, _SCRIPTABLE)
        and _function(decoder.get_normalized_probs) is FairseqDecoder.get_normalized_probs
        and _function(getattr(decoder, _SCRIPTABLE)) is getattr(FairseqDecoder, _SCRIPTABLE)
    )


def _function(method: Any) -> Any:
    return getattr(method, "__func__", None)


def _from_logits(criterion: Any, model: Any, net_output: Any, sample: dict, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the loss and the negative log-likelihood of a batch."""
    logits, target = net_output[0], model.get_targets(sample, net_output)
    rows = logits.reshape(-1, logits.size(-1))
    return smoothed_loss(rows, target.reshape(-1), epsilon, criterion.padding_idx)


@register_criterion("relpos_cross_entropy", dataclass=CrossEntropyCriterionConfig)
class RelPosCrossEntropyCriterion(CrossEntropyCriterion):
    """fairseq's `cross_entropy`, from logits."""

    def compute_loss(self, model: Any, net_output: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, Tensor]:
        if not reduce or not has_plain_softmax(model):
            return super().compute_loss(model, net_output, sample, reduce=reduce)
        return _from_logits(self, model, net_output, sample, 0.0)


@register_criterion("relpos_label_smoothed_cross_entropy", dataclass=LabelSmoothedCrossEntropyCriterionConfig)
class RelPosLabelSmoothedCrossEntropyCriterion(LabelSmoothedCrossEntropyCriterion):
    """fairseq's `label_smoothed_cross_entropy`, from logits."""

    def compute_loss(self, model: Any, net_output: Any, sample: dict, reduce: bool = True) -> tuple[Tensor, Tensor]:
        parts = LabelSmoothedCrossEntropyCriterion.get_lprobs_and_target
        own = _function(self.get_lprobs_and_target) is not parts
        if own or self.ignore_prefix_size or not reduce or not has_plain_softmax(model):
            return super().compute_loss(model, net_output, sample, reduce=reduce)
        return _from_logits(self, model, net_output, sample, self.eps)


# fairseq compares the class with the checkpoint's when it resumes: these compute the same loss.
RelPosCrossEntropyCriterion.__name__ = CrossEntropyCriterion.__name__
RelPosLabelSmoothedCrossEntropyCriterion.__name__ = LabelSmoothedCrossEntropyCriterion.__name__
