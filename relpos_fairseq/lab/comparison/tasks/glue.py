"""Define fine-tuning tasks, by a published protocol from a pre-trained model: GLUE's, XNLI, English questions."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypedDict

import numpy as np

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.reading import Count, Positive, read_json
from relpos_fairseq.lab.comparison import scores
from relpos_fairseq.lab.comparison.protocols import BATCH_SIZE, METRIC_NAMES, PROTOCOLS, WARMUP, updates_of
from relpos_fairseq.lab.comparison.tasks.base import Scored, Task, Workspace, kind
from relpos_fairseq.lab.comparison.tasks.classification import logits_of
from relpos_fairseq.preparation.glue_tasks import TASKS
from relpos_fairseq.text.assets import tokenizer_files

ARCH = "relpos_roberta"
MODEL_FLAG = "finetune-from-model"
REPORT = {"mcc": "report-mcc", "f1": "report-acc-and-f1", "spearman": "report-pearson-and-spearman"}
# Fields of a model's configuration that the fine-tuning sets itself, or that only serve pre-training.
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
    """A pre-trained checkpoint, with the flags of fairseq-train that build its model."""

    name: str  # in tables
    path: Path
    positions: int  # the longest input that the model was built for
    flags: dict[str, object]
    any_length: bool = False  # whether the model takes longer inputs: relative schemes do


PRETRAINED: dict[Path, Pretrained] = {}  # those that this process has read


def read_once(path: Path) -> Pretrained:
    """Read a pre-trained checkpoint's flags, once a process."""
    if path not in PRETRAINED:
        PRETRAINED[path] = read_pretrained(path.stem, path)
    return PRETRAINED[path]


def read_pretrained(name: str, path: Path) -> Pretrained:
    """Read the configuration of a checkpoint of relpos_roberta, or of fairseq's roberta."""
    import relpos_fairseq  # noqa: F401  (lets torch load fairseq's checkpoints safely)
    from relpos_fairseq.models.configs import RelPosRobertaConfig
    from relpos_fairseq.saved.model import SavedModel

    if not path.is_file():
        raise UserError(f"{name}: there is no checkpoint {path}")
    saved = SavedModel.read(path, mapped=True).options
    model, task = saved.model, saved.task
    if "encoder_embed_dim" not in model or "decoder_embed_dim" in model:
        raise UserError(f"{name}: {path} is no RoBERTa, but {model.get('_name')!r}")
    flags: dict[str, object] = {"arch": ARCH}
    for part in fields(RelPosRobertaConfig):
        value, default = _plain(model.get(part.name, part.default)), _plain(part.default)
        if part.name not in LEFT_OUT_FIELDS and default is not MISSING and value not in (default, None, False):
            flags[part.name.replace("_", "-")] = value
    positions = model.get("max_positions") or task.get("tokens_per_sample")
    positions = int(positions or task.get("max_positions") or 512)
    return Pretrained(name, path, positions, flags, takes_any_length(model, positions))


def takes_any_length(model: Mapping[str, Any], positions: int) -> bool:
    """Return whether a model takes inputs of any length: none of its schemes has a row for each position."""
    from relpos_fairseq.saved.identity import DEFAULTS, plan_of
    from relpos_fairseq.schemes import DEFAULT

    own = {name: _plain(value) for name, value in model.items() if value is not None}
    values = {"position_scheme": DEFAULT["masked_lm"]} | DEFAULTS | own
    return plan_of(values | {"max_positions": positions}).longest is None


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


@dataclass(frozen=True, kw_only=True)
class FineTuning(Task):
    """A pre-trained model's training on prepared data; schemes name the model by `finetune-from-model`."""

    # Flags where TRAIN has others; False leaves a flag out.
    default: ClassVar[dict] = {
        "max-tokens": False,
        "batch-size": BATCH_SIZE,
        "required-batch-size-multiple": 1,
        "adam-betas": "(0.9, 0.999)",
        "adam-eps": "1e-6",
        "weight-decay": 0.01,
        "save-interval-updates": False,
        "keep-interval-updates": False,
        "maximize-best-checkpoint-metric": True,
        "log-interval": 10,
    }

    metric: ClassVar[str]  # by which checkpoints, learning rates and numbers of epochs are chosen
    protocol: ClassVar[str]  # one of PROTOCOLS

    data: Path  # folder that `relpos prepare` wrote
    lr: float | None = None  # the learning rate; None: the protocol's first
    epochs: Positive | None = None  # None: the protocol's first
    max_update: Count = 0  # updates that end a run; 0: none

    def __post_init__(self) -> None:
        if self.lr is not None and not self.lr > 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")

    def folder(self) -> Path:
        """Return the folder that fairseq-train reads."""
        return self.data

    def dictionary(self) -> Path:
        """Return the file of the symbols that the data have."""
        return self.folder() / "dict.txt"

    def make(self, folder: Path) -> None:
        os.symlink(self.folder().absolute(), folder / "bin", target_is_directory=True)

    def model(self, scheme: dict) -> Pretrained:
        """Return the pre-trained model of a scheme."""
        if MODEL_FLAG not in scheme:
            raise UserError(f"kind {self.kind}: a scheme needs {MODEL_FLAG}, a checkpoint")
        return read_once(Path(str(scheme[MODEL_FLAG])))

    def schedule(self, examples: int) -> dict:
        """Return the flags of the learning rate, warm-up and length, for so many training examples."""
        protocol = PROTOCOLS[self.protocol]
        epochs = self.epochs or protocol.epochs[0]
        updates = updates_of(examples, epochs)
        updates = min(updates, self.max_update or updates)
        return {
            "lr": f"{self.lr or protocol.learning_rates[0]:g}",
            "warmup-updates": round(WARMUP * updates),
            "max-update": updates,
            "max-epoch": epochs,
        }


class _Prepared(TypedDict):
    """What is read of a prepared task's task.json."""

    max_length: int
    init_token: int
    separator_token: int
    train: int


@kind("glue")
@dataclass(frozen=True, kw_only=True)
class Glue(FineTuning):
    """A task of GLUE, or XNLI."""

    default: ClassVar[dict] = FineTuning.default | {
        "task": "sentence_prediction",
        "criterion": "sentence_prediction_glue",
    }

    name: str  # the task's name in GLUE
    protocol: str = "huang"  # one of PROTOCOLS

    def __post_init__(self) -> None:
        super().__post_init__()
        for value, known in ((self.name, TASKS), (self.protocol, PROTOCOLS)):
            if value not in known:
                raise ValueError(f"there is no {value}; known: {', '.join(known)}")

    @cached_property
    def known(self) -> _Prepared:
        """The content of task.json, which `relpos prepare glue` wrote; without it the task is not prepared."""
        if (found := read_json(self.folder() / "task.json", _Prepared, None)) is None:
            raise UserError(f"{self.folder()} was not made by relpos prepare glue: run it for {self.name}")
        return found

    @property
    def metric(self) -> str:
        """The first of the task's metrics."""
        return TASKS[self.name].metrics[0]

    @property
    def checkpoint(self) -> str:
        """The checkpoint that counts, `last` or `best`."""
        return PROTOCOLS[self.protocol].checkpoint

    @property
    def logged(self) -> tuple[str, ...]:
        """The loss and metrics of every validation set."""
        metrics = ("loss", *TASKS[self.name].metrics)
        return tuple(f"{split}_{one}" for split in self.sets() for one in metrics)

    def sets(self) -> tuple[str, ...]:
        """Return fairseq's names of the validation sets; GLUE's test sets have no labels."""
        return tuple(TASKS[self.name].valid_splits)

    def folder(self) -> Path:
        return self.data / self.name

    def dictionary(self) -> Path:
        return self.folder() / "input0" / "dict.txt"

    def inputs(self) -> list[Path]:
        """Return the task's file and the folders of its data that fairseq reads; each may be a link."""
        parts = [self.folder() / name for name in ("input0", "input1", "label")]
        return [self.folder() / "task.json", *filter(Path.exists, parts)]

    def options(self) -> dict:
        """Return the name: the data depend on the folder alone."""
        return {"kind": self.kind, "name": self.name}

    def flags(self, scheme: dict, seed: int) -> dict:
        """Return fairseq-train's flags: those of the protocol and of the pre-trained model."""
        task, protocol, known, model = TASKS[self.name], PROTOCOLS[self.protocol], self.known, self.model(scheme)
        longest = max(known["max_length"], model.positions)
        if longest > model.positions and not model.any_length:
            raise UserError(
                f"{self.name} has examples of {known['max_length']} tokens, {model.name} "
                f"takes {model.positions}: relpos prepare glue --max-length {model.positions}"
            )
        own = {
            "max-positions": longest,
            "num-classes": task.classes,
            "init-token": known["init_token"],
            "separator-token": known["separator_token"],
            "regression-target": task.regression,
            "best-checkpoint-metric": self.metric,
            "valid-subset": ",".join(task.valid_splits),
            **self.schedule(known["train"]),
        }
        if self.metric in REPORT:
            own[REPORT[self.metric]] = True
        if protocol.interval:
            own |= {f"{name}-interval-updates": protocol.interval for name in ("validate", "save")}
            own["keep-interval-updates"] = 1
        return super().flags(model.flags | own | self.train | scheme, seed)

    def score(self, name: str, workspace: Workspace) -> Scored:
        task = TASKS[self.name]
        logits, targets, lengths = logits_of(workspace, name, name)
        found = logits[:, 0] if task.regression else logits.argmax(1)
        rows = {metric: statistics_of(metric, found, targets) for metric in task.metrics}
        return Scored(lengths, {METRIC_NAMES[metric]: one for metric, one in rows.items()})


def statistics_of(metric: str, found: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Return the statistics (N, K) of predicted and true values (N,); the positive class of F1 is 1."""
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


LONGEST = 512  # tokens of a sample (Chen2021, Table 7)
# Flags that determine how questions are cut into windows.
CUT = (
    *("tokens-per-sample", "doc-stride", "max-query-length"),
    *("on-long-question", "on-bad-answer", "separators", "tokenizer-folder"),
)


@kind("questions")
@dataclass(frozen=True, kw_only=True)
class Questions(FineTuning):
    """A folder of `relpos prepare qa`, whose `valid` questions are answered when the training has ended."""

    metric: ClassVar[str] = "f1"
    protocol: ClassVar[str] = "xtreme"
    test_sets: ClassVar[tuple[str, ...]] = ("valid",)
    logged: ClassVar[tuple[str, ...]] = ("valid_loss", "valid_f1", "valid_em")
    default: ClassVar[dict] = FineTuning.default | {
        "task": "question_answering",
        "criterion": "question_answering",
        "on-long-question": "truncate",
        "best-checkpoint-metric": metric,
    }

    def inputs(self) -> list[Path]:
        return [*tokenizer_files(self.data), *(split_of(self.data, name) for name in ("train", "valid"))]

    def flags(self, scheme: dict, seed: int) -> dict:
        """Return fairseq-train's flags: those of Chen2021 and of the pre-trained model."""
        model = self.model(scheme)
        own = {
            "tokens-per-sample": int(self.train.get("tokens-per-sample") or min(model.positions, LONGEST)),
            "doc-stride": int(self.train.get("doc-stride") or 128),
        }
        asked = self.default | self.train | own
        cut = tuple((name, asked[name]) for name in CUT if asked.get(name))
        own |= self.schedule(count_windows(self.data, cut))
        return super().flags(model.flags | own | self.train | scheme, seed)

    def score(self, name: str, workspace: Workspace) -> Scored:
        """Answer every question; F1 and exact match are those of SQuAD's script."""

        def answers() -> np.ndarray:
            from relpos_fairseq.evaluation import questions

            model, task = workspace.load()
            dataset = task.read_dataset(split_of(self.data, name))
            return questions.example_scores(model, task, dataset)

        exact, f1, words = workspace.computed(name, answers).T
        whole = np.ones(len(exact))
        rows = {"question F1": np.stack([f1, whole], 1), "exact match": np.stack([exact, whole], 1)}
        return Scored(words.astype(int), rows)


def split_of(data: Path, name: str) -> Path:
    """Return the file of a split, plain or compressed."""
    for path in (data / f"{name}.json", data / f"{name}.json.gz"):
        if path.is_file():
            return path
    raise UserError(f"{data} has no {name}.json: make it with relpos prepare qa")


@functools.cache
def count_windows(data: Path, cut: tuple[tuple[str, object], ...]) -> int:
    """Count the windows of the training questions under the task's flags, given as (name, value)."""
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
