"""Compare language models by perplexity: a table, every prediction's score as JSON lines, and plots of them."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relpos_fairseq.evaluation.language_model import (
    Dynamic,
    Score,
    Subject,
    last_targets,
    load_subject,
    score_dynamic,
    score_with_memory,
    score_with_windows,
    show,
)
from relpos_fairseq.io.files import check_replaceable, is_stream, open_text_out

POINTS = 48  # of a curve; neighbouring places are averaged


@dataclass(frozen=True)
class Reading:
    """How a model reads the text.

    Raises:
        ValueError: a number is too small.
    """

    mem_len: int | None = None  # tokens of memory, for a model that has one; None: its own
    context: int | None = None  # tokens a window, without memory; None: memory, or the trained length
    stride: int | None = None  # tokens between windows; None: half of a window
    rows: int = 4  # rows or windows evaluated together
    dynamic: Dynamic | None = None  # how parameters follow the text, for a model with memory; None: they stay

    def __post_init__(self) -> None:
        for name, least in (("mem_len", 0), ("context", 1), ("stride", 1), ("rows", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be >= {least}, got {value}")

    def score(self, subject: Subject, targets: range) -> tuple[str, Score]:
        """Return how a model reads the text, in words, and its score.

        Raises:
            ValueError: the model has no memory, or its tables end before the window does.
        """
        if self.context is None and subject.trained_memory is not None:
            mem_len = subject.memory if self.mem_len is None else self.mem_len
            block = min(subject.trained_length, len(targets))
            if self.dynamic is not None:
                kind = "dynamic" if self.dynamic.training is None else "dynamic (RMS)"
                return f"memory {mem_len}, {kind}", score_dynamic(subject, targets, block, mem_len, self.dynamic)
            return f"memory {mem_len}", score_with_memory(subject, targets, block, mem_len, self.rows)
        if self.dynamic is not None:
            raise ValueError(f"--dynamic: {subject.name} is not read with memory; leave it out")
        if self.mem_len is not None:
            raise ValueError(f"--mem-len: {subject.name} has no memory; leave it out")
        context = self.context or subject.trained_length
        if subject.longest is not None and context > subject.longest:
            raise ValueError(f"--context {context}: the table of {subject.name} has {subject.longest} positions")
        stride = min(self.stride or max(1, context // 2), context)
        return f"window {context}", score_with_windows(subject, targets, context, stride, self.rows)


def compare(
    checkpoints: list[Path],
    data: Path,
    split: str,
    tokens: int | None,
    readings: list[Reading],
    by_token: Path | None = None,
    boundaries: str | None = None,
) -> str:
    """Return a table of scores on the last tokens of a split: a row a checkpoint and reading.

    Every prediction's score is written to `by_token`, with a plot beside it; `boundaries` of documents replace the
    checkpoints'.
    """
    if by_token is not None and not is_stream(by_token):
        check_replaceable(by_token.with_suffix(".png"))
    rows, found, names = [], [], names_of(checkpoints)
    for path in checkpoints:
        subject = load_subject(path, data, split, boundaries=boundaries)
        targets = last_targets(subject, tokens)
        for reading in readings:
            reads, score = reading.score(subject, targets)
            mem_len = subject.model.mem_len if reads.startswith("memory") else None
            found.append(ScoredText(names[path], subject, reads, mem_len, targets, score))
            rows.append(
                {
                    "checkpoint": str(path),
                    "model": subject.name,
                    "reads": reads,
                    "predictions": score.tokens,
                    "perplexity": score.perplexity,
                    "bits": score.bits,
                    "tokens/s": score.speed,
                    "split": split,
                }
            )
    text = show(rows)
    if by_token is not None:
        text += f"\nwrote {' and '.join(map(str, write_by_token(by_token, found)))}"
    return text


def names_of(checkpoints: list[Path]) -> dict[Path, str]:
    """Return a different name for each checkpoint: its folder's, and the file's too where folders are the same."""
    folders = [path.absolute().parent.name for path in checkpoints]
    alone = len(set(folders)) == len(set(checkpoints))
    return {
        path: folder if alone else f"{folder}/{path.stem}" for path, folder in zip(checkpoints, folders, strict=True)
    }


@dataclass(frozen=True)
class ScoredText:
    """A checkpoint's predictions under one way of reading."""

    checkpoint: str  # its name
    subject: Subject  # the model and its text
    reads: str  # the way of reading, in words
    mem_len: int | None  # of the memory; None: windows
    targets: range  # positions of the predictions
    score: Score


def write_by_token(path: Path, found: Sequence[ScoredText]) -> list[Path]:
    """Write a JSON line for every prediction, and a plot beside it if it is a file; return the paths."""
    with open_text_out(path) as file:
        for one in found:
            words, score = one.subject.model.decoder.dictionary, one.score
            columns = (score.each.tolist(), score.place.tolist(), score.memory.tolist())
            for index, nats, place, memory in zip(one.targets, *columns, strict=True):
                line = {"checkpoint": one.checkpoint, "reads": one.reads, "index": index}
                line |= {"token": words[int(one.subject.tokens[index])], "nats": nats, "place": place, "memory": memory}
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    if is_stream(path):
        return [path]
    draw_by_token(path.with_suffix(".png"), found)
    return [path, path.with_suffix(".png")]


def by_place(score: Score, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean place (P,) and the mean bits (P,) of each group of neighbouring places."""
    width = -(-(int(score.place.max()) + 1) // points)
    group = score.place // width
    count = np.bincount(group)
    used = count > 0
    sums = (np.bincount(group, values)[used] for values in (score.place, score.each))
    places, nats = (total / count[used] for total in sums)
    return places, nats / math.log(2)


def draw_by_token(path: Path, found: Sequence[ScoredText]) -> None:
    """Draw bits by place, and by length of memory where a checkpoint was read with several."""
    from relpos_fairseq.plots.axes import panels, show_tokens

    lengths: dict[str, list[tuple[int, float]]] = {}
    for one in found:
        if one.mem_len is not None:
            lengths.setdefault(one.checkpoint, []).append((one.mem_len, one.score.bits))
    lengths = {name: sorted(points) for name, points in lengths.items() if len(points) > 1}
    with panels(path, 2 if lengths else 1, 6, 4) as axes:
        for one in found:
            axes[0].plot(*by_place(one.score), label=f"{one.checkpoint}, {one.reads}")
        axes[0].set_xlabel("place in the segment or window")
        for name, points in lengths.items():
            axes[1].plot(*zip(*points, strict=True), "o-", label=name)
            show_tokens(axes[1], "memory")
        for axis in axes:
            axis.set_ylabel("bits a token")
            axis.legend(fontsize="small")
