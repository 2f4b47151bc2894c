"""Read a checkpoint only if its model and task are known: a stranger's checkpoint may name any of fairseq's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY

from relpos_fairseq.io.errors import UserError

PACKAGE = "relpos_fairseq."
# Models and tasks of fairseq's whose options are plain values: they run no program and evaluate no text.
MODELS = ("lstm", "lstm_lm", "roberta", "transformer", "transformer_lm")
TASKS = (
    "cross_lingual_lm",
    "language_modeling",
    "legacy_masked_lm",
    "masked_lm",
    "multilingual_masked_lm",
    "sentence_prediction",
    "sentence_ranking",
    "translation",
    "translation_from_pretrained_bart",
    "translation_lev",
    "translation_multi_simple_epoch",
)


def read_trusted(path: Path | str, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Read a checkpoint into memory, for a command that builds its model.

    Args:
        path: the checkpoint.
        overrides: options that replace the checkpoint's.

    Raises:
        UserError: its model or task is neither this package's nor one of MODELS and TASKS.
    """
    state = checkpoint_utils.load_checkpoint_to_cpu(str(path), overrides)
    check_trusted(state, path)
    return state


def check_trusted(state: dict[str, Any], path: Path | str) -> None:
    """Refuse a loaded checkpoint as `read_trusted` does."""
    cfg = state.get("cfg")
    if not cfg:
        raise UserError(f"{path} holds no options of a model: it is no checkpoint of fairseq-train")
    state["args"] = None  # fairseq prefers them to the config, which it has made from them
    model, task = cfg.get("model"), cfg.get("task")
    name = getattr(model, "_name", None) or getattr(model, "arch", None)
    if not _is_known(ARCH_MODEL_REGISTRY.get(name) or MODEL_REGISTRY.get(name), MODELS, MODEL_REGISTRY):
        raise UserError(
            f"{path} holds a model {name!r}: only relpos_fairseq's own and fairseq's {', '.join(MODELS)} are loaded"
        )
    name = getattr(task, "task", None)
    name = name if isinstance(name, str) else getattr(task, "_name", None)
    if not _is_known(TASK_REGISTRY.get(name), TASKS, TASK_REGISTRY):
        raise UserError(
            f"{path} is of task {name!r}: only relpos_fairseq's own and fairseq's {', '.join(TASKS)} are loaded"
        )


def _is_known(kind: type | None, names: tuple[str, ...], registry: Mapping[str, type]) -> bool:
    """Return True if a class is this package's, or registered under one of the names."""
    return kind is not None and (kind.__module__.startswith(PACKAGE) or kind in [registry.get(n) for n in names])
