"""Checkpoints keep the hashes of their dictionaries and units, and all of fairseq's commands compare them."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils, utils
from fairseq.trainer import Trainer

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.patches.table import replaces
from relpos_fairseq.text import provenance
from relpos_fairseq.text.assets import asset_files

logger = logging.getLogger(__name__)
# What is done with each checkpoint that fairseq reads within a call; None outside of such calls.
_reading: contextvars.ContextVar[Callable[[dict[str, Any], str], None] | None] = contextvars.ContextVar(
    "reading", default=None
)


def compare_text_on_load() -> None:
    """Let a training of our models keep the hashes, and every load of such a checkpoint compare them."""

    @replaces(Trainer, "state_dict")
    def state_dict(original, self):
        state = original(self)
        if type(self.get_model()).__module__.startswith("relpos_fairseq."):
            state[provenance.KEY] = _record(self)
        return state

    @replaces(checkpoint_utils, "load_checkpoint_to_cpu")
    def load_checkpoint_to_cpu(original, path, *args, **kwargs):
        state = original(path, *args, **kwargs)
        if (read := _reading.get()) is not None:
            read(state, path)
        return state

    @replaces(checkpoint_utils, "load_model_ensemble_and_task")
    def load_model_ensemble_and_task(
        original, filenames, arg_overrides=None, task=None, strict=True, suffix="", num_shards=1, state=None
    ):
        kept = [] if state is None else [(_hashes(state), filenames[0])]
        token = _reading.set(lambda state, path: kept.append((_hashes(state), path)))
        try:
            loaded = original(filenames, arg_overrides, task, strict, suffix, num_shards, state)
        finally:
            _reading.reset(token)
        for hashes, path in kept:
            provenance.check_task(hashes, loaded[2], path)
        return loaded

    @replaces(Trainer, "load_checkpoint")
    def load_checkpoint(original, self, filename, reset_optimizer=False, *args, **kwargs):
        def compare(state: dict[str, Any], path: str) -> None:
            try:
                provenance.check_task(state, self.task, path)
            except UserError as error:
                if not reset_optimizer:
                    raise
                logger.warning("%s; a training that begins with its parameters goes on", error)

        token = _reading.set(compare)
        try:
            return original(self, filename, reset_optimizer, *args, **kwargs)
        finally:
            _reading.reset(token)


def _hashes(state: dict[str, Any]) -> dict[str, Any]:
    """Return of a checkpoint what is compared, so that its tensors are not kept."""
    return {provenance.KEY: state.get(provenance.KEY)}


def _record(trainer: Trainer) -> dict[str, dict[str, str]]:
    """Return the hashes of a trainer's dictionaries and units, which are read once."""
    if (known := getattr(trainer, "_text_record", None)) is None:
        try:
            files = data_files(trainer.cfg.task)
            known = provenance.record(trainer.task, files)
        except (OSError, UserError) as error:
            logger.warning("checkpoints keep no hashes of the data's units: %s", error)
            known = provenance.record(trainer.task, {})
        trainer._text_record = known
    return known


def data_files(task: Any) -> dict[str, Path]:
    """Return the files of the text of a task's config, as they lie beside its data."""
    paths = utils.split_paths(getattr(task, "data", None) or "")
    tokenizer = getattr(task, "tokenizer_folder", "")
    return asset_files(Path(paths[0]), Path(tokenizer) if tokenizer else None) if paths else {}
