"""`relpos_cross_entropy` and `relpos_label_smoothed_cross_entropy`: fairseq's, faster.

Options, values and gradients are those of fairseq's criterions of these names; the loss is taken
from logits (smoothed_loss.py) where a model's probabilities are the softmax of its output, and else
as fairseq does.  Any model may use them.
"""

from __future__ import annotations

from typing import Any

from fairseq.criterions import register_criterion
from fairseq.criterions.cross_entropy import CrossEntropyCriterion, CrossEntropyCriterionConfig
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
)
from fairseq.models import BaseFairseqModel, FairseqDecoder
from fairseq.models.transformer import TransformerModelBase
from torch import Tensor

from relpos_fairseq.criterions.smoothed_loss import smoothed_loss
from relpos_fairseq.models.relpos_transformer_lm import RelPosLanguageModel

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
