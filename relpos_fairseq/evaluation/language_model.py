"""Language models scored on the same predictions, with memory or with windows of context.

A prediction is a token of the stream; every method here scores the same ones, the last of a split,
so that perplexities are comparable.  Context: with memory, what memory and segment hold at the
first layer (recurrence reaches further, layer by layer); with windows, what the window holds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tabulate
import torch
from torch import Tensor

from relpos_fairseq.engine.progress import progress

# Digits of a table's columns.
FORMATS = {"bits": ".4f", "perplexity": ".3f", "tokens/s": ",.0f", "tokens_per_second": ",.0f"}


@dataclass(frozen=True)
class Subject:
    """A checkpoint and the text that it is evaluated on.

    Attributes:
        model: in evaluation mode.
        tokens: (N,) the stream of the split.
        pad: id of padding.
        trained_length: tokens per sample in training.
        trained_memory: memory length in training; None: the model has no memory.
        longest: most positions that the model's tables allow, or None.
        name: architecture and scheme.
        parameters: how many it trains.
    """

    model: Any
    tokens: np.ndarray
    pad: int
    trained_length: int
    trained_memory: int | None
    longest: int | None
    name: str
    parameters: int


@dataclass(frozen=True)
class Score:
    """What an evaluation gave.

    Attributes:
        tokens: predictions.
        nats: their negative log-likelihood.
        seconds: time that it took, warming up left out.
    """

    tokens: int
    nats: float
    seconds: float

    @property
    def bits(self) -> float:
        """Bits a token."""
        return self.nats / self.tokens / math.log(2)

    @property
    def perplexity(self) -> float:
        """Perplexity a token."""
        return math.exp(min(self.nats / self.tokens, 700.0))

    @property
    def speed(self) -> float:
        """Predictions a second."""
        return self.tokens / self.seconds


def load_subject(checkpoint: Path, data: Path, split: str) -> Subject:
    """Load a checkpoint of either language model, and a split.

    Raises:
        ValueError: no such file, no language model, or a dictionary of other data.
    """
    from fairseq import checkpoint_utils
    from fairseq.data import Dictionary

    from relpos_fairseq.data.streams.dataset import read_stream

    for path in (checkpoint, data / "dict.txt"):
        if not path.is_file():
            raise ValueError(f"{path} does not exist")
    state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
    task_name = state["cfg"]["task"]._name if state.get("cfg") else None
    if task_name not in ("language_modeling", "segment_language_modeling"):
        raise ValueError(f"{checkpoint} is no language model (its task is {task_name})")
    words = Dictionary.load(str(data / "dict.txt"))
    weights = [v for k, v in state["model"].items() if k.endswith("embed_tokens.weight")]
    if weights and len(weights[0]) != len(words):
        raise ValueError(
            f"{data} has {len(words)} types and {checkpoint} was trained with {len(weights[0])}: "
            f"binarise the text with the dictionary of its training (--srcdict)"
        )
    models, cfg, _ = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides={"data": str(data)}, state=state
    )
    model = models[0].eval()
    limit = model.max_positions()
    scheme = getattr(cfg.model, "position_scheme", "")
    return Subject(
        model=model,
        tokens=read_stream(data / split, words, None, False),
        pad=words.pad(),
        trained_length=int(cfg.task.tokens_per_sample),
        trained_memory=int(cfg.model.mem_len) if hasattr(model, "mem_len") else None,
        longest=None if limit is None or limit > 10**6 else int(limit),
        name=f"{cfg.model._name} {scheme}".strip(),
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
    )


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
    output = decoder.output_layer(features)
    scores = decoder.get_normalized_probs((output, None), True, {"target": targets})
    picked = scores.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return picked.masked_fill(targets == subject.pad, 0.0)


def _rows(subject: Subject, starts: list[int], width: int, shift: int) -> Tensor:
    """(B, width) tokens from each start + shift on; padding before the stream's beginning."""
    rows = np.full((len(starts), width), subject.pad, np.int64)
    for row, start in zip(rows, starts, strict=True):
        first = start + shift
        missing = min(max(-first, 0), width)
        row[missing:] = subject.tokens[first + missing : first + width]
    return torch.from_numpy(rows)


@torch.no_grad()
def score_with_memory(
    subject: Subject, targets: range, block: int, mem_len: int, rows: int = 1
) -> Score:
    """Read blocks in order with memory, which is filled beforehand where the stream allows.

    Args:
        subject: model and text.
        targets: positions of the predictions.
        block: tokens a step.
        mem_len: memory in evaluation.
        rows: pieces of `targets` that are read side by side.
    """
    model = subject.model
    model.mem_len = mem_len
    size = -(-len(targets) // rows)
    nats = seconds = 0.0
    with progress(total=len(targets), description=f"memory {mem_len}", unit=" tokens") as bar:
        for group in _equal_pieces(targets, size):
            # As far as memory reaches, layer by layer; rows with less before them are padded.
            warm = min(group[-1].start - 1, mem_len * len(model.decoder.layers))
            memory, length = None, len(group[0])
            begins = [piece.start - 1 for piece in group]
            for start in range(-warm, 0, block):
                width = min(block, -start)
                inputs = _rows(subject, begins, width, start)
                _, extra = model.decoder.extract_features(inputs, None, memory=memory)
                memory = extra["memory"]
            began = time.perf_counter()
            for start in range(0, length, block):
                width = min(block, length - start)
                inputs = _rows(subject, begins, width, start)
                features, extra = model.decoder.extract_features(inputs, None, memory=memory)
                memory = extra["memory"]
                wanted = _rows(subject, begins, width, start + 1)
                nats -= float(log_likelihood(subject, features, wanted).double().sum())
                bar.update(width * len(group))
            seconds += time.perf_counter() - began
    return Score(len(targets), nats, seconds)


def _equal_pieces(targets: range, size: int) -> Iterator[list[range]]:
    """Pieces of one size together, and the rest by itself, so that rows need no padding."""
    whole = len(targets) // size
    pieces = [targets[number * size : (number + 1) * size] for number in range(whole)]
    if pieces:
        yield pieces
    if len(targets) % size:
        yield [targets[whole * size :]]


@torch.no_grad()
def score_with_windows(
    subject: Subject, targets: range, context: int, stride: int, batch: int = 1
) -> Score:
    """Read windows of `context` tokens, of which the last `stride` predictions count.

    Args:
        subject: model and text.
        targets: positions of the predictions.
        context: tokens a window; at the stream's beginning there are fewer.
        stride: how far windows are apart: 1 gives every prediction all of the context.
        batch: windows evaluated together.
    """
    model, nats = subject.model, 0.0
    if hasattr(model, "mem_len"):
        model.mem_len = 0
    steps = range(targets.start, targets.stop, stride)
    began = time.perf_counter()
    with progress(total=len(targets), description=f"context {context}", unit=" tokens") as bar:
        for group in _windows(steps, targets.stop, context, stride, batch):
            ends = [min(start + stride, targets.stop) for start in group]
            width = min(context, ends[0] - 1)
            counted = ends[0] - group[0]
            inputs = _rows(subject, [end - 1 - width for end in ends], width, 0)
            features, _ = model.decoder.extract_features(inputs, None)
            wanted = _rows(subject, [end - counted for end in ends], counted, 0)
            scores = log_likelihood(subject, features[:, -counted:], wanted)
            nats -= float(scores.double().sum())
            bar.update(counted * len(group))
    return Score(len(targets), nats, time.perf_counter() - began)


def _windows(
    starts: range, stop: int, context: int, stride: int, batch: int
) -> Iterator[list[int]]:
    """Starts of windows of equal shape together: shorter ones come alone."""
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
