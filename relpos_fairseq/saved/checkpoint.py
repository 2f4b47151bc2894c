"""Make what fairseq saves of a model of ours, and write it with its text."""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from fairseq.dataclass import FairseqDataclass
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models import MODEL_DATACLASS_REGISTRY
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY
from omegaconf import OmegaConf, open_dict
from torch import Tensor

from relpos_fairseq.heads import HEAD, RANKING, SPANS, heads_in
from relpos_fairseq.io.tensor_files import save

CHECKPOINT = "model.pt"
ROBERTA = "relpos_roberta"


@dataclass(frozen=True)
class OwnModel:
    """A model of ours."""

    name: str  # as it is registered
    task: str  # that trains it
    criterion: str
    exported: str  # model_type of its folders of `relpos export transformers`


OURS = {
    one.name: one
    for one in (
        OwnModel(ROBERTA, "masked_lm", "masked_lm", "relpos_roberta"),
        OwnModel("relpos_transformer", "translation", "label_smoothed_cross_entropy", "relpos_translation"),
        OwnModel("relpos_transformer_lm", "language_modeling", "cross_entropy", "relpos_language_model"),
        OwnModel(
            *("relpos_transformer_xl", "segment_language_modeling", "cross_entropy", "relpos_memory_language_model")
        ),
    )
}
# What the criterion of a task that trains a head says too.
OF_CRITERION: dict[str, dict[str, Any]] = {
    "masked_lm": {"tpu": False},
    "sentence_prediction": dict.fromkeys(("classification_head_name", "regression_target")),
    RANKING: dict.fromkeys(("ranking_head_name", "num_classes", "save_predictions")),
}


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
    name: str,
    values: Mapping[str, Any],
    state: Mapping[str, Tensor],
    task: Mapping[str, Any] = {},
    criterion: Mapping[str, Any] = {},
) -> dict[str, Any]:
    """Return what fairseq saves of a model of ours after no update, with defaults for options that are not known.

    The task of a RoBERTa is sentence_prediction or sentence_ranking where it trained one of the heads,
    question_answering where the model has a span head, and else masked_lm.

    Args:
        name: the model's, as it is registered: a key of OURS.
        values: values of its config.
        state: its tensors by name.
        task: options of the task that it was trained on, `_name` among them, as far as they are known.
        criterion: options of its criterion, as far as they are known.
    """
    ours = OURS[name]
    trains, loss = ours.task, ours.criterion
    if name == ROBERTA:
        trains, task = _task_of_heads(state, task, int(values["max_positions"]))
    own = SentenceRankingConfig if trains == RANKING else TASK_DATACLASS_REGISTRY[trains]
    said = OmegaConf.structured(own())
    with open_dict(said):
        said.update(_known(own, task) | {"_name": task.get("_name", trains), "data": "."})
    if name == ROBERTA:
        loss, criterion = trains, {one: said.get(one, value) for one, value in OF_CRITERION.get(trains, {}).items()}
    model = MODEL_DATACLASS_REGISTRY[name]
    cfg = OmegaConf.structured(FairseqConfig())
    with open_dict(cfg):
        OmegaConf.set_struct(cfg, False)
        cfg.model = OmegaConf.merge(model(), _known(model, values) | {"_name": name})
        cfg.task, cfg.criterion = said, {"_name": loss, **criterion}
    trained_by = "MaskedLmLoss" if name == ROBERTA else "CrossEntropyCriterion"  # classes of fairseq's
    begun = {"criterion_name": trained_by, "optimizer_name": "none", "lr_scheduler_state": {}, "num_updates": 0}
    return {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": dict(state),
        "criterion": {},
        "optimizer_history": [begun],
        "task_state": {},
        "extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}},
        "last_optimizer_state": None,
    }


def _known(config: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options that a config has, without those that are not set or refer to other options."""
    names = {part.name for part in fields(config)} & given.keys()
    values = {name: getattr(given[name], "value", given[name]) for name in names}
    return {name: value for name, value in values.items() if value is not None and not str(value).startswith("${")}


def _task_of_heads(state: Mapping[str, Tensor], given: Mapping[str, Any], length: int) -> tuple[str, dict[str, Any]]:
    """Return the task that trains a RoBERTa's heads, and its options: the given ones, and what heads and length say."""
    heads = heads_in(state, given)
    for trained in filter(lambda one: one.trained, heads):
        if given["_name"] == RANKING:
            return RANKING, {**given, "_name": RANKING, "ranking_head_name": trained.name, "max_positions": length}
        made = {"regression_target": False, **given, "num_classes": trained.outputs, "max_positions": length}
        return "sentence_prediction", made | {"_name": "sentence_prediction"}
    if spans := [one.name for one in heads if one.head is SPANS]:
        name = "question_answering"
        own = _known(TASK_DATACLASS_REGISTRY[name], given) if given.get("_name") == name else {}
        made = {"span_head_name": spans[0], "tokens_per_sample": length, **own, "_name": name}
        return name, made | {"tokens_per_sample": min(made["tokens_per_sample"], length)}
    return "masked_lm", {"_name": "masked_lm", "tokens_per_sample": length}


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
        about: where the model comes from; written to conversion.json without `rows`, and of `kept` the names.
        files: files of text to copy, by their names in the folder.
        texts: contents of further files, by their names in the folder.
    """
    checkpoint = checkpoint | {"conversion": about}
    if not place.is_dir():
        save(checkpoint, place)
        return
    save(checkpoint, place / CHECKPOINT)
    known = {key: sorted(value) if key == "kept" else value for key, value in about.items() if key != "rows"}
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
