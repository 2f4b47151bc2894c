"""Build models from tensors, and write them as fairseq checkpoints."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.models.roberta import RobertaModel
from fairseq.tasks.language_modeling import LanguageModelingConfig
from fairseq.tasks.masked_lm import MaskedLMConfig
from fairseq.tasks.sentence_prediction import SentencePredictionConfig
from fairseq.tasks.translation import TranslationConfig
from omegaconf import OmegaConf, open_dict
from torch import Tensor, nn

from relpos_fairseq.conversion.layouts import ENCODER, State
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.models.configs import RelPosRobertaConfig, RelPosTransformerLMConfig, RelPosTransformerXLConfig
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel
from relpos_fairseq.models.relpos_transformer import RelPosTransformerConfig, RelPosTransformerModel
from relpos_fairseq.models.relpos_transformer_lm import RelPosTransformerLanguageModel
from relpos_fairseq.models.relpos_transformer_xl import RelPosTransformerXLModel
from relpos_fairseq.placement import decode_text
from relpos_fairseq.tasks.question_answering_config import QuestionAnsweringConfig
from relpos_fairseq.tasks.segment_language_modeling import SegmentLanguageModelingConfig

CHECKPOINT = "model.pt"


def build_roberta(values: dict[str, Any], state: State) -> nn.Module:
    """Build a relpos_roberta of config values and tensors, heads included.

    Raises:
        ConversionError: tensors are missing, unknown, or of another shape.
    """
    task = _roberta_task(state, values)
    model = RelPosRobertaModel.build_model(namespace(values), task)
    return load_tensors(model, state, state[f"{ENCODER}.embed_tokens.weight"].dtype)


def build_fairseq_roberta(values: dict[str, Any], state: State) -> nn.Module:
    """Build fairseq's own RobertaModel of config values and tensors.

    Raises:
        ConversionError: tensors are missing, unknown, or of another shape.
    """
    options = namespace(values)
    options.layernorm_embedding = not values.get("no_layernorm_embedding", False)
    model = RobertaModel.build_model(options, _roberta_task(state, values))
    return load_tensors(model, state, state[f"{ENCODER}.embed_tokens.weight"].dtype)


def namespace(values: dict[str, Any]) -> Namespace:
    """Return config values as a Namespace for fairseq's builders, which then register a checkpoint's heads."""
    known = {name: value for name, value in values.items() if value is not None}
    return Namespace(**known | {"load_checkpoint_heads": True})


class Rows:
    """Stand in for a dictionary: its number of rows, and the rows of padding and the end."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def pad(self) -> int:
        return 1

    def eos(self) -> int:
        return 2


def task_of(rows: int, length: int) -> SimpleNamespace:
    """Return a stand-in for a task: a dictionary of `rows` rows, and samples of at most `length` tokens."""
    return SimpleNamespace(source_dictionary=Rows(rows), max_positions=lambda: length)


def _roberta_task(state: State, values: dict[str, Any]) -> SimpleNamespace:
    return task_of(len(state[f"{ENCODER}.embed_tokens.weight"]), int(values["max_positions"]))


def load_tensors(model: nn.Module, state: State, dtype: torch.dtype) -> nn.Module:
    """Load copies of tensors into a model, cast to `dtype`, and put it into evaluation mode.

    Raises:
        ConversionError: tensors are missing, unknown, or of another shape.
    """
    try:
        model.to(dtype).load_state_dict({key: value.clone() for key, value in state.items()})
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise ConversionError(f"the tensors do not fit: {' '.join(lines[1:3] or lines)}") from None
    return model.eval()


def checkpoint_of(
    values: dict[str, Any], state: State, about: dict[str, Any], task: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Make a fairseq checkpoint of a RoBERTa, with defaults for options that are not known.

    Its task is sentence_prediction where it trained one of the heads, question_answering where the
    model has a span head, and else masked_lm.

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
    names = {part.name for part in fields(RelPosRobertaConfig)}
    known = {name: values[name] for name in names & set(values) if values[name] is not None}
    model = OmegaConf.merge(RelPosRobertaConfig(), known | {"_name": "relpos_roberta"})
    return fairseq_checkpoint(config_of(model, task, criterion), state, about, "MaskedLmLoss")


def config_of(model: Any, task: Any, criterion: dict[str, Any]) -> Any:
    """Return fairseq's config with a model's, a task's and a criterion's own."""
    cfg = OmegaConf.structured(FairseqConfig())
    with open_dict(cfg):
        OmegaConf.set_struct(cfg, False)
        cfg.model, cfg.task, cfg.criterion = model, task, criterion
    return cfg


def fairseq_checkpoint(cfg: Any, state: State, about: dict[str, Any], criterion: str) -> dict[str, Any]:
    """Return what fairseq saves of a model after no update; `criterion` is the name of a class."""
    return {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": state,
        "criterion": {},
        "optimizer_history": [
            {"criterion_name": criterion, "optimizer_name": "none", "lr_scheduler_state": {}, "num_updates": 0}
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
    if _classifier(given) in _heads(state, "classification_heads"):
        name, config = "sentence_prediction", SentencePredictionConfig
        out = state[f"classification_heads.{_classifier(given)}.out_proj.weight"]
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


def _classifier(given: dict[str, Any]) -> str | None:
    """Return the name of the head that a sentence_prediction trained, None if it was another task."""
    trained = given.get("_name") == "sentence_prediction"
    return given.get("classification_head_name") if trained else None


def _heads(state: State, kind: str) -> list[str]:
    return sorted({key.split(".")[1] for key in state if key.startswith(f"{kind}.")})


def _own_options(config: type, given: dict[str, Any]) -> dict[str, Any]:
    """Return the given options that a task's config has, without references to other options."""
    names = {part.name for part in fields(config)} & set(given)
    values = {name: getattr(given[name], "value", given[name]) for name in names}
    return {name: value for name, value in values.items() if not str(value).startswith("${")}


IDENTITY = ".positions.scheme_version"
# By kind: the model, its name and config, the task's config and name, and the criterion.
GENERATING_KINDS = {
    "translation": (
        RelPosTransformerModel,
        "relpos_transformer",
        RelPosTransformerConfig,
        TranslationConfig,
        "label_smoothed_cross_entropy",
    ),
    "language_modeling": (
        RelPosTransformerLanguageModel,
        "relpos_transformer_lm",
        RelPosTransformerLMConfig,
        LanguageModelingConfig,
        "cross_entropy",
    ),
    "segment_language_modeling": (
        RelPosTransformerXLModel,
        "relpos_transformer_xl",
        RelPosTransformerXLConfig,
        SegmentLanguageModelingConfig,
        "cross_entropy",
    ),
}


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
        cfg = config_of(
            OmegaConf.merge(config(), self.values | {"_name": name}),
            OmegaConf.merge(task(), told),
            {"_name": criterion} | self.criterion,
        )
        return fairseq_checkpoint(cfg, self.state, about, "CrossEntropyCriterion")


def build_generating(kind: str, values: dict[str, Any], rows: tuple[int, int]) -> nn.Module:
    """Build a model of GENERATING_KINDS, untrained; config values that are not named have their defaults."""
    model, _, base, _, _ = GENERATING_KINDS[kind]
    config = base()
    for name, value in values.items():
        setattr(config, name, value)
    target = Rows(rows[1])
    source = target if rows[0] == rows[1] else Rows(rows[0])
    task = SimpleNamespace(source_dictionary=source, target_dictionary=target, carries_memory=True)
    return model.build_model(config, task)


def shared_names(model: nn.Module) -> dict[str, str]:
    """Map each tied parameter's name to the name of the parameter that it is tied to."""
    first: dict[int, str] = {}
    found = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        before = first.setdefault(id(parameter), name)
        if before != name:
            found[name] = before
    return found


@torch.no_grad()
def run_generating(
    kind: str, values: dict[str, Any], rows: tuple[int, int], state: State, source: Tensor, target: Tensor
) -> Tensor:
    """Build a model of GENERATING_KINDS and run it on (B, S) sources and (B, T) beginnings of targets, in fp64.

    Sources end in </s>, and a language model reads none; targets begin with </s>.

    Returns:
        Scores (B, T, V) after each target token: logits, or log-probabilities of an adaptive softmax.

    Raises:
        ConversionError: the tensors do not fit the config's values.
    """
    model = load_tensors(build_generating(kind, values, rows), state, torch.float64)
    encoded = model.encoder(source) if kind == "translation" else None
    output = model.decoder(target, encoded)[0]
    softmax = model.decoder.adaptive_softmax
    return output if softmax is None else softmax.get_log_prob(output, None)


def plain_task(task: Any) -> dict[str, Any]:
    """Return a task's options that are no paths and no references to other options."""
    return {
        name: value
        for name, value in task.items()
        if name not in ("data", "tokenizer_folder")
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
