"""English questions: fine-tuning a pre-trained model on them."""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from relpos_fairseq.comparison.glue.protocols import WARMUP, updates_of
from relpos_fairseq.comparison.tasks.base import Task
from relpos_fairseq.comparison.tasks.glue import MODEL, Glue, read_once
from relpos_fairseq.engine.errors import PreparationError

LONGEST = 512  # tokens of a sample (004, Table 7)
CUT = (
    "tokens-per-sample",
    "doc-stride",
    "max-query-length",
    "on-long-question",
    "on-bad-answer",
    "separators",
    "tokenizer-folder",
)


@dataclass(frozen=True, kw_only=True)
class Questions(Task):
    """A folder of `relpos prepare qa`; what is scored is its `valid`, after every epoch.

    It has no test sets: other languages are evaluated when all runs have ended.
    """

    kind: ClassVar[str] = "questions"
    name: ClassVar[str] = "SQuAD"
    logged: ClassVar[tuple[str, ...]] = ("valid_loss", "valid_f1", "valid_em")
    default: ClassVar[dict] = Glue.default | {
        "task": "question_answering",
        "criterion": "question_answering",
        "on-long-question": "truncate",
        "best-checkpoint-metric": "f1",
    }

    data: Path
    lr: float  # learning rate
    epochs: int  # how many
    max_update: int = 0  # updates that end a run; 0: none

    def inputs(self) -> list[Path]:
        return [split_of(self.data, name) for name in ("train", "valid")]

    def make(self, folder: Path) -> None:
        os.symlink(self.data.absolute(), folder / "bin", target_is_directory=True)

    def flags(self, scheme: dict, seed: int) -> dict:
        """Return fairseq-train's flags: 004's, and those of the checkpoint's model."""
        model = read_once(Path(scheme[MODEL]))
        tokens = int(self.train.get("tokens-per-sample") or min(model.positions, LONGEST))
        stride = int(self.train.get("doc-stride") or 128)
        asked = self.default | self.train | {"tokens-per-sample": tokens, "doc-stride": stride}
        cut = tuple((name, asked[name]) for name in CUT if asked.get(name))
        updates = updates_of(windows(self.data, cut), self.epochs)
        updates = min(updates, self.max_update or updates)
        own = {
            "tokens-per-sample": tokens,
            "doc-stride": stride,
            "lr": f"{self.lr:g}",
            "warmup-updates": round(WARMUP * updates),
            "max-update": updates,
            "max-epoch": self.epochs,
        }
        return super().flags(model.flags | own | self.train | scheme, seed)


def split_of(data: Path, name: str) -> Path:
    """Return a split's file."""
    paths = [data / f"{name}{suffix}" for suffix in (".json", ".json.gz")]
    if found := [path for path in paths if path.is_file()]:
        return found[0]
    raise PreparationError(f"{data} has no {paths[0].name}: make it with relpos prepare qa")


@functools.cache
def windows(data: Path, cut: tuple[tuple[str, object], ...]) -> int:
    """Count the windows of the training questions, as the task cuts them by flags (name, value)."""
    from relpos_fairseq.tasks.question_answering import QuestionAnsweringTask
    from relpos_fairseq.tasks.question_answering_config import QuestionAnsweringConfig

    print(f"counting the windows of {data}", flush=True)
    logging.getLogger("relpos_fairseq").setLevel(logging.WARNING)
    config = QuestionAnsweringConfig(data=str(data))
    for flag, value in cut:
        name = flag.replace("-", "_")
        setattr(config, name, type(getattr(config, name))(value))
    task = QuestionAnsweringTask.setup_task(config)
    return len(task.read_dataset(split_of(data, "train"), training=True))
