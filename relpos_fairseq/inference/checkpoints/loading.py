"""A checkpoint with its task, dictionaries and text, from its own folder or a data folder."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.utils import overwrite_args_by_name

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.inference.beside import text_folder
from relpos_fairseq.inference.checkpoints.trusted import read_trusted
from relpos_fairseq.inference.text import SymbolText, Text, read_text

logger = logging.getLogger(__name__)
JOBS = {
    "translation": "relpos translate",
    "language_modeling": "relpos sample",
    "segment_language_modeling": "relpos sample",
    "masked_lm": "relpos fill",
    "question_answering": "relpos answer",
}
ENDLESS = 10**6  # positions: fairseq's own large numbers are above it


@dataclass(frozen=True)
class Trained:
    """A model ready for use.

    Attributes:
        model: in evaluation mode, on its device.
        cfg: the checkpoint's config.
        task: its task, whose data is `folder`.
        folder: of dictionaries and units.
        source: text of the input.
        target: text of the output.
    """

    model: Any
    cfg: Any
    task: Any
    folder: Path
    source: Text
    target: Text

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device


def load(path: Path, data: Path | None, cpu: bool, command: str) -> Trained:
    """Load a checkpoint for a command, whose tasks are those of JOBS.

    Args:
        path: the checkpoint.
        data: its data folder; None: what lies beside it.
        cpu: use no GPU.
        command: `relpos translate`, ...

    Raises:
        PreparationError: no file, another command's model, or no dictionaries.
    """
    if not path.is_file():
        raise PreparationError(f"{path} is not a file")
    state = read_trusted(path)
    task_cfg = state["cfg"]["task"] if state.get("cfg") else None
    name = getattr(task_cfg, "_name", None)
    if JOBS.get(name) != command:
        instead = f": use {JOBS[name]}" if name in JOBS else ""
        raise PreparationError(f"{path} is of task {name}, which {command} does not run{instead}")
    folder = text_folder(path, data, getattr(task_cfg, "data", ""), state)
    overrides = {"data": str(folder), "tokenizer_folder": "", "eval_bleu": False}
    overwrite_args_by_name(state["cfg"], overrides)  # fairseq forgets them where it gets a state
    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(path)], state=state)
    device = "cuda" if torch.cuda.is_available() and not cpu else "cpu"
    languages = (getattr(cfg.task, f"{side}_lang", None) for side in ("source", "target"))
    source, target = (read_text(folder, language) for language in languages)
    if isinstance(source, SymbolText):
        logger.warning(
            "%s has neither a manifest of `relpos prepare` nor a tokenizer: text is taken as "
            "symbols of its dict.txt, joined by spaces",
            folder,
        )
    return Trained(models[0].eval().to(device), cfg, task, folder, source, target)


def longest(limit: Any) -> int | None:
    """Return fairseq's limit of positions, or None where there is none."""
    return None if limit is None or limit >= ENDLESS or math.isinf(limit) else int(limit)
