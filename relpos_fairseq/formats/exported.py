"""Read folders of `relpos export transformers`, as they were written or as transformers saved them again."""

from __future__ import annotations

import re
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from fairseq.models import MODEL_DATACLASS_REGISTRY

from relpos_fairseq.conversion.layouts import State
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.formats.fairseq import check
from relpos_fairseq.formats.huggingface_import import classes_of, labels_of
from relpos_fairseq.formats.transformers_folder import AS_TIED, ledger_of, read_weights
from relpos_fairseq.heads import CHOICES, CLASSIFIER, MASKED_LM, RANKING, SPANS, head_of, is_regression, problem_named
from relpos_fairseq.models import building
from relpos_fairseq.models.building import EMBEDDING, run_ours
from relpos_fairseq.saved.checkpoint import OURS, ROBERTA
from relpos_fairseq.saved.ledger import NEUTRAL, USED, Ledger, Recorded
from relpos_fairseq.saved.model import Origin, SavedModel
from relpos_fairseq.text.assets import asset_files_of
from relpos_fairseq.text.dictionary import FILE as DICTIONARY
from relpos_fairseq.text.dictionary import symbols_of_rows

ROBERTA_TYPE = OURS[ROBERTA].exported
ROBERTA_PREFIX = "roberta."
TIED = "encoder.lm_head.weight"
TYPES = {one.exported: one for one in OURS.values()}  # by model_type
GENERATING_PREFIX = "model."
TEXT_FOLDER = "text"


def _read_roberta(folder: Path, config: Recorded) -> SavedModel:
    weights, text = read_weights(folder), folder / TEXT_FOLDER
    unknown = [name for name in weights if not name.startswith(ROBERTA_PREFIX)]
    missing = [name for name in (ROBERTA_PREFIX + EMBEDDING,) if name not in weights]
    _check_names(folder, unknown, missing, ROBERTA_TYPE)
    state, values = {name.removeprefix(ROBERTA_PREFIX): value for name, value in weights.items()}, config["values"]
    if tied := config.get("tie_word_embeddings", True):
        state[TIED] = state[EMBEDDING]
    state = building.fill_shared(state, building.roberta_shared_names(values, state))
    head = head_of(config, str(folder)) or MASKED_LM
    notes: list[str] = []
    saved = SavedModel.of(
        folder,
        ROBERTA,
        values,
        state,
        _exported_task(config, state, folder),
        kind=f"{ROBERTA_TYPE} of transformers",
        origin=Origin(
            labels=labels_of(config, classes_of(state, config, head, folder), notes),
            problem_type=problem_named(config, str(folder)),
            head=head.suffix,
            named={key: config[key] for key in ("id2label", "label2id") if config.get(key)},
        ),
        library=ROBERTA,
        files=asset_files_of(text),
        notes=notes,
    )
    if not saved.files:
        saved.notes.append(f"no {text}: the result has no dictionary and no tokenizer")
    saved.outputs = partial(run_ours, saved)
    check(saved)
    saved.ledger = _ledger(folder, config, weights)
    saved.ledger.mark("tensors", NEUTRAL, [ROBERTA_PREFIX + TIED] * bool(tied), AS_TIED)
    return saved


# Keys and files of an exported folder that repeat what others say.
_REPEATED = (
    "hidden_size num_hidden_layers num_attention_heads vocab_size label2id is_encoder_decoder decoder_start_token_id"
)
_CODE = re.compile(r"relpos_\w+\.py")
_MADE = re.compile(r"relpos_text\.json|[^/]*token[^/]*\.json|[^/]*\.model|vocab\.(json|txt)|merges\.txt")


def _ledger(folder: Path, config: Recorded, weights: State) -> Ledger:
    """Return what became of an exported folder, whose tensors are all read."""
    ledger = ledger_of(folder, config, weights, {"other keys say it": _REPEATED})
    ledger.mark("tensors", USED, weights)
    known = {part.name for part in fields(MODEL_DATACLASS_REGISTRY[TYPES[config["model_type"]].name])}
    for name, value in config["values"].items():
        if name not in known:
            ledger.add("keys", f"values.{name}", value)
    names = list(ledger.became["files"])
    ledger.mark("files", NEUTRAL, filter(_CODE.fullmatch, names), "the code of this package")
    if text := [name for name in names if name.startswith(f"{TEXT_FOLDER}/")]:
        ledger.mark("files", USED, text)
        ledger.mark("files", NEUTRAL, filter(_MADE.fullmatch, names), f"made of {TEXT_FOLDER}/")
    return ledger


def _check_names(folder: Path, unknown: list[str], missing: list[str], kind: str) -> None:
    """Raise an error that names the first of a folder's unknown or missing tensors.

    Raises:
        ConversionError: there is one.
    """
    if names := sorted(unknown) or sorted(missing):
        raise ConversionError(
            f"{folder}: {names[0]} is {'no tensor' if unknown else 'missing'} of a {kind}: copy the whole folder again"
        )


def _exported_task(config: dict[str, Any], state: State, folder: Path) -> dict[str, Any]:
    """Return options of the task that an exported RoBERTa's heads are for.

    A head that transformers added has the input format of the task before it.
    """
    task = dict(config.get("task") or {})
    classifies = CLASSIFIER.shown in state
    ranks = classifies and head_of(config, str(folder)) is CHOICES
    has = {"sentence_prediction": classifies and not ranks, RANKING: ranks, "question_answering": SPANS.shown in state}
    wanted = RANKING if ranks else "sentence_prediction"
    if task.get("_name") in has and not has[task["_name"]]:
        task["_name"] = "masked_lm"  # the head was left behind
    two = config.get("pair_separators", 1)
    if classifies and task.get("_name") != wanted:
        task |= {"_name": wanted, "init_token": 0}
        task["separator_token"] = 2 if two else None
        task.pop("num_classes", None)  # of another task
    if classifies:
        task["classification_head_name"] = CLASSIFIER.name
    if has["sentence_prediction"]:
        task["regression_target"] = is_regression(config, len(state[CLASSIFIER.shown]))
    return task


def _read_generating(folder: Path, config: Recorded) -> SavedModel:
    ours, values = TYPES[config["model_type"]], config["values"]
    rows = (config.get("source_rows") or config["vocab_size"], config["vocab_size"])
    weights = read_weights(folder)
    model = building.build_generating(ours.name, values, rows)
    own, shared = model.state_dict(), building.shared_names(model)
    unknown = [n for n in weights if n.removeprefix(GENERATING_PREFIX) not in own or GENERATING_PREFIX not in n]
    state = {name.removeprefix(GENERATING_PREFIX): value for name, value in weights.items()}
    state = building.fill_shared(state, shared)
    missing = [GENERATING_PREFIX + name for name in own if name not in state and not name.endswith("version")]
    _check_names(folder, unknown, missing, config["model_type"])
    state |= {name: value for name, value in own.items() if name.endswith("version")}
    text = folder / TEXT_FOLDER
    files = {path.relative_to(folder).as_posix(): path for path in sorted(text.rglob("*")) if path.is_file()}
    limits = ("max_source_positions", "max_target_positions", "tokens_per_sample")
    task = {"_name": ours.task} | {name: values[name] for name in limits if isinstance(values.get(name), int)}
    task |= config.get("task") or {}
    sides = ("source_lang", "target_lang")
    own = {f"dict.{task.get(side)}.txt": count for side, count in zip(sides, rows, strict=True)} | {DICTIONARY: rows[1]}
    saved = SavedModel.of(
        folder,
        ours.name,
        values,
        state,
        task,
        kind="transformers, exported by relpos",
        library=f"the folder's own config under {ours.name}",
        files=files,
        ledger=_ledger(folder, config, weights),
        notes=[] if files else [f"no {text}: the result has no dictionary"],
    )
    for path in filter(lambda path: path.name in own, files.values()):
        symbols_of_rows(path, own[path.name], masked=saved.framing is not None)
    saved.outputs = partial(run_ours, saved)
    return saved


def read_exported(folder: Path, config: Recorded) -> SavedModel:
    """Read a folder of `relpos export transformers`.

    Raises:
        ConversionError: tensors or dictionaries of another model.
    """
    return (_read_roberta if config["model_type"] == ROBERTA_TYPE else _read_generating)(folder, config)
