"""The loss from logits is fairseq's criterions' own, values and gradients, and repeatable."""

from __future__ import annotations

import pytest
import torch
from fairseq.criterions.cross_entropy import CrossEntropyCriterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion, label_smoothed_nll_loss
from torch import Tensor, nn

from helpers.models import batch, small_model, small_task
from relpos_fairseq.criterions import cross_entropy
from relpos_fairseq.criterions import cross_entropy as from_logits
from relpos_fairseq.criterions.cross_entropy import (
    RelPosCrossEntropyCriterion,
    RelPosLabelSmoothedCrossEntropyCriterion,
    has_plain_softmax,
    smoothed_loss,
)
from relpos_fairseq.models.relpos_transformer import RelPosTransformerModel

ROWS, WORDS, PAD = 13, 11, 1


def draw(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Logits that softmax saturates in places, and targets with padding."""
    generator = torch.Generator().manual_seed(5)
    logits = 6 * torch.randn(ROWS, WORDS, generator=generator, dtype=torch.float64)
    target = torch.randint(2, WORDS, (ROWS,), generator=generator)
    target[[0, 7]] = PAD
    return logits.to(dtype).requires_grad_(), target


def of_fairseq(logits: Tensor, target: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Fairseq's own function."""
    lprobs = torch.log_softmax(logits, -1)
    return label_smoothed_nll_loss(lprobs, target, epsilon, ignore_index=PAD)


@pytest.fixture(params=[1, 3 * WORDS, 1 << 20], ids=["row", "uneven", "whole"])
def _chunk(request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(from_logits.CHUNK, "cpu", request.param)


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.9])
def test_equals_fairseqs(epsilon: float) -> None:
    """Both sums, and gradients of either and of their mixture, in fp64."""
    logits, target = draw()
    found, wanted = smoothed_loss(logits, target, epsilon, PAD), of_fairseq(logits, target, epsilon)
    torch.testing.assert_close(found, wanted)
    for weights in ((1.0, 0.0), (0.0, 1.0), (0.7, -2.0)):
        one, other = (
            torch.autograd.grad(weights[0] * a + weights[1] * b, logits, retain_graph=True)[0]
            for a, b in (found, wanted)
        )
        torch.testing.assert_close(one, other)
        assert not one[[0, 7]].any()  # padding counts nothing


@pytest.mark.usefixtures("_chunk")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errs_no_more_than_fairseqs(dtype: torch.dtype) -> None:
    """Against fp64; half precision gives an fp32 loss and gradients of its own type."""
    logits, target = draw(dtype)
    exact = logits.detach().double().requires_grad_()
    (truth,) = torch.autograd.grad(of_fairseq(exact, target, 0.1)[0], exact)
    loss, _ = smoothed_loss(logits, target, 0.1, PAD)
    (found,) = torch.autograd.grad(loss, logits)
    (eager,) = torch.autograd.grad(of_fairseq(logits.float(), target, 0.1)[0], logits)
    assert loss.dtype == torch.float32 and found.dtype == dtype
    allowed = float((eager.double() - truth).abs().max()) + 2 * torch.finfo(dtype).eps
    assert float((found.double() - truth).abs().max()) <= allowed


def test_nothing_but_padding() -> None:
    """No token: a loss and gradients of 0; no row at all is as good."""
    logits, _ = draw()
    target = torch.full((ROWS,), PAD)
    loss, nll = smoothed_loss(logits, target, 0.1, PAD)
    loss.backward()
    assert loss == nll == 0 and not logits.grad.any()
    assert smoothed_loss(torch.zeros(0, WORDS), target[:0], 0.1, PAD)[0] == 0


@pytest.mark.parametrize("smoothing", [True, False], ids=["smoothed", "cross_entropy"])
def test_criterions_agree_with_fairseqs(smoothing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's loss, logs and gradients with our function and with fairseq's."""
    task = small_task()
    if smoothing:
        classes = (RelPosLabelSmoothedCrossEntropyCriterion, LabelSmoothedCrossEntropyCriterion)
        criterions = [each(task, False, 0.1, report_accuracy=True) for each in classes]
    else:
        classes = (RelPosCrossEntropyCriterion, CrossEntropyCriterion)
        criterions = [each(task, False) for each in classes]
    model, (source, inputs) = small_model(position_scheme="m4"), batch()
    target = torch.cat([inputs[:, 1:], torch.full_like(inputs[:, :1], 2)], 1)
    lengths = source.ne(1).sum(1)
    sample = {
        "net_input": {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": inputs},
        "target": target,
        "ntokens": int(target.ne(1).sum()),
    }
    calls, seen = [], []
    monkeypatch.setattr(cross_entropy, "smoothed_loss", lambda *args: calls.append(1) or smoothed_loss(*args))
    for criterion in criterions:
        model.zero_grad()
        loss, size, logs = criterion(model, sample)
        loss.backward()
        gradients = [part.grad for part in model.parameters() if part.grad is not None]
        seen.append((loss.detach(), torch.tensor(size), logs, gradients))
    assert len(calls) == 1
    torch.testing.assert_close(*seen)


def test_other_outputs_take_fairseqs_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """An adaptive softmax, a loss a token, and an ignored prefix are fairseq's."""
    monkeypatch.setattr(cross_entropy, "smoothed_loss", None)
    model = small_model()
    inputs = batch()[1]
    output, sample = model.decoder(inputs, None), {"target": inputs}
    criterion = RelPosLabelSmoothedCrossEntropyCriterion(small_task(), False, 0.1)
    loss, _ = criterion.compute_loss(model, output, sample, reduce=False)
    assert loss.shape == (inputs.numel(), 1)
    prefix = RelPosLabelSmoothedCrossEntropyCriterion(small_task(), False, 0.1, ignore_prefix_size=1)
    prefix.compute_loss(model, output, sample)
    model.decoder.adaptive_softmax = torch.nn.Identity()
    assert not has_plain_softmax(model)


def test_no_second_derivative() -> None:
    """A gradient's gradient is refused, not taken for 0."""
    logits = torch.randn(3, 5, requires_grad=True)
    loss, _ = smoothed_loss(logits, torch.tensor([0, 4, 2]), 0.1, 1)
    (first,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative: take fairseq's own"):
        first.square().sum().backward()


class Sharp(RelPosTransformerModel):
    """Probabilities that are not the softmax of the output."""

    def get_normalized_probs(self, net_output, log_probs, sample=None) -> Tensor:
        """At another temperature."""
        return super().get_normalized_probs((3 * net_output[0], None), log_probs, sample)


class Doubled(RelPosLabelSmoothedCrossEntropyCriterion):
    """Log-probabilities of its own."""

    def get_lprobs_and_target(self, model, net_output, sample) -> tuple[Tensor, Tensor]:
        """Twice fairseq's."""
        lprobs, target = super().get_lprobs_and_target(model, net_output, sample)
        return 2 * lprobs, target


class Guarded(RelPosCrossEntropyCriterion):
    """A cross entropy whose `eps` smooths no labels."""

    eps = 0.5


def translate(model: nn.Module, criterion: nn.Module) -> float:
    """The loss of a decoder's output by a criterion."""
    inputs = batch()[1]
    output = model.decoder(inputs, None)
    return float(criterion.compute_loss(model, output, {"target": inputs})[0])


def test_probabilities_of_ones_own_are_used() -> None:
    """A subclass, or a caller that replaces a method, is not bypassed; nor is eps misread."""
    task, model, sharp = small_task(), small_model(), small_model()
    smoothed = RelPosLabelSmoothedCrossEntropyCriterion(task, False, 0.1)
    plain = RelPosCrossEntropyCriterion(task, False)
    sharp.__class__ = Sharp
    patched = small_model()
    given = patched.decoder.get_normalized_probs
    patched.decoder.get_normalized_probs = lambda output, *rest: given((3 * output[0], None), *rest)
    assert [has_plain_softmax(each) for each in (model, sharp, patched)] == [True, False, False]
    assert translate(sharp, smoothed) == translate(patched, smoothed) != translate(model, smoothed)
    twice = translate(model, Doubled(task, False, 0.1))
    assert twice == pytest.approx(2 * translate(model, smoothed))
    assert translate(model, Guarded(task, False)) == translate(model, plain)


def test_a_word_that_is_ruled_out() -> None:
    """Without smoothing, -inf elsewhere than at the target costs nothing, as in fairseq's."""
    logits, target = draw()
    ruled = logits.detach().clone()
    ruled[:, 0] = -torch.inf
    ruled.requires_grad_()
    found = smoothed_loss(ruled, target, 0.0, PAD)[0]
    wanted = nn.functional.cross_entropy(ruled, target, ignore_index=PAD, reduction="sum")
    torch.testing.assert_close(found, wanted)
    one, other = (torch.autograd.grad(loss, ruled)[0] for loss in (found, wanted))
    torch.testing.assert_close(one, other)
