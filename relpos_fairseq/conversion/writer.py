"""Write models as fairseq checkpoints, with their text."""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.configs import FairseqConfig
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from fairseq.tasks.masked_lm import MaskedLMConfig
from fairseq.tasks.sentence_prediction import SentencePredictionConfig
from omegaconf import OmegaConf, open_dict

from relpos_fairseq.conversion.layouts import State
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.heads import HEAD, RANKING, classifier_of
from relpos_fairseq.models.building import GENERATING_KINDS
from relpos_fairseq.models.configs import RelPosRobertaConfig
from relpos_fairseq.plan import decode_text
from relpos_fairseq.tasks.question_answering_config import QuestionAnsweringConfig

CHECKPOINT = "model.pt"
IDENTITY = ".positions.scheme_version"


@dataclass
class SentenceRankingConfig(FairseqDataclass):
    """Options of fairseq's task sentence_ranking, which has no config of its own, by their names there."""

    data: str = "."
    task: str = RANKING
    criterion: str = RANKING
    num_classes: int | None = None  # of sentences to be ranked
    init_token: int | None = None
    separator_token: int | None = None
    no_shuffle: bool = False
    shorten_method: str = "none"
    shorten_data_split_list: str = ""
    max_option_length: int | None = None
    max_positions: int = 512
    ranking_head_name: str = HEAD
    dataset_impl: str | None = None
    seed: int = 1


def checkpoint_of(
    values: dict[str, Any], state: State, about: dict[str, Any], task: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Make a fairseq checkpoint of a RoBERTa, with defaults for options that are not known.

    Its task is sentence_prediction or sentence_ranking where it trained one of the heads,
    question_answering where the model has a span head, and else masked_lm.

    Args:
        values: values of RelPosRobertaConfig.
        state: tensors by name.
        about: where the model comes from; kept under `conversion`.
        task: options of the task that it was trained on, as far as they are known.
    """
    task = _task_config(state, task or {}, int(values["max_positions"]))
    criterion = {"_name": task._name}
    if task._name == "masked_lm":
        criterion["tpu"] = False
    if task._name == "sentence_prediction":
        for name in ("classification_head_name", "regression_target"):
            criterion[name] = task[name]
    if task._name == RANKING:
        criterion |= {name: task[name] for name in ("ranking_head_name", "num_classes")} | {"save_predictions": None}
    names = {part.name for part in fields(RelPosRobertaConfig)}
    known = {name: values[name] for name in names & set(values) if values[name] is not None}
    model = OmegaConf.merge(RelPosRobertaConfig(), known | {"_name": "relpos_roberta"})
    return fairseq_checkpoint(model, task, criterion, state, about, "MaskedLmLoss")


def fairseq_checkpoint(
    model: Any, task: Any, criterion: dict[str, Any], state: State, about: dict[str, Any], loss: str
) -> dict[str, Any]:
    """Return what fairseq saves of a model of these configs after no update; `loss` is the name of a class."""
    cfg = OmegaConf.structured(FairseqConfig())
    with open_dict(cfg):
        OmegaConf.set_struct(cfg, False)
        cfg.model, cfg.task, cfg.criterion = model, task, criterion
    return {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": state,
        "criterion": {},
        "optimizer_history": [
            {"criterion_name": loss, "optimizer_name": "none", "lr_scheduler_state": {}, "num_updates": 0}
        ],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
        "last_optimizer_state": None,
        "conversion": about,
    }


def write_checkpoint(
    place: Path,
    checkpoint: dict[str, Any],
    about: dict[str, Any],
    files: Mapping[str, Path] = {},
    texts: Mapping[str, str] = {},
) -> None:
    """Write a checkpoint as a file, or into a folder with its text and `conversion.json`.

    Args:
        place: a folder, or the file.
        checkpoint: the checkpoint.
        about: where the model comes from; written to conversion.json without `rows`.
        files: files of text to copy, by their names in the folder.
        texts: contents of further files, by their names in the folder.
    """
    if not place.is_dir():
        torch.save(checkpoint, place)
        return
    torch.save(checkpoint, place / CHECKPOINT)
    known = {key: value for key, value in about.items() if key not in ("rows", "kept")}
    known |= {"kept": sorted(about["kept"])} if "kept" in about else {}
    text = json.dumps(known, indent=2, ensure_ascii=False) + "\n"
    write_texts(place, files, {**texts, "conversion.json": text})


def write_texts(folder: Path, files: Mapping[str, Path], texts: Mapping[str, str]) -> None:
    """Copy files into a folder, and write texts, each by its name there."""
    for name in (*files, *texts):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    for name, path in files.items():
        shutil.copyfile(path, folder / name)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")


def _task_config(state: State, given: dict[str, Any], length: int) -> Any:
    """Return the task's config: the given options, and those that heads and length determine."""
    span_heads = _heads(state, "span_heads")
    if (trained := classifier_of(given)) in _heads(state, "classification_heads") and given["_name"] == RANKING:
        name, config = RANKING, SentenceRankingConfig
        made = _own_options(config, given) | {"ranking_head_name": trained, "max_positions": length}
    elif trained in _heads(state, "classification_heads"):
        name, config = "sentence_prediction", SentencePredictionConfig
        out = state[f"classification_heads.{trained}.out_proj.weight"]
        made = {"regression_target": False} | _own_options(config, given)
        made |= {"num_classes": len(out), "max_positions": length}
    elif span_heads:
        name, config = "question_answering", QuestionAnsweringConfig
        made = {"span_head_name": span_heads[0], "tokens_per_sample": length}
        if given.get("_name") == name:
            made |= _own_options(config, given)
            made["tokens_per_sample"] = min(made["tokens_per_sample"], length)
    else:
        name, config, made = "masked_lm", MaskedLMConfig, {"tokens_per_sample": length}
    task = OmegaConf.structured(config())
    with open_dict(task):
        task.update(made | {"_name": name, "data": "."})
    return task


def _heads(state: State, kind: str) -> list[str]:
    return sorted({key.split(".")[1] for key in state if key.startswith(f"{kind}.")})


def _own_options(config: type, given: dict[str, Any]) -> dict[str, Any]:
    """Return the given options that a task's config has, without references to other options."""
    names = {part.name for part in fields(config)} & set(given)
    values = {name: getattr(given[name], "value", given[name]) for name in names}
    return {name: value for name, value in values.items() if not str(value).startswith("${")}


@dataclass
class GeneratingModel:
    """The config and tensors of a translation or language model, from which a checkpoint is made.

    Args:
        kind: one of GENERATING_KINDS, which is also the name of its task.
        values: values of the model's config; those that are not named have the config's defaults.
        rows: number of rows of the embeddings of input and output.
        state: tensors by name.
        task: options of its task, `_name` among them.
        files: files of text to copy, by their names in the result.
        criterion: options of its criterion; those that are not named are those of GENERATING_KINDS.
    """

    kind: str
    values: dict[str, Any]
    rows: tuple[int, int]
    state: State
    task: dict[str, Any] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    criterion: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> str:
        """Return the position schemes of encoder and decoder in words, as the tensors record them."""
        plans = {name: value for name, value in self.state.items() if name.endswith(IDENTITY)}
        return "; ".join(f"{name.split('.')[0]}: {decode_text(value)}" for name, value in sorted(plans.items()))

    def checkpoint(self, about: dict[str, Any]) -> dict[str, Any]:
        """Return a fairseq checkpoint, with `about` under the key `conversion`."""
        _, name, config, task, criterion = GENERATING_KINDS[self.kind]
        known = {part.name for part in fields(task)}
        told = {key: value for key, value in self.task.items() if key in known}
        told |= {"_name": self.task.get("_name", self.kind), "data": "."}
        model = OmegaConf.merge(config(), self.values | {"_name": name})
        told = OmegaConf.merge(task(), told)
        loss = {"_name": criterion} | self.criterion
        return fairseq_checkpoint(model, told, loss, self.state, about, "CrossEntropyCriterion")


def plain_task(task: Any) -> dict[str, Any]:
    """Return a task's options that are no paths and no references to other options.

    A task of before hydra has every option of the command line among them, and keeps its own alone.
    """
    task = vars(task) if isinstance(task, Namespace) else task
    name, of_task = task.get("_name"), ArgumentParser(add_help=False)
    if is_legacy := name in TASK_REGISTRY and name not in TASK_DATACLASS_REGISTRY:
        TASK_REGISTRY[name].add_args(of_task)
    own = {*(part.name for part in fields(SentenceRankingConfig)), *(action.dest for action in of_task._actions)}
    return {
        name: value
        for name, value in task.items()
        if name not in ("data", "tokenizer_folder")
        and (not is_legacy or name in own)
        and isinstance(value, str | int | float | bool | None)
        and not str(value).startswith("${")
    }


def check_rows(files: dict[str, Path], rows: tuple[int, int]) -> None:
    """Check that every dict.*.txt among `files` has as many symbols as the model has rows.

    Raises:
        ConversionError: one belongs to another model.
    """
    for name, path in files.items():
        if Path(name).name.startswith("dict."):
            lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
            if len(lines) + 4 not in rows:
                raise ConversionError(f"{path} makes {len(lines) + 4} rows, the model has {rows}")
