"""GLUE's tasks and XNLI: fine-tuning a pre-trained model by a published protocol."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import numpy as np

from relpos_fairseq.comparison import scores
from relpos_fairseq.comparison.glue.pretrained import Pretrained, read_pretrained
from relpos_fairseq.comparison.glue.protocols import BATCH_SIZE, PROTOCOLS, WARMUP, updates_of
from relpos_fairseq.comparison.tasks.base import Run, Scored, Task, kind
from relpos_fairseq.comparison.tasks.labels import logits_of
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import read_json
from relpos_fairseq.preparation.glue.tasks import TASKS

REPORT = {"mcc": "report-mcc", "f1": "report-acc-and-f1", "spearman": "report-pearson-and-spearman"}
NAMES = {"accuracy": "accuracy", "f1": "F1", "mcc": "Matthews", "pearson": "Pearson"}
NAMES["spearman"] = "Spearman"
MODEL = "finetune-from-model"


@kind("glue")
@dataclass(frozen=True, kw_only=True)
class Glue(Task):
    """A task of GLUE, or XNLI; schemes name their pre-trained model by `finetune-from-model`."""

    unit: ClassVar[str] = "tokens"
    # What TRAIN says otherwise; False leaves a flag out.
    default: ClassVar[dict] = {
        "task": "sentence_prediction",
        "criterion": "sentence_prediction_glue",
        "max-tokens": False,
        "batch-size": BATCH_SIZE,
        "required-batch-size-multiple": 1,
        "adam-betas": "(0.9, 0.999)",
        "adam-eps": "1e-6",
        "weight-decay": 0.01,
        "save-interval-updates": False,
        "keep-interval-updates": False,
        "maximize-best-checkpoint-metric": True,
        "log-interval": 50,
    }

    data: Path  # folder that `relpos prepare glue` wrote
    name: str  # of the task, as GLUE writes it
    protocol: str = "huang"  # a paper's way to fine-tune, `glue/protocols.py`
    lr: float | None = None  # the learning rate; None: the protocol's first
    epochs: int | None = None  # how many; None: the protocol's first
    max_update: int = 0  # updates that end a run; 0: none

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", Path(self.data))
        for value, known in ((self.name, TASKS), (self.protocol, PROTOCOLS)):
            if value not in known:
                raise ValueError(f"there is no {value}; known: {', '.join(known)}")

    @cached_property
    def known(self) -> dict:
        """What the preparation wrote of the task; one that is not prepared is an error."""
        folder = self.data / self.name
        if (found := read_json(folder / "task.json")) is None:
            raise PreparationError(f"{folder} was not made by relpos prepare glue: run it for {self.name}")
        return found

    @property
    def checkpoint(self) -> str:
        """Which of a run's checkpoints counts."""
        return PROTOCOLS[self.protocol].checkpoint

    @property
    def logged(self) -> tuple[str, ...]:
        """The metrics of every validation set."""
        metrics = ("loss", *TASKS[self.name].metrics)
        return tuple(f"{split}_{one}" for split in self.sets() for one in metrics)

    def sets(self) -> tuple[str, ...]:
        """Return fairseq's names of the validation sets; tests of GLUE have no labels."""
        return tuple(TASKS[self.name].valid_splits)

    def inputs(self) -> list[Path]:
        return [self.data / self.name]

    def options(self) -> dict:
        """Return what the data depend on: the folder alone."""
        return {"kind": self.kind, "name": self.name}

    def make(self, folder: Path) -> None:
        os.symlink((self.data / self.name).absolute(), folder / "bin", target_is_directory=True)

    def flags(self, scheme: dict, seed: int) -> dict:
        """Return fairseq-train's flags: the protocol's, and those of the checkpoint's model."""
        task, protocol, known = TASKS[self.name], PROTOCOLS[self.protocol], self.known
        if MODEL not in scheme:
            raise PreparationError(f"kind glue: a scheme needs {MODEL}, a checkpoint")
        model = read_once(Path(scheme[MODEL]))
        longest = max(known["max_length"], model.positions)
        if longest > model.positions and not model.any_length:
            raise PreparationError(
                f"{self.name} has examples of {known['max_length']} tokens, {model.name} "
                f"takes {model.positions}: relpos prepare glue --max-length {model.positions}"
            )
        epochs = self.epochs or protocol.epochs[0]
        updates = updates_of(known["train"], epochs)
        updates = min(updates, self.max_update or updates)
        metric = task.metrics[0]
        own = {
            "max-positions": longest,
            "num-classes": task.classes,
            "init-token": known["init_token"],
            "separator-token": known["separator_token"],
            "regression-target": task.regression,
            "best-checkpoint-metric": metric,
            "valid-subset": ",".join(task.valid_splits),
            "lr": f"{self.lr or protocol.learning_rates[0]:g}",
            "warmup-updates": round(WARMUP * updates),
            "max-update": updates,
            "max-epoch": epochs,
        }
        if metric in REPORT:
            own[REPORT[metric]] = True
        if protocol.interval:
            own |= {"validate-interval-updates": protocol.interval, "keep-interval-updates": 1}
            own |= {"save-interval-updates": protocol.interval}
        return super().flags(model.flags | own | self.train | scheme, seed)

    def score(self, name: str, run: Run) -> Scored:
        task = TASKS[self.name]
        logits, targets, lengths = logits_of(run, name, name)
        found = logits[:, 0] if task.regression else logits.argmax(1)
        rows = {metric: statistics_of(metric, found, targets) for metric in task.metrics}
        return Scored(lengths, {NAMES[metric]: one for metric, one in rows.items()})


def statistics_of(metric: str, found: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Return the statistics of every example; of classes F1's positive one is the last."""
    if metric == "accuracy":
        return scores.matches(found == true)
    if metric == "f1":
        return np.stack([found & true, found, true], 1)
    if metric == "mcc":
        return np.stack([found, true, found & true, np.ones_like(true)], 1)
    if metric == "spearman":
        from scipy.stats import rankdata

        found, true = rankdata(found), rankdata(true)
    found, true = found - found.mean(), true - true.mean()
    parts = (found, true, found * found, true * true, found * true, np.ones(len(true)))
    return np.stack(parts, 1).astype(float)


MODELS: dict[Path, Pretrained] = {}


def read_once(path: Path) -> Pretrained:
    """Read a checkpoint's flags, once a process."""
    if path not in MODELS:
        MODELS[path] = read_pretrained(path.stem, path)
    return MODELS[path]
