"""What happens when fairseq loads a checkpoint: three of its functions, each replaced once, the inner one last.

fairseq-train loads by `Trainer.load_checkpoint`, evaluations and hubs by `load_model_ensemble_and_task`. Both read the
file by `load_checkpoint_to_cpu`, which `_loading` tells what it is read for.
"""

from __future__ import annotations

import os
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from fairseq.trainer import Trainer

from relpos_fairseq.conversion import ConversionError
from relpos_fairseq.formats.on_load import prepare, prepare_sides
from relpos_fairseq.inference.checkpoints.hooks import compare_text
from relpos_fairseq.models.pruning import NOTHING, prune_checkpoint, pruning_of_checkpoint
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel
from relpos_fairseq.patches import checkpoints, processes
from relpos_fairseq.text import provenance


@dataclass
class Loading:
    """What a checkpoint is read for: by default for nothing but itself."""

    trainer: Trainer | None = None  # into whose model it is loaded
    converts: bool = False  # --finetune-from-model names it
    resets_optimizer: bool = False  # it begins with the parameters alone
    read: list[tuple[dict[str, Any], str]] = field(default_factory=list)  # config and hashes of each, and its path


_loading: ContextVar[Loading] = ContextVar("loading")


def load_checkpoint(original, self, filename, reset_optimizer=False, *args, **kwargs):
    """Load a checkpoint into a trainer, which a training begins from or goes on from, or say what disagrees."""
    begins = filename == self.cfg.checkpoint.finetune_from_model
    if begins and os.path.isdir(filename):
        raise ConversionError(
            f"--finetune-from-model {filename} is a folder: give the model.pt in it; a Hugging "
            f"Face folder is converted by relpos convert first"
        )
    now = Loading(self, begins, reset_optimizer)
    token = _loading.set(now)
    try:
        return checkpoints.load_or_explain(original, now.read, self, filename, reset_optimizer, *args, **kwargs)
    finally:
        _loading.reset(token)


def load_model_ensemble_and_task(
    original, filenames, arg_overrides=None, task=None, strict=True, suffix="", num_shards=1, state=None
):
    """Load the models of checkpoints, and the task, whose dictionaries must be those of every training."""
    now = Loading(read=[] if state is None else [(_without_tensors(state), filenames[0])])
    token = _loading.set(now)
    try:
        loaded = checkpoints.load_each(original, filenames, arg_overrides, task, strict, suffix, num_shards, state)
    finally:
        _loading.reset(token)
    processes.count_samples_once(loaded[2])
    for kept, path in now.read:
        provenance.check_task(kept, loaded[2], path)
    return loaded


def load_checkpoint_to_cpu(original, path, *args, **kwargs):
    """Read a checkpoint, and prune, convert and compare it for the trainer whose model it is loaded into."""
    now = _loading.get(Loading())
    state = checkpoints.read_whole(original, path, *args, **kwargs)
    now.read.append((_without_tensors(state), path))
    if (trainer := now.trainer) is None:
        prune_checkpoint(state, pruning_of_checkpoint(state), path, resumes=True)
        return state
    model, keeps_memory = trainer.get_model(), hasattr(trainer.task, "set_checkpoint_dict")
    resets = now.resets_optimizer and (now.converts or trainer.cfg.checkpoint.reset_dataloader or not keeps_memory)
    pruning = getattr(model, "pruning", NOTHING)
    if prune_checkpoint(state, pruning, path, resumes=not now.converts) and not resets:
        raise ConversionError(
            f"{path} has layers that are not kept, and an optimizer or memory for all of them: give "
            f"--reset-optimizer --reset-dataloader, or begin by --finetune-from-model"
        )
    if isinstance(model, RelPosRobertaModel):
        prepare(state, path, model, now.converts)
    elif now.converts:
        prepare_sides(state, path, model)
    compare_text(state, trainer.task, path, now.resets_optimizer)
    return state


def _without_tensors(state: dict[str, Any]) -> dict[str, Any]:
    return {name: state.get(name) for name in ("cfg", provenance.KEY)}
