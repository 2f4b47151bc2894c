"""Krause et al. 2018, Dynamic evaluation of neural sequence models (arXiv:1709.07432), section 3.

    theta_i = theta_(i-1) - eta grad L(s_i) + lambda (theta_g - theta_(i-1))

Segment s_i is scored under theta_(i-1); then the parameters learn from it, and go back a part of
the way to the trained ones theta_g.  L is the mean loss of the segment's tokens; gradients end at
the memory, which holds the states of the parameters that made them.

The RMS variant learns little where gradients in training were large, and goes back there faster:

    RMS      = sqrt(mean over training segments of (grad L)^2), an element each
    theta_i  = theta_(i-1) - eta grad L(s_i) / (RMS + epsilon)
               + lambda min(RMS / mean(RMS), 1 / lambda) (theta_g - theta_(i-1))

The mean is over all elements, as in the paper; the released code divides by the sum of each
tensor's mean, and by default does not divide the sum of squares by the number of segments.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from relpos_fairseq.engine.progress import progress
from relpos_fairseq.evaluation.language_model import Score, Subject, log_likelihood, rows_of


@dataclass(frozen=True)
class Dynamic:
    """How parameters follow the text.

    Attributes:
        rate: eta.
        decay: lambda.
        training: binarised split, without suffix, whose gradients scale the steps; None: they do
            not.
        tokens: how many of its first tokens are read.
        epsilon: added to the scale.

    Raises:
        ValueError: a number out of range.
    """

    rate: float
    decay: float = 1e-3
    training: Path | None = None
    tokens: int = 100_000
    epsilon: float = 1e-3

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ValueError(f"--dynamic must be above 0, got {self.rate}")
        if not 0 <= self.decay < 1:
            raise ValueError(f"--decay must be >= 0 and below 1, got {self.decay}")
        if self.tokens < 1:
            raise ValueError(f"--rms must be >= 1, got {self.tokens}")
        if not self.epsilon > 0:
            raise ValueError(f"--epsilon must be above 0, got {self.epsilon}")

    def scales(self, rms: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the factors of gradients and of the ways back, elementwise."""
        mean = sum(one.double().sum() for one in rms) / sum(one.numel() for one in rms)
        back = [(self.decay * one / mean).clamp(max=1.0).to(one.dtype) for one in rms]
        return [self.rate / (one + self.epsilon) for one in rms], back


def score_dynamic(subject: Subject, targets: range, block: int, mem_len: int, dynamic: Dynamic) -> Score:
    """Read blocks in order, one row of them, and learn from each; the model is as before then.

    Its memory has `mem_len` slots, and segments have `block` tokens.
    """
    subject.model.mem_len = mem_len
    parameters = [one for one in subject.model.parameters() if one.requires_grad]
    trained = [one.detach().clone() for one in parameters]
    rates, decays = [dynamic.rate] * len(trained), [dynamic.decay] * len(trained)
    if dynamic.training is not None:
        rates, decays = dynamic.scales(training_rms(subject, block, dynamic))
    each, place, slots = [], [], []
    try:
        began = time.perf_counter()
        with progress(total=len(targets), description="dynamic", unit=" tokens") as bar:
            for held, nats, gradients in _segments(subject, targets, block):
                slots.append(np.full(len(nats), held))
                place.append(np.arange(len(nats)))
                each.append(nats.double().numpy())
                _step(parameters, gradients, trained, rates, decays)
                bar.update(len(nats))
        seconds = time.perf_counter() - began
    finally:
        with torch.no_grad():
            for one, value in zip(parameters, trained, strict=True):
                one.copy_(value)
    joined = np.concatenate(each)
    return Score(len(targets), float(joined.sum()), seconds, joined, np.concatenate(place), np.concatenate(slots))


def training_rms(subject: Subject, block: int, dynamic: Dynamic) -> list[Tensor]:
    """Return each parameter's root mean square of gradients, elementwise, over training segments.

    Raises:
        ValueError: there is no training split.
    """
    from relpos_fairseq.data.streams.dataset import read_stream

    words = subject.model.decoder.dictionary
    tokens = read_stream(dynamic.training, words, None, False)[: dynamic.tokens + 1]
    parameters = [one for one in subject.model.parameters() if one.requires_grad]
    squares, count, targets = [torch.zeros_like(one) for one in parameters], 0, len(tokens) - 1
    with progress(total=targets, description="gradients of training", unit=" tokens") as bar:
        read = _segments(replace(subject, tokens=tokens), range(1, len(tokens)), block)
        for _, nats, gradients in read:
            for square, gradient in zip(squares, gradients, strict=True):
                if gradient is not None:
                    square.addcmul_(gradient, gradient)
            count += 1
            bar.update(len(nats))
    return [(square / count).sqrt() for square in squares]


def _segments(subject: Subject, targets: range, block: int) -> Iterator[tuple[int, Tensor, tuple[Tensor | None, ...]]]:
    """Read segments in order: slots of memory, nats (T,), and the gradients of their mean.

    Parameters may change between segments; memory is filled beforehand where the text allows.
    """
    model, decoder = subject.model, subject.model.decoder
    parameters = [one for one in model.parameters() if one.requires_grad]
    begin, memory = targets.start - 1, None
    for start in range(-min(begin, model.mem_len * len(decoder.layers)), 0, block):
        with torch.no_grad():
            inputs = rows_of(subject, [begin], min(block, -start), start)
            memory = decoder.extract_features(inputs, None, memory=memory)[1]["memory"]
    for start in range(0, len(targets), block):
        width = min(block, len(targets) - start)
        inputs = rows_of(subject, [begin], width, start)
        wanted = rows_of(subject, [begin], width, start + 1)
        held = 0 if memory is None else int(memory.valid.sum())
        with torch.enable_grad():
            features, extra = decoder.extract_features(inputs, None, memory=memory)
            nats = -log_likelihood(subject, features, wanted)[0]
            gradients = torch.autograd.grad(nats.mean(), parameters, allow_unused=True)
        memory = extra["memory"]
        yield held, nats.detach(), gradients


@torch.no_grad()
def _step(parameters: list, gradients: tuple, trained: list, rates: list, decays: list) -> None:
    rows = zip(parameters, gradients, trained, rates, decays, strict=True)
    for one, gradient, value, rate, decay in rows:
        back = decay * (value - one)
        if gradient is not None:
            back -= rate * gradient
        one += back
