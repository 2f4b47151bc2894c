"""A language model of characters: perplexity at 1 to 8 times the context of its training."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from relpos_fairseq.comparison.scores import pack, unpack
from relpos_fairseq.comparison.tasks.base import Run, Scored, Task, binarise, kind, write_lines
from relpos_fairseq.data import grammar
from relpos_fairseq.engine.files import read_json, write_json
from relpos_fairseq.engine.lines import read_lines

BLOCK = 32  # predictions that are an example: neighbours are alike
SPACE = "▁"


@kind("characters")
@dataclass(frozen=True, kw_only=True)
class Characters(Task):
    """Plain text, character by character; its last twentieths validate and test."""

    unit: ClassVar[str] = "characters of context"
    checkpoint: ClassVar[str] = "best"
    default: ClassVar[dict] = {
        "task": "language_modeling",
        "arch": "relpos_transformer_lm_tiny",
        "dropout": 0.1,
        "share-decoder-input-output-embed": True,
        "criterion": "relpos_cross_entropy",
        "sample-break-mode": "none",
        "lr": 2e-3,
    }

    # a file of lines, plain or compressed; None: the English of the built-in corpus
    text: Path | None = None
    context: int = 64  # characters of a sample in training
    times: tuple = (1, 2, 4, 8)  # contexts in the test, as multiples of that
    predictions: int = 4096  # scored of the test, the same ones in every context

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", self.text and Path(self.text))
        object.__setattr__(self, "times", tuple(self.times))
        if self.context < 2 or self.predictions < BLOCK or min(self.times) < 1:
            raise ValueError(
                f"context must be >= 2, predictions >= {BLOCK}, times >= 1, got {self.context}, "
                f"{self.predictions}, {self.times}"
            )

    def sets(self) -> tuple[str, ...]:
        return tuple(f"{times}x" for times in self.times)

    def inputs(self) -> list[Path]:
        return [self.text] if self.text else sorted(Path(grammar.__file__).parent.glob("*.py"))

    def make(self, folder: Path) -> None:
        """Write characters as words, and binarise them."""
        if self.text:
            lines = list(read_lines(self.text))
        else:
            lines = [english for english, _ in grammar.build()["train"]]
            random.Random(1).shuffle(lines)
        held = max(1, len(lines) // 20)
        raw, parts = folder / "raw", (lines[: -2 * held], lines[-2 * held : -held], lines[-held:])
        for name, part in zip(("train", "valid", "test"), parts, strict=True):
            write_lines(raw / name, [" ".join(line.replace(" ", SPACE)) for line in part])
        binarise(folder, {split: raw / split for split in ("train", "valid", "test")})

    def flags(self, scheme: dict, seed: int) -> dict:
        """Return fairseq-train's flags; tables of positions reach as far as the test."""
        most = self.context * max(self.times)
        lengths = {"tokens-per-sample": self.context, "max-target-positions": most}
        return lengths | super().flags(scheme, seed)

    def score(self, name: str, run: Run) -> Scored:
        """Score the last predictions of the test with windows of a length."""
        place = run.folder / f"{name}.json"
        context = self.context * int(name.removesuffix("x"))
        run.apart(name, lambda: write_json(place, pack(self.nats(run, context))))
        nats = unpack(read_json(place))
        starts = np.arange(0, len(nats), BLOCK)
        counts = np.diff([*starts, len(nats)])
        rows = np.stack([np.add.reduceat(nats, starts), counts], 1)
        return Scored(np.full(len(starts), context), {"perplexity": rows})

    def nats(self, run: Run, context: int) -> np.ndarray:
        """Return the negative log-likelihood of every prediction."""
        from relpos_fairseq.evaluation import language_model

        subject = language_model.load_subject(run.model, run.data / "bin", "test")
        targets = language_model.last_targets(subject, min(self.predictions, len(subject.tokens) - 1))
        stride = max(1, self.context // 2)
        return language_model.score_with_windows(subject, targets, context, stride, 4).each
