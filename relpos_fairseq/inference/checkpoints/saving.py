"""What training writes beside its checkpoints: text/, so that the folder is enough, and a card."""

from __future__ import annotations

import logging
import shlex
import sys
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils, utils

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.inference.beside import FOLDER, copy_text
from relpos_fairseq.inference.card import write_card
from relpos_fairseq.mends.replacing import replaces
from relpos_fairseq.placement import Placement

logger = logging.getLogger(__name__)


def keep_text_beside_checkpoints() -> None:
    """Let fairseq's trainer write both wherever it saves one of our models."""

    @replaces(checkpoint_utils, "save_checkpoint")
    def save_checkpoint(original, cfg, trainer, epoch_itr, val_loss):
        if not type(trainer.get_model()).__module__.startswith("relpos_fairseq."):
            return original(cfg, trainer, epoch_itr, val_loss)
        name_languages(trainer.cfg.task, trainer.task)
        saved = original(cfg, trainer, epoch_itr, val_loss)
        if saved:
            folder = Path(saved).parent
            best = getattr(checkpoint_utils.save_checkpoint, "best", None)
            try:
                text = write_beside(folder, trainer.cfg.task)
                facts = facts_of(trainer, epoch_itr.epoch, val_loss, best)
                command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
                write_card(folder, facts, command, text / "manifest.json")
            except (OSError, PreparationError) as error:  # a checkpoint was saved: training goes on
                logger.warning("%s or its card was not written beside %s: %s", FOLDER, saved, error)
        return saved


def facts_of(trainer: Any, epoch: int, score: float | None, best: float | None) -> dict:
    """What a trainer knows of its model, by the names of the card."""
    model, cfg = trainer.get_model(), trainer.cfg
    facts = {"architecture": cfg.model._name}
    for name, module in model.named_modules():
        if isinstance(module, Placement):
            facts[f"{name.rpartition('.')[0]}: position scheme"] = module.plan.describe()
    facts["parameters"] = sum(one.numel() for one in model.parameters())
    facts |= {"task": cfg.task._name, "criterion": cfg.criterion._name}
    facts |= {"epoch": epoch, "updates": trainer.get_num_updates(), "seed": cfg.common.seed}
    measure = f"{cfg.dataset.valid_subset} {cfg.checkpoint.best_checkpoint_metric}"
    if score is not None:
        facts |= {f"{measure}, checkpoint_last.pt": score, f"{measure}, checkpoint_best.pt": best}
    return facts


def name_languages(cfg: Any, task: Any) -> None:
    """Let a checkpoint name the languages that fairseq inferred from names of the data's files."""
    for side in ("source_lang", "target_lang"):
        if side in cfg and cfg[side] is None:
            cfg[side] = getattr(task.cfg, side)


def write_beside(folder: Path, task: Any) -> Path:
    """Copy what the text of a task's config needs into a checkpoint's folder, and return where it lies."""
    paths = utils.split_paths(getattr(task, "data", None) or "")
    if not paths:
        return folder / FOLDER
    tokenizer = getattr(task, "tokenizer_folder", "")
    return copy_text(Path(paths[0]), folder, Path(tokenizer) if tokenizer else None)
