"""Language models side by side: how each reads the text, and a table of what it scores."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

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

    Raises:
        ValueError: a number is too small.
    """

    mem_len: int | None = None
    context: int | None = None
    stride: int | None = None
    rows: int = 4

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
            score = score_with_memory(subject, targets, block, mem_len, self.rows)
            return f"memory {mem_len}", score
        if self.mem_len is not None:
            raise ValueError(f"--mem-len: {subject.name} has no memory; leave it out")
        context = self.context or subject.trained_length
        if subject.longest is not None and context > subject.longest:
            raise ValueError(
                f"--context {context}: the table of {subject.name} has {subject.longest} positions"
            )
        stride = min(self.stride or max(1, context // 2), context)
        return f"window {context}", score_with_windows(subject, targets, context, stride, self.rows)


def compare(
    checkpoints: list[Path], data: Path, split: str, tokens: int | None, reading: Reading
) -> str:
    """Return a table of models' scores on the last tokens of a split.

    Args:
        checkpoints: a row each.
        data: folder of binarised text.
        split: part of it.
        tokens: predictions scored; None: all.
        reading: how the text is read.
    """
    rows = []
    for path in checkpoints:
        subject = load_subject(path, data, split)
        reads, score = reading.score(subject, last_targets(subject, tokens))
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
    return show(rows)
