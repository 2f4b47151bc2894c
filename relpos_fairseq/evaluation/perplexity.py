"""Language models side by side: how each reads the text, and a table of what it scores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.evaluation.by_token import Scored, write
from relpos_fairseq.evaluation.dynamic import Dynamic, score_dynamic
from relpos_fairseq.evaluation.language_model import (
    Score,
    Subject,
    last_targets,
    load_subject,
    score_with_memory,
    score_with_windows,
    show,
)


@dataclass(frozen=True)
class Reading:
    """How a model reads the text.

    Attributes:
        mem_len: tokens of memory, for a model that has one; None: its own.
        context: tokens a window, without memory; None: memory, or the trained length.
        stride: tokens between windows; None: half of a window.
        rows: rows or windows evaluated together.
        dynamic: how parameters follow the text, for a model with memory; None: they stay.

    Raises:
        ValueError: a number is too small.
    """

    mem_len: int | None = None
    context: int | None = None
    stride: int | None = None
    rows: int = 4
    dynamic: Dynamic | None = None

    def __post_init__(self) -> None:
        for name, least in (("mem_len", 0), ("context", 1), ("stride", 1), ("rows", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be >= {least}, got {value}")

    def score(self, subject: Subject, targets: range) -> tuple[str, Score]:
        """Return what a model reads, in words, and its score.

        Raises:
            ValueError: it has no memory, or its tables end before the window does.
        """
        if self.context is None and subject.trained_memory is not None:
            mem_len = subject.trained_memory if self.mem_len is None else self.mem_len
            block = min(subject.trained_length, len(targets))
            if self.dynamic is not None:
                score = score_dynamic(subject, targets, block, mem_len, self.dynamic)
                kind = "dynamic" if self.dynamic.training is None else "dynamic (RMS)"
                return f"memory {mem_len}, {kind}", score
            score = score_with_memory(subject, targets, block, mem_len, self.rows)
            return f"memory {mem_len}", score
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
) -> str:
    """Return a table of scores on the last tokens of a split: a row a checkpoint and reading.

    Every prediction's score goes to `by_token`, with a picture beside it.
    """
    rows, found = [], []
    names = names_of(checkpoints)
    for path in checkpoints:
        subject = load_subject(path, data, split)
        targets = last_targets(subject, tokens)
        for reading in readings:
            reads, score = reading.score(subject, targets)
            mem_len = subject.model.mem_len if reads.startswith("memory") else None
            found.append(Scored(names[path], subject, reads, mem_len, targets, score))
            rows.append(
                {
                    "checkpoint": str(path),
                    "model": subject.name,
                    "reads": reads,
                    "predictions": score.tokens,
                    "perplexity": score.perplexity,
                    "bits": score.bits,
                    "tokens/s": score.speed,
                }
            )
    text = show(rows)
    if by_token is not None:
        text += f"\nwrote {by_token} and {write(by_token, found)}"
    return text


def names_of(checkpoints: list[Path]) -> dict[Path, str]:
    """Return what tells checkpoints apart: the folder's name, with the file's where it must be."""
    folders = [path.absolute().parent.name for path in checkpoints]
    alone = len(set(folders)) == len(set(checkpoints))
    return {
        path: folder if alone else f"{folder}/{path.stem}" for path, folder in zip(checkpoints, folders, strict=True)
    }
