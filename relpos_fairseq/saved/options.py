"""Read what a checkpoint says of its model and its task, whoever saved it: hydra, argparse or a program of its own."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

logger = logging.getLogger(__name__)
# Options that say where files lie, in what languages and pieces, or what a training prints.
WHERE = r"data|load_checkpoint_heads|.*_folder|.*_lang|bpe|eval_.*bleu.*"


@dataclass(frozen=True)
class SavedOptions:
    """The options of a checkpoint, as plain values by name.

    Attributes:
        model: the model's; of a release that keeps one list, all options.
        task: the task's; there too.
    """

    model: dict[str, Any]
    task: dict[str, Any]

    @property
    def model_name(self) -> str | None:
        """The model or architecture, as fairseq registers it."""
        return _named(self.model, "_name", "arch")

    @property
    def task_name(self) -> str | None:
        """The task, as fairseq looks for it: an older name counts before hydra's."""
        return _named(self.task, "task", "_name")

    @property
    def languages(self) -> tuple[str | None, str | None]:
        """The source's and the target's language; None where the task has none."""
        return self.task.get("source_lang"), self.task.get("target_lang")

    @property
    def data(self) -> str:
        """The first data folder of the task; "" where there is none."""
        return str(self.task.get("data") or "").split(":")[0]


def _named(options: Mapping[str, Any], *keys: str) -> str | None:
    """Return the first name among the options; under `task` a whole config may stand."""
    return next((options[key] for key in keys if isinstance(options.get(key), str)), None)


def saved_options(state: Mapping[str, Any]) -> SavedOptions | None:
    """Return a checkpoint's options, or None where it has none.

    A task of before hydra keeps a Namespace in a config; fairseq's first releases keep one Namespace of all.
    """
    if cfg := state.get("cfg"):
        parts = plain(cfg)
        return SavedOptions(plain(parts.get("model") or {}), plain(parts.get("task") or {}))
    if args := state.get("args"):
        every = plain(args)
        return SavedOptions(every, every | {"_name": every.get("task")})
    return None


def plain(options: Any) -> dict[str, Any]:
    """Return options as a dict of plain values; enumerations by their names."""
    if OmegaConf.is_config(options):
        return OmegaConf.to_container(options, resolve=False, enum_to_str=True)
    return dict(options if isinstance(options, Mapping) else vars(options))


def tell_replaced(saved: Mapping[str, Any], given: Mapping[str, Any], besides: str = WHERE) -> None:
    """Log a line for each option of a checkpoint that another value replaces: a number is not what was trained.

    Args:
        saved: the checkpoint's options.
        given: the options that are used; those that the checkpoint has not are left out.
        besides: expression of the names that change no number.
    """
    for name, value in given.items():
        if name in saved and _text(value) != _text(saved[name]) and not re.fullmatch(besides, name):
            logger.warning("%s %s in place of the checkpoint's %s", name, _text(value), _text(saved[name]))


def _text(value: Any) -> str:
    """Return an option as a command line has it."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
