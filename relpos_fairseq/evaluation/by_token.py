"""The score of every prediction: JSON lines, and pictures of loss by place and by memory."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from relpos_fairseq.engine.files import open_text_out
from relpos_fairseq.evaluation.figures import of_tokens, panels
from relpos_fairseq.evaluation.language_model import Score, Subject

POINTS = 48  # of a curve: neighbouring places are put together


@dataclass(frozen=True)
class Scored:
    """A checkpoint's predictions under one way of reading.

    Attributes:
        checkpoint: its name.
        subject: the model and its text.
        reads: the way, in words.
        mem_len: its memory; None: windows.
        targets: positions of the predictions.
        score: what they gave.
    """

    checkpoint: str
    subject: Subject
    reads: str
    mem_len: int | None
    targets: range
    score: Score


def write(path: Path, found: Sequence[Scored]) -> Path:
    """Write the lines, and the picture beside them under the same name; returns the picture."""
    with open_text_out(path) as file:
        for one in found:
            words, score = one.subject.model.decoder.dictionary, one.score
            columns = (score.each.tolist(), score.place.tolist(), score.memory.tolist())
            for index, nats, place, memory in zip(one.targets, *columns, strict=True):
                token = words[int(one.subject.tokens[index])]
                line = {
                    "checkpoint": one.checkpoint,
                    "reads": one.reads,
                    "index": index,
                    "token": token,
                    "nats": nats,
                    "place": place,
                    "memory": memory,
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    picture = path.with_suffix(".png")
    draw(picture, found)
    return picture


def by_place(score: Score, points: int = POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Mean place and mean bits of each group of neighbouring places, P of them."""
    width = -(-(int(score.place.max()) + 1) // points)
    group = score.place // width
    count = np.bincount(group)
    used = count > 0
    sums = (np.bincount(group, values)[used] for values in (score.place, score.each))
    places, nats = (total / count[used] for total in sums)
    return places, nats / math.log(2)


def draw(path: Path, found: Sequence[Scored]) -> None:
    """Draw bits by place, and by length of memory where a checkpoint was read with several."""
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
            of_tokens(axes[1], "memory")
        for axis in axes:
            axis.set_ylabel("bits a token")
            axis.legend(fontsize="small")
