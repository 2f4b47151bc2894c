"""Score language models on the same predictions: with memory, with windows of context, or by dynamic evaluation.

A prediction is a token of the stream. Every method scores the same ones, the last of a split, so that perplexities
are comparable. The context of a prediction is, with memory, what memory and segment hold at the first layer (recurrence
reaches further, layer by layer), and with windows the window's beginning; of a model that was trained with
--reset-memory-at-document nothing of it that stands before the document's start.

Dynamic evaluation (Krause et al. 2018, arXiv:1709.07432, section 3):

    theta_i = theta_(i-1) - eta grad L(s_i) + lambda (theta_g - theta_(i-1))

Segment s_i is scored under theta_(i-1); then the parameters learn from it, and go back a part of the way to the trained
ones, theta_g. L is the mean loss of the segment's tokens; gradients end at the memory, which holds the states of the
parameters that made them. The RMS variant learns little where gradients in training were large, and goes back there
faster:

    RMS     = sqrt(mean over training segments of (grad L)^2), for each element
    theta_i = theta_(i-1) - eta grad L(s_i) / (RMS + epsilon)
              + lambda min(RMS / mean(RMS), 1 / lambda) (theta_g - theta_(i-1))

The mean is over all elements, as in the paper; the released code divides by the sum of each tensor's mean, and by
default does not divide the sum of squares by the number of segments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tabulate
import torch
import torch.nn.functional as F  # noqa: N812
from fairseq.modules import AdaptiveSoftmax
from torch import Tensor

from relpos_fairseq.io.progress import progress
from relpos_fairseq.saved.identity import tell_replaced

# Digits of a table's columns.
FORMATS = {"bits": ".4f", "perplexity": ".3f", "tokens/s": ",.0f", "tokens_per_second": ",.0f"}
# What options of language_modeling are here: a stream has no sentences, and a prediction is of the next token.
STREAM = {
    **{"sample_break_mode": "none", "add_bos_token": False, "shorten_method": "none"},
    **{"self_target": False, "future_target": False, "past_target": False},
}


@dataclass(frozen=True)
class Subject:
    """A checkpoint and the text that it is evaluated on."""

    model: Any  # in evaluation mode
    tokens: np.ndarray  # (N,) the stream of the split
    starts: np.ndarray | None  # (N,) True at tokens that begin a document; None: documents are one text
    boundaries: str | None  # where documents start, as --document-boundaries says; None: documents are one text
    pad: int  # id of padding
    trained_length: int  # tokens a sample in training
    trained_memory: int | None  # memory length in training; None: the model has no memory
    memory: int | None  # memory length in evaluation, --eval-mem-len or the trained one
    longest: int | None  # the most positions that the model's tables allow, or None
    name: str  # architecture and scheme
    parameters: int  # how many the model trains


@dataclass(frozen=True)
class Score:
    """The score of a model on all predictions."""

    tokens: int  # how many predictions
    nats: float  # their negative log-likelihood
    seconds: float  # time without warming up
    each: np.ndarray | None = None  # (tokens,) nats of every prediction, in the order of the text
    place: np.ndarray | None = None  # (tokens,) tokens of its segment or window before the prediction's input
    memory: np.ndarray | None = None  # (tokens,) slots of memory that its segment had

    @property
    def bits(self) -> float:
        return self.nats / self.tokens / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nats / self.tokens, 700.0))

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def load_subject(
    checkpoint: Path, data: Path, split: str, overrides: Mapping[str, str] | None = None, boundaries: str | None = None
) -> Subject:
    """Load a checkpoint of either language model, and a split of binarised text.

    Args:
        checkpoint: its file.
        data: folder of the text.
        split: the text's name there.
        overrides: fields of the model's config, instead of the checkpoint's.
        boundaries: where documents start, as --document-boundaries says, instead of the checkpoint's.

    Raises:
        ValueError: no such file, no language model, a dictionary of other data, a field that the model has not, or
            no documents where the checkpoint was trained with them.
    """
    from fairseq.data import Dictionary

    from relpos_fairseq.saved.model import SavedModel

    if not (data / "dict.txt").is_file():
        raise ValueError(f"{data / 'dict.txt'} does not exist")
    opened = SavedModel.open(checkpoint, {"data": str(data)})
    opened.require("relpos sample")
    saved = opened.options
    if more := opened.framing:
        raise ValueError(f"{checkpoint}: texts of --add-bos-token have {more}: use fairseq-eval-lm, which writes them")
    languages = sorted(path.parent.name for path in data.glob(f"*/{split}.idx"))
    if languages and not (data / f"{split}.idx").is_file():
        raise ValueError(f"--data {data} holds texts of {', '.join(languages)}: give the folder of one of them")
    _override(opened.checkpoint["cfg"], overrides or {})
    tell_replaced(saved.task, STREAM)
    if saved.task.get("reset_memory_at_document"):
        replacement = {} if boundaries is None else {"document_boundaries": boundaries}
        tell_replaced(saved.task, replacement)
        boundaries = str(boundaries or saved.task["document_boundaries"])
    elif boundaries is not None:
        raise ValueError(f"--document-boundaries: {checkpoint} was trained without --reset-memory-at-document")
    words = Dictionary.load(str(data / "dict.txt"))
    if opened.rows != len(words):
        raise ValueError(
            f"{data} has {len(words)} types and {checkpoint} was trained with {opened.rows}: "
            f"binarise the text with the dictionary of its training (--srcdict)"
        )
    model, cfg, _ = opened.build()
    limit = model.max_positions()
    tokens, starts = read_text(data / split, words, boundaries)
    return Subject(
        model=model,
        tokens=tokens,
        starts=starts,
        boundaries=boundaries,
        pad=words.pad(),
        trained_length=int(cfg.task.tokens_per_sample),
        trained_memory=int(cfg.model.mem_len) if hasattr(model, "mem_len") else None,
        memory=int(model.mem_len) if hasattr(model, "mem_len") else None,
        longest=None if limit is None or limit > 10**6 else int(limit),
        name=f"{cfg.model._name} {getattr(cfg.model, 'position_scheme', '')}".strip(),
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )


def read_text(path: Path, words: Any, boundaries: str | None) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the tokens (N,) of a split, and (N,) where its documents start, or None where they are one text.

    Raises:
        ValueError: there is no such split, or nothing says where its documents start.
    """
    from relpos_fairseq.data.streams.dataset import find_documents, read_stream

    tokens = read_stream(path, words, None, False)
    if boundaries is None:
        return tokens, None
    starts = np.zeros(len(tokens), bool)
    starts[find_documents(path, tokens, boundaries, words.eos())] = True
    return tokens, starts


def _override(cfg: Any, overrides: Mapping[str, str]) -> None:
    """Set fields of the model's config; fields that did not exist when the checkpoint was written are added."""
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
    from omegaconf import open_dict

    name = cfg.model._name
    known = MODEL_DATACLASS_REGISTRY[ARCH_MODEL_NAME_REGISTRY.get(name, name)]
    tell_replaced(cfg.model, overrides)
    with open_dict(cfg):
        for field, value in overrides.items():
            if field not in known.__dataclass_fields__:
                raise ValueError(f"--override {field}={value}: {name} has no such field")
            cfg.model[field] = value


def show(rows: list[dict]) -> str:
    """Return a Markdown table of rows with the same keys."""
    columns = list(rows[0])
    formats = [FORMATS.get(name, "g") for name in columns]
    cells = [[row[name] for name in columns] for row in rows]
    return tabulate.tabulate(cells, columns, tablefmt="github", intfmt=",", floatfmt=formats)


def last_targets(subject: Subject, count: int | None) -> range:
    """Return the positions of the last predictions of the stream.

    Raises:
        ValueError: there are fewer.
    """
    total = len(subject.tokens) - 1
    if count is not None and not 1 <= count <= total:
        raise ValueError(f"the split has {total} tokens to predict; asked for the last {count}")
    return range(len(subject.tokens) - (count or total), len(subject.tokens))


def log_likelihood(subject: Subject, features: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of each target (B, T), fp32 or better; 0 at padding."""
    decoder = subject.model.decoder
    if decoder.adaptive_softmax is None:
        scores = decoder.get_normalized_probs((decoder.output_layer(features), None), True)
        picked = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    else:
        picked = _of_bands(decoder.adaptive_softmax, features, targets)
    return picked.masked_fill(targets == subject.pad, 0.0)


def _of_bands(softmax: AdaptiveSoftmax, features: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of each target (B, T) by the bands that have one, with gradients.

    fairseq's `get_log_prob` fills rows as wide as the vocabulary in place, through which no gradient goes.
    """
    _, places = softmax.adapt_target(targets)
    found = features.new_zeros(targets.numel(), dtype=torch.promote_types(features.dtype, torch.float32))
    every = torch.arange(targets.numel(), device=targets.device)
    for place, scores, wanted in zip([every, *places], *softmax(features, targets), strict=True):
        if place is not None:
            found = found.index_add(0, place, -F.cross_entropy(scores.to(found.dtype), wanted, reduction="none"))
    return found.view(targets.shape)


def rows_of(stream: np.ndarray, fill: int, starts: list[int], width: int) -> Tensor:
    """Return rows (B, width) of a stream, each from its start on; before the stream's beginning is `fill`."""
    rows = np.full((len(starts), width), fill, stream.dtype if stream.dtype == bool else np.int64)
    for row, first in zip(rows, starts, strict=True):
        missing = min(max(-first, 0), width)
        row[missing:] = stream[first + missing : first + width]
    return torch.from_numpy(rows)


def read_rows(subject: Subject, starts: list[int], width: int, memory: Any = None) -> tuple[Tensor, dict]:
    """Return features (B, width, E) of rows of the text from their starts on, and what else the decoder returns."""
    inputs = {} if memory is None else {"memory": memory}
    if subject.starts is not None:
        inputs["document_starts"] = rows_of(subject.starts, False, starts, width)
    tokens = rows_of(subject.tokens, subject.pad, starts, width)
    return subject.model.decoder.extract_features(tokens, None, **inputs)


def targets_of(subject: Subject, starts: list[int], width: int) -> Tensor:
    """Return the tokens (B, width) that rows predict."""
    return rows_of(subject.tokens, subject.pad, [start + 1 for start in starts], width)


@torch.no_grad()
def score_with_memory(subject: Subject, targets: range, block: int, mem_len: int, rows: int = 1) -> Score:
    """Score blocks in order with memory, which is filled beforehand as far as the stream allows.

    `rows` pieces of `targets` are read side by side, `block` tokens a step.
    """
    model = subject.model
    model.mem_len = mem_len
    size = -(-len(targets) // rows)
    seconds, found = 0.0, []
    with progress(total=len(targets), description=f"memory {mem_len}", unit=" tokens") as bar:
        for group in _equal_pieces(targets, size):
            # As far as memory reaches, layer by layer; rows with less before them are padded.
            warm = min(group[-1].start - 1, mem_len * len(model.decoder.layers))
            memory, length = None, len(group[0])
            begins = [piece.start - 1 for piece in group]
            for start in range(-warm, 0, block):
                _, extra = read_rows(subject, [begin + start for begin in begins], min(block, -start), memory)
                memory = extra["memory"]
            began, table = time.perf_counter(), np.zeros((3, len(group), length))
            for start in range(0, length, block):
                width = min(block, length - start)
                firsts = [begin + start for begin in begins]
                slots = 0 if memory is None else memory.valid.sum(1, keepdim=True).numpy()
                features, extra = read_rows(subject, firsts, width, memory)
                memory = extra["memory"]
                wanted = targets_of(subject, firsts, width)
                part = table[:, :, start : start + width]
                part[0] = -log_likelihood(subject, features, wanted).double().numpy()
                part[1], part[2] = np.arange(width), slots
                bar.update(width * len(group))
            found.append(table.reshape(3, -1))
            seconds += time.perf_counter() - began
    each, place, slots = np.concatenate(found, axis=1)
    return Score(len(targets), float(each.sum()), seconds, each, place.astype(int), slots.astype(int))


def _equal_pieces(targets: range, size: int) -> Iterator[list[range]]:
    """Yield all pieces of `size` targets together, then the shorter rest, so that rows need no padding."""
    whole = len(targets) // size
    pieces = [targets[number * size : (number + 1) * size] for number in range(whole)]
    if pieces:
        yield pieces
    if len(targets) % size:
        yield [targets[whole * size :]]


@torch.no_grad()
def score_with_windows(subject: Subject, targets: range, context: int, stride: int, batch: int = 1) -> Score:
    """Score windows of `context` tokens, of each of which the last `stride` predictions count.

    At the stream's beginning windows are shorter; a stride of 1 gives every prediction all of the
    context; `batch` windows are read together.
    """
    model, each, places = subject.model, [], []
    if hasattr(model, "mem_len"):
        model.mem_len = 0
    steps = range(targets.start, targets.stop, stride)
    began = time.perf_counter()
    with progress(total=len(targets), description=f"context {context}", unit=" tokens") as bar:
        for group in _windows(steps, targets.stop, context, stride, batch):
            ends = [min(start + stride, targets.stop) for start in group]
            width = min(context, ends[0] - 1)
            counted = ends[0] - group[0]
            features, _ = read_rows(subject, [end - 1 - width for end in ends], width)
            wanted = targets_of(subject, [end - 1 - counted for end in ends], counted)
            scores = log_likelihood(subject, features[:, -counted:], wanted)
            each.append(-scores.double().flatten().numpy())
            places.append(np.tile(np.arange(width - counted, width), len(group)))
            bar.update(counted * len(group))
    nats = np.concatenate(each)
    seconds, none = time.perf_counter() - began, np.zeros(len(nats), int)
    return Score(len(targets), float(nats.sum()), seconds, nats, np.concatenate(places), none)


def _windows(starts: range, stop: int, context: int, stride: int, batch: int) -> Iterator[list[int]]:
    """Yield the starts of full windows in batches; each shorter window comes alone, so that a batch has one shape."""
    group: list[int] = []
    for start in starts:
        full = start + stride <= stop and start + stride - 1 >= context
        if full:
            group.append(start)
        if group and (len(group) == batch or not full):
            yield group
            group = []
        if not full:
            yield [start]
    if group:
        yield group


@dataclass(frozen=True)
class Dynamic:
    """How parameters follow the text in dynamic evaluation.

    Raises:
        ValueError: a number is out of range.
    """

    rate: float  # eta
    decay: float = 1e-3  # lambda
    training: Path | None = None  # binarised split, without suffix, whose gradients scale the steps; None: plain steps
    tokens: int = 100_000  # of the split, from its beginning
    epsilon: float = 1e-3  # added to the scale

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
        """Return the elementwise factors of gradients, and of the steps back to the trained parameters."""
        mean = sum(one.double().sum() for one in rms) / sum(one.numel() for one in rms)
        back = [(self.decay * one / mean).clamp(max=1.0).to(one.dtype) for one in rms]
        return [self.rate / (one + self.epsilon) for one in rms], back


def score_dynamic(subject: Subject, targets: range, block: int, mem_len: int, dynamic: Dynamic) -> Score:
    """Score blocks in order, learn from each after its score, and restore the parameters at the end.

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
    tokens, starts = read_text(dynamic.training, subject.model.decoder.dictionary, subject.boundaries)
    tokens = tokens[: dynamic.tokens + 1]
    parameters = [one for one in subject.model.parameters() if one.requires_grad]
    squares, count, targets = [torch.zeros_like(one) for one in parameters], 0, len(tokens) - 1
    with progress(total=targets, description="gradients of training", unit=" tokens") as bar:
        read = _segments(replace(subject, tokens=tokens, starts=starts), range(1, len(tokens)), block)
        for _, nats, gradients in read:
            for square, gradient in zip(squares, gradients, strict=True):
                if gradient is not None:
                    square.addcmul_(gradient, gradient)
            count += 1
            bar.update(len(nats))
    return [(square / count).sqrt() for square in squares]


def _segments(subject: Subject, targets: range, block: int) -> Iterator[tuple[int, Tensor, tuple[Tensor | None, ...]]]:
    """Yield of each segment in order the slots of memory, nats (T,), and the gradients of their mean.

    Parameters may change between segments; memory is filled beforehand where the text allows.
    """
    model = subject.model
    parameters = [one for one in model.parameters() if one.requires_grad]
    begin, memory = targets.start - 1, None
    for start in range(-min(begin, model.mem_len * len(model.decoder.layers)), 0, block):
        with torch.no_grad():
            memory = read_rows(subject, [begin + start], min(block, -start), memory)[1]["memory"]
    for start in range(0, len(targets), block):
        width = min(block, len(targets) - start)
        wanted = targets_of(subject, [begin + start], width)
        held = 0 if memory is None else int(memory.valid.sum())
        with torch.enable_grad():
            features, extra = read_rows(subject, [begin + start], width, memory)
            nats = -log_likelihood(subject, features, wanted)[0]
            gradients = torch.autograd.grad(nats.mean(), parameters, allow_unused=True)
        memory = extra["memory"]
        yield held, nats.detach(), gradients


@torch.no_grad()
def _step(parameters: list, gradients: tuple, trained: list, rates: list, decays: list) -> None:
    """Move each parameter against its gradient, and back towards its trained value."""
    rows = zip(parameters, gradients, trained, rates, decays, strict=True)
    for one, gradient, value, rate, decay in rows:
        step = decay * (value - one)
        if gradient is not None:
            step -= rate * gradient
        one += step
