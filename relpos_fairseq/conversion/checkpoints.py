"""Read checkpoints of fairseq's RoBERTa and of relpos models, and folders of `relpos export transformers`."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf

from relpos_fairseq.conversion import layouts
from relpos_fairseq.conversion.heads import HEAD, SPAN_HEAD
from relpos_fairseq.conversion.huggingface_import import FILES, labels_of
from relpos_fairseq.conversion.layouts import ENCODER, State
from relpos_fairseq.conversion.ledger import KEPT
from relpos_fairseq.conversion.report import ConversionError, outputs_of
from relpos_fairseq.conversion.source import DEFAULTS, POSITION_FIELDS, GeneratingSource, SourceModel
from relpos_fairseq.conversion.weight_files import read_json, read_weights
from relpos_fairseq.conversion.writer import (
    GENERATING_KINDS,
    GeneratingModel,
    build_fairseq_roberta,
    build_generating,
    build_roberta,
    check_rows,
    run_generating,
    shared_names,
)
from relpos_fairseq.io.errors import unreadable
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.patches.checkpoints import allow_checkpoint_types
from relpos_fairseq.schemes import named_elsewhere
from relpos_fairseq.text.assets import DATA_PARTS, tokenizer_folder
from relpos_fairseq.text.dictionary import FILE as DICTIONARY
from relpos_fairseq.text.folders import tokenizer_paths

# Options of RelPosRobertaConfig that fairseq's RobertaModel has under the same names.
_SHARED = (
    "encoder_layers",
    "encoder_embed_dim",
    "encoder_ffn_embed_dim",
    "encoder_attention_heads",
    "activation_fn",
    "pooler_activation_fn",
    "encoder_normalize_before",
    "untie_weights_roberta",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "pooler_dropout",
    "layer_norm_eps",
)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read a fairseq checkpoint, safely.

    Raises:
        ConversionError: it is absent, truncated, or another kind of file.
    """
    checkpoint = read_file(path)
    if not isinstance(checkpoint.get("model"), dict):
        raise ConversionError(f"{path} is no fairseq checkpoint: it holds no model")
    return checkpoint


def read_file(path: Path) -> dict[str, Any]:
    """Read a dictionary that torch saved, safely.

    Raises:
        ConversionError: it is absent, truncated, or another kind of file.
    """
    if not path.is_file():
        raise ConversionError(f"{path} does not exist: give a checkpoint or a Hugging Face folder")
    allow_checkpoint_types()
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a broken file
        raise ConversionError(unreadable(path, error)) from None
    if not isinstance(checkpoint, dict):
        raise ConversionError(f"{path} is no fairseq checkpoint: it holds no model")
    return checkpoint


def from_checkpoint(checkpoint: dict[str, Any], path: Path) -> SourceModel:
    """Return a fairseq checkpoint in memory as a source: a relpos_roberta, or fairseq's RoBERTa of any release.

    Raises:
        ConversionError: another model, or options that contradict its tensors.
    """
    options = options_of(checkpoint, path)
    state = _modern(checkpoint["model"])
    ours = layouts.VERSION in state
    if not ours and not any(key.startswith(f"{ENCODER}.layers.") for key in state):
        name = options.get("_name") or options.get("arch")
        raise ConversionError(f"{path} holds a {name}: only RoBERTa's encoder is converted")
    values = DEFAULTS | {name: options[name] for name in _SHARED if options.get(name) is not None}
    values = {name: getattr(value, "value", value) for name, value in values.items()}
    if ours:
        values |= {name: str(options[name]) for name in POSITION_FIELDS if name in options}
        values["no_layernorm_embedding"] = bool(options.get("no_layernorm_embedding", False))
        values["max_positions"] = _length(options, checkpoint, path)
    else:
        if not options.get("encoder_learned_pos", True):
            raise ConversionError(f"{path}: its positions are not learned, as RoBERTa's are")
        values["no_layernorm_embedding"] = not options.get("layernorm_embedding", True)
        original, state = state, layouts.learned_from_fairseq(state)
        values["position_scheme"] = named_elsewhere("fairseq")["encoder_learned_pos"]
        values["max_positions"] = len(state[f"{ENCODER}.positions.shared.0.table"])
    source = SourceModel(
        kind="relpos_roberta" if ours else "fairseq's roberta",
        path=path,
        state=state,
        values=values,
        files=asset_files_of(path.parent),
        task=_task_options(checkpoint),
        source_rows=(told := checkpoint.get("conversion") or {}).get("rows"),
        labels=told.get("labels") or [],
        problem=told.get("problem_type"),
        head=told.get("head", ""),
        kept=told.get("kept", {}),
        family=told.get("family", ""),
        named=told.get("named", {}),
        kept_files=_kept_files(told.get("kept_files", []), path.parent),
    )
    check(source)
    state.setdefault(layouts.VERSION, layouts.encode_text(source.plan.describe()))
    if ours:
        source.library = "relpos_roberta"
        source.outputs = lambda tokens, segments: outputs_of(build_roberta(values, state), tokens, segments)
    else:
        source.library = "fairseq's RobertaModel"
        source.outputs = lambda tokens, _: outputs_of(build_fairseq_roberta(values, original), tokens, None)
    return source


def options_of(checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a checkpoint's model options, of today's fairseq or an old one.

    Raises:
        ConversionError: it has none.
    """
    cfg, args = checkpoint.get("cfg"), checkpoint.get("args")
    if cfg is None and args is None:
        raise ConversionError(f"{path} has neither cfg nor args: it is no fairseq checkpoint")
    return _plain(args if cfg is None else cfg["model"])


def _task_options(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return options of the task that a checkpoint was trained on; old releases keep one list of all options."""
    cfg = checkpoint.get("cfg")
    if cfg is not None:
        return _plain(cfg.get("task") or {})
    options = _plain(checkpoint["args"])
    return options | {"_name": options.get("task")}


def _plain(options: Any) -> dict[str, Any]:
    if OmegaConf.is_config(options):
        return OmegaConf.to_container(options, resolve=False, enum_to_str=True)
    return dict(vars(options)) if isinstance(options, argparse.Namespace) else dict(options)


def _length(options: dict[str, Any], checkpoint: dict[str, Any], path: Path) -> int:
    """Return the positions that a relpos_roberta was built for: its own option, else its task's sample length."""
    length = options.get("max_positions")
    if not isinstance(length, int):
        task = _task_options(checkpoint)
        length = task.get("tokens_per_sample") or task.get("max_positions")
    if not isinstance(length, int):
        raise ConversionError(f"{path} does not say how many positions it has (max_positions)")
    return length


def _modern(state: State) -> State:
    """Rename tensors of old fairseq releases (decoder, emb_layer_norm, in_proj) as today's fairseq does."""
    result = {}
    for key, value in state.items():
        if key.startswith("decoder."):
            key = "encoder." + key.removeprefix("decoder.")
        key = key.replace(".emb_layer_norm.", ".layernorm_embedding.")
        if key.endswith(("._float_tensor", "sentence_encoder.version")):
            continue
        if ".in_proj_" in key:
            stem, part = key.split(".in_proj_")
            for name, third in zip("qkv", value.chunk(3), strict=True):
                result[f"{stem}.{name}_proj.{part}"] = third
            continue
        result[key] = value
    return result


def check(source: SourceModel) -> None:
    """Check that options and tensors belong together.

    Raises:
        ConversionError: they do not.
    """
    state, values = source.state, source.values
    layers = layouts.count_layers(state)
    if values["encoder_layers"] != layers:
        raise ConversionError(f"{source.path} has {layers} layers, and its options say {values['encoder_layers']}")
    for name, key, axis in (
        ("encoder_embed_dim", f"{ENCODER}.embed_tokens.weight", 1),
        ("encoder_ffn_embed_dim", f"{ENCODER}.layers.0.fc1.weight", 0),
    ):
        if key not in state or state[key].size(axis) != values[name]:
            found = tuple(state[key].shape) if key in state else "missing"
            raise ConversionError(f"{source.path}: {key} is {found}, and its options say {name} {values[name]}")
    described = layouts.described(state)
    if described is not None and described != source.plan.describe():
        raise ConversionError(
            f"{source.path}: its tensors say [{described}] of positions, its options [{source.plan.describe()}]"
        )


def asset_files_of(folder: Path) -> list[Path]:
    """Return a folder's dict.txt and its tokenizer's files; in data of sentence_prediction they lie in input0/."""
    dictionary = next((path for part in DATA_PARTS[:2] if (path := folder / part / DICTIONARY).is_file()), None)
    place = tokenizer_folder(folder)
    return [*([dictionary] if dictionary else []), *(tokenizer_paths(place) if place else [])]


def _kept_files(names: list[str], folder: Path) -> dict[str, Path]:
    """Return the files of a folder that a conversion kept there, of the places alone that it keeps files in."""
    patterns = [re.compile(pattern) for verdict, _, pattern in FILES if verdict == KEPT]
    known = (name for name in names if any(pattern.fullmatch(str(name)) for pattern in patterns))
    return {name: folder / name for name in known if (folder / name).is_file()}


def label_names(text: Path | None, classes: int) -> list[str]:
    """Return names of the classes from the data's dictionary of labels, if it has as many."""
    path = text / "label" / "dict.txt" if text else None
    if path is None or not path.is_file():
        return []
    names = [line.rpartition(" ")[0] for line in read_lines(path)][:classes]
    return names if len(names) == classes else []


# Folders of `relpos export transformers`, as they were written or as transformers saved them again.
ROBERTA_TYPE = "relpos_roberta"  # model_type
ROBERTA_PREFIX = "roberta."
TIED, EMBEDDING = "encoder.lm_head.weight", f"{ENCODER}.embed_tokens.weight"
CLASSIFIER, SPANS = f"classification_heads.{HEAD}.", f"span_heads.{SPAN_HEAD}."
# model_type to the kind of model.
GENERATING_TYPES = {
    "relpos_translation": "translation",
    "relpos_language_model": "language_modeling",
    "relpos_memory_language_model": "segment_language_modeling",
}
GENERATING_PREFIX = "model."
TEXT_FOLDER = "text"


def read_exported_roberta(folder: Path, config: dict[str, Any]) -> SourceModel:
    """Read a relpos_roberta from a folder of `relpos export transformers`.

    Raises:
        ConversionError: tensors of another model.
    """
    state, values = _exported_state(folder), config["values"]
    text = folder / TEXT_FOLDER
    source = SourceModel(
        kind=f"{ROBERTA_TYPE} of transformers",
        path=folder,
        state=state,
        values=values,
        files=asset_files_of(text),
        task=_exported_task(config, state),
        labels=labels_of(config, len(config.get("id2label") or ())),
        library="relpos_roberta",
        outputs=lambda tokens, segments: outputs_of(build_roberta(values, state), tokens, segments),
    )
    if not source.files:
        source.notes.append(f"no {text}: the result has no dictionary and no tokenizer")
    check(source)
    return source


def _exported_state(folder: Path) -> State:
    """Return an exported RoBERTa's tensors under the names of relpos_roberta.

    Raises:
        ConversionError: tensors of another model.
    """
    weights = read_weights(folder)
    unknown = sorted(name for name in weights if not name.startswith(ROBERTA_PREFIX))
    if unknown or ROBERTA_PREFIX + EMBEDDING not in weights:
        raise ConversionError(
            f"{folder}: {unknown[0] if unknown else ROBERTA_PREFIX + EMBEDDING} is "
            f"{'no tensor' if unknown else 'missing'} of a {ROBERTA_TYPE}: copy the whole folder again"
        )
    state = {name.removeprefix(ROBERTA_PREFIX): value for name, value in weights.items()}
    state.setdefault(TIED, state[EMBEDDING])
    return state


def _exported_task(config: dict[str, Any], state: State) -> dict[str, Any]:
    """Return options of the task that an exported RoBERTa's heads are for.

    A head that transformers added has the input format of the task before it.
    """
    task = dict(config.get("task") or {})
    has = {
        "sentence_prediction": any(name.startswith(CLASSIFIER) for name in state),
        "question_answering": any(name.startswith(SPANS) for name in state),
    }
    if task.get("_name") in has and not has[task["_name"]]:
        task["_name"] = "masked_lm"  # the head was left behind
    if has["sentence_prediction"] and task.get("_name") != "sentence_prediction":
        two = config.get("pair_separators", 1)
        task |= {"_name": "sentence_prediction", "init_token": 0}
        task["separator_token"] = 2 if two else None
    if task.get("_name") == "sentence_prediction":
        task["classification_head_name"] = HEAD
        task["regression_target"] = config.get("problem_type") == "regression" or (
            len(state[f"{CLASSIFIER}out_proj.weight"]) == 1
        )
    return task


def read_exported_generating(folder: Path, config: dict[str, Any]) -> GeneratingSource:
    """Read a translation or language model from a folder of `relpos export transformers`.

    Raises:
        ConversionError: tensors or dictionaries of another model.
    """
    kind, values = GENERATING_TYPES[config["model_type"]], config["values"]
    rows = (config.get("source_rows") or config["vocab_size"], config["vocab_size"])
    weights = read_weights(folder)
    model = build_generating(kind, values, rows)
    own, shared = model.state_dict(), shared_names(model)
    unknown = sorted(n for n in weights if n.removeprefix(GENERATING_PREFIX) not in own or GENERATING_PREFIX not in n)
    state = {name.removeprefix(GENERATING_PREFIX): value for name, value in weights.items()}
    for name, source in shared.items():
        known = state.get(name, state.get(source))
        if known is not None:
            state[name] = state[source] = known
    missing = sorted(name for name in own if name not in state and not name.endswith("version"))
    if unknown or missing:
        raise ConversionError(
            f"{folder}: {unknown[0] if unknown else GENERATING_PREFIX + missing[0]} is "
            f"{'no tensor' if unknown else 'missing'} of a {config['model_type']}: copy the whole "
            f"folder again"
        )
    state |= {name: value for name, value in own.items() if name.endswith("version")}
    text = folder / TEXT_FOLDER
    found = (path for path in sorted(text.rglob("*")) if path.is_file())
    files = {path.relative_to(folder).as_posix(): path for path in found}
    check_rows(files, rows)
    return GeneratingSource(
        kind="transformers, exported by relpos",
        path=folder,
        model=GeneratingModel(kind, values, rows, state, _generating_task(folder, config, kind), files),
        logits=lambda pair: run_generating(kind, values, rows, state, pair.source, pair.target),
        library=f"the folder's own config under {GENERATING_KINDS[kind][1]}",
        notes=[] if files else [f"no {text}: the result has no dictionary"],
    )


def _generating_task(folder: Path, config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return options of the task; folders that older versions exported record the languages alone."""
    task = dict(config.get("task") or {})
    path = folder / "relpos_text.json"
    if kind == "translation" and not task.get("source_lang") and path.is_file():
        source, target = read_json(path)["languages"]
        task |= {"source_lang": source, "target_lang": target}
    limits = ("max_source_positions", "max_target_positions", "tokens_per_sample")
    known = {name: config["values"][name] for name in limits if isinstance(config["values"].get(name), int)}
    return {"_name": kind} | known | task
