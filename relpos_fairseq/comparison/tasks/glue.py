"""Define fine-tuning tasks: GLUE's, XNLI, and English questions, from a pre-trained model."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from relpos_fairseq.comparison import scores
from relpos_fairseq.comparison.protocols import BATCH_SIZE, PROTOCOLS, WARMUP, updates_of
from relpos_fairseq.comparison.tasks.base import Scored, Task, Workspace, kind
from relpos_fairseq.comparison.tasks.classification import logits_of
from relpos_fairseq.io.errors import UserError, unreadable
from relpos_fairseq.io.files import read_json
from relpos_fairseq.preparation.glue_tasks import TASKS

# ---- A pre-trained checkpoint as the flags of a fine-tuning: the same model, from the command line.


ARCH = "relpos_roberta"
# Said by the fine-tuning itself, or only of use in pre-training.
LEFT_OUT_FIELDS = (
    "_name",
    "max_positions",
    "load_checkpoint_heads",
    "checkpoint_activations",
    "offload_activations",
    "min_params_to_wrap",
)


@dataclass(frozen=True)
class Pretrained:
    """What is fine-tuned."""

    name: str  # what tables call it
    path: Path
    positions: int  # the longest input that it was built for
    flags: dict[str, object]  # the command line's flags that build its model
    any_length: bool = False  # whether its positions reach beyond that: a relative scheme's do


def read_pretrained(name: str, path: Path) -> Pretrained:
    """Read the configuration of a checkpoint of relpos_roberta, or of fairseq's roberta."""
    import torch

    import relpos_fairseq  # noqa: F401  (lets torch load fairseq's checkpoints safely)
    from relpos_fairseq.models.configs import RelPosRobertaConfig

    if not path.is_file():
        raise UserError(f"{name}: there is no checkpoint {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds
        raise UserError(f"{name}: {unreadable(path, error)}") from None
    if not isinstance(state, Mapping) or not (state.get("cfg") or state.get("args")):
        raise UserError(f"{name}: {path} is no fairseq checkpoint: it has no configuration")
    model, task = _sections(state)
    if "encoder_embed_dim" not in model or "decoder_embed_dim" in model:
        raise UserError(f"{name}: {path} is no RoBERTa, but {model.get('_name')!r}")
    flags: dict[str, object] = {"arch": ARCH}
    for part in fields(RelPosRobertaConfig):
        value = _plain(model.get(part.name, part.default))
        if part.name in LEFT_OUT_FIELDS or part.default is MISSING or value == _plain(part.default):
            continue
        if value not in (None, False):
            flags[part.name.replace("_", "-")] = value
    positions = model.get("max_positions") or task.get("tokens_per_sample")
    positions = int(positions or task.get("max_positions") or 512)
    return Pretrained(name, path, positions, flags, takes_any_length(model, positions))


def takes_any_length(model: Mapping[str, Any], positions: int) -> bool:
    """Whether a model's positions have no end: none of its schemes has a row a position."""
    from relpos_fairseq.conversion.source import DEFAULTS, plan_of
    from relpos_fairseq.schemes import DEFAULT

    own = {name: _plain(value) for name, value in model.items() if value is not None}
    values = {"position_scheme": DEFAULT["masked_lm"]} | DEFAULTS | own
    return plan_of(values | {"max_positions": positions}).longest is None


def _sections(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's and the task's configuration, of both styles."""
    if state.get("cfg"):
        parts = (state["cfg"].get("model"), state["cfg"].get("task"))
    else:
        parts = (state["args"], state["args"])
    return tuple(_mapping(part) for part in parts)


def _mapping(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    return dict(config) if isinstance(config, Mapping) else dict(vars(config))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


# ---- GLUE's tasks and XNLI: fine-tuning a pre-trained model by a published protocol.


REPORT = {"mcc": "report-mcc", "f1": "report-acc-and-f1", "spearman": "report-pearson-and-spearman"}
METRIC_NAMES = {"accuracy": "accuracy", "f1": "F1", "mcc": "Matthews", "pearson": "Pearson"}
METRIC_NAMES["spearman"] = "Spearman"
MODEL_FLAG = "finetune-from-model"


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
            raise UserError(f"{folder} was not made by relpos prepare glue: run it for {self.name}")
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
        if MODEL_FLAG not in scheme:
            raise UserError(f"kind glue: a scheme needs {MODEL_FLAG}, a checkpoint")
        model = read_once(Path(scheme[MODEL_FLAG]))
        longest = max(known["max_length"], model.positions)
        if longest > model.positions and not model.any_length:
            raise UserError(
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

    def score(self, name: str, run: Workspace) -> Scored:
        task = TASKS[self.name]
        logits, targets, lengths = logits_of(run, name, name)
        found = logits[:, 0] if task.regression else logits.argmax(1)
        rows = {metric: statistics_of(metric, found, targets) for metric in task.metrics}
        return Scored(lengths, {METRIC_NAMES[metric]: one for metric, one in rows.items()})


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


PRETRAINED: dict[Path, Pretrained] = {}


def read_once(path: Path) -> Pretrained:
    """Read a checkpoint's flags, once a process."""
    if path not in PRETRAINED:
        PRETRAINED[path] = read_pretrained(path.stem, path)
    return PRETRAINED[path]


# ---- English questions: fine-tuning a pre-trained model on them.


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
        model = read_once(Path(scheme[MODEL_FLAG]))
        tokens = int(self.train.get("tokens-per-sample") or min(model.positions, LONGEST))
        stride = int(self.train.get("doc-stride") or 128)
        asked = self.default | self.train | {"tokens-per-sample": tokens, "doc-stride": stride}
        cut = tuple((name, asked[name]) for name in CUT if asked.get(name))
        updates = updates_of(count_windows(self.data, cut), self.epochs)
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
    raise UserError(f"{data} has no {paths[0].name}: make it with relpos prepare qa")


@functools.cache
def count_windows(data: Path, cut: tuple[tuple[str, object], ...]) -> int:
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
