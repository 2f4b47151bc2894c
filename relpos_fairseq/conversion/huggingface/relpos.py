"""A folder of `relpos export transformers`, or what transformers saved again, as a source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relpos_fairseq.conversion.huggingface.files import read_weights
from relpos_fairseq.conversion.huggingface.folder import HEAD, SPAN_HEAD
from relpos_fairseq.conversion.layouts import ENCODER, State
from relpos_fairseq.conversion.report import ConversionError

KIND = "relpos_roberta"  # model_type
PREFIX = "roberta."
TIED, EMBEDDING = "encoder.lm_head.weight", f"{ENCODER}.embed_tokens.weight"
CLASSIFIER, SPANS = f"classification_heads.{HEAD}.", f"span_heads.{SPAN_HEAD}."


def state_of(folder: Path) -> State:
    """Return the tensors under our names.

    Raises:
        ConversionError: tensors of another model.
    """
    weights = read_weights(folder)
    unknown = sorted(name for name in weights if not name.startswith(PREFIX))
    if unknown or PREFIX + EMBEDDING not in weights:
        raise ConversionError(
            f"{folder}: {unknown[0] if unknown else PREFIX + EMBEDDING} is "
            f"{'no tensor' if unknown else 'missing'} of a {KIND}: copy the whole folder again"
        )
    state = {name.removeprefix(PREFIX): value for name, value in weights.items()}
    state.setdefault(TIED, state[EMBEDDING])
    return state


def task_of(config: dict[str, Any], state: State) -> dict[str, Any]:
    """Return options of the task that the heads are for: fairseq's own, or what transformers has.

    A head that transformers added has the input of the task before it.
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
