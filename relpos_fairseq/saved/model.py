"""Open a checkpoint with what it says of itself, its text, its model and task.

    saved = SavedModel.open(path)                       # refuses models and tasks of strangers
    saved.require("relpos translate")                   # and those that another command runs
    folder = saved.find_text(data)                      # of its dictionaries and subwords
    model, cfg, task = saved.build({"data": folder})    # in evaluation mode

A stranger's checkpoint may name any model and task that fairseq has, and some run what their options say: only this
package's own, and fairseq's whose options are plain values, are opened.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fairseq import checkpoint_utils
from fairseq.dataclass.utils import overwrite_args_by_name
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY
from torch import nn

from relpos_fairseq.checkpoint_files import building
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.saved_options import SavedOptions, saved_options, tell_replaced
from relpos_fairseq.text import provenance
from relpos_fairseq.text.assets import find_assets
from relpos_fairseq.text.dictionary import MASK, NSPECIAL

PACKAGE = "relpos_fairseq."
# Models and tasks of fairseq's whose options are plain values: they run no program and evaluate no text.
MODELS = ("lstm", "lstm_lm", "roberta", "transformer", "transformer_lm")
TASKS = (
    "cross_lingual_lm",
    "denoising",
    "language_modeling",
    "legacy_masked_lm",
    "masked_lm",
    "multilingual_denoising",
    "multilingual_language_modeling",
    "multilingual_masked_lm",
    "online_backtranslation",
    "sentence_prediction",
    "sentence_ranking",
    "span_masked_lm",
    "translation",
    "translation_from_pretrained_bart",
    "translation_lev",
    "translation_multi_simple_epoch",
)
MULTILINGUAL = "translation_multi_simple_epoch"  # whose checkpoints translate between several languages
# The command that runs a checkpoint on plain text, by its task.
JOBS = {
    **dict.fromkeys(("translation", "translation_from_pretrained_bart", MULTILINGUAL), "relpos translate"),
    **dict.fromkeys(
        ("language_modeling", "segment_language_modeling", "multilingual_language_modeling"), "relpos sample"
    ),
    **dict.fromkeys(("masked_lm", "multilingual_masked_lm"), "relpos fill"),
    "question_answering": "relpos answer",
    "sentence_prediction": "relpos classify",
}
NAMED = ("translation_from_pretrained_bart", "online_backtranslation", MULTILINGUAL)  # whose texts name their language
LANGUAGES, BEGUN = "symbols of languages", "<s> before them"  # what `SavedModel.framing` may be
_EMBEDDING = re.compile(r"embed_tokens\.(embeddings\.\d+\.0\.)?weight$")  # whole, or a part of an adaptive one


@dataclass
class SavedModel:
    """A checkpoint in memory.

    Args:
        path: its file.
        state: its content, as fairseq reads it, without the optimizer's state.
    """

    path: Path
    state: dict[str, Any]

    @classmethod
    def open(cls, path: Path | str, overrides: Mapping[str, Any] = {}) -> SavedModel:
        """Read a checkpoint.

        Args:
            path: its file.
            overrides: options that replace the checkpoint's, each of which is logged.

        Raises:
            UserError: its model or task is neither this package's nor one of MODELS and TASKS.
        """
        with building(path):
            state = checkpoint_utils.load_checkpoint_to_cpu(str(path))
            check_trusted(state, path)
            state.pop("last_optimizer_state", None)  # twice the size of the model, which is built next
            saved = saved_options(state)
            tell_replaced(saved.model | saved.task, overrides)
            overwrite_args_by_name(state["cfg"], overrides)
        return cls(Path(path), state)

    @cached_property
    def options(self) -> SavedOptions:
        """What the checkpoint says of its model and its task."""
        return saved_options(self.state)

    @property
    def framing(self) -> str | None:
        """What its task alone writes into texts, beside words and </s>: LANGUAGES, BEGUN, or None."""
        name, task = self.options.task_name, self.options.task
        of_several = name == "multilingual_language_modeling" and task.get("add_bos_token")
        if name in NAMED or task.get("add_lang_token") or of_several:
            return LANGUAGES
        return BEGUN if name in {"denoising", "multilingual_denoising", "span_masked_lm"} else None

    def require(self, command: str) -> None:
        """Raise an error if another command of JOBS, or none, runs the checkpoint."""
        name = self.options.task_name
        if JOBS.get(name) != command:
            instead = f": use {JOBS[name]}" if name in JOBS else ""
            raise UserError(f"{self.path} is of task {name}, which {command} does not run{instead}")

    def find_text(self, data: Path | None) -> Path:
        """Return the folder of its dictionaries and subwords: `data`, or what lies beside it.

        Raises:
            UserError: there is none, or it is of another training.
        """
        return find_assets(self.path, data, self.options.data, self.state)

    def build(self, overrides: Mapping[str, Any] = {}) -> tuple[Any, Any, Any]:
        """Return its model in evaluation mode, its config and its task; `overrides` are of where its data lie."""
        overwrite_args_by_name(self.state["cfg"], overrides)  # fairseq forgets them where it gets a state
        models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(self.path)], state=self.state)
        return models[0].eval(), cfg, task

    def build_anyway(self, data: Path | None) -> tuple[nn.Module, Any]:
        """Return its model and task; without `data` or a text/ beside it they get dictionaries of the right size.

        Raises:
            UserError: the checkpoint or the data cannot be used.
        """
        if data is not None and not (data.is_dir() and any(data.rglob("dict*.txt"))):
            raise UserError(f"--data {data} has no dict*.txt: give a folder of fairseq-preprocess")
        with tempfile.TemporaryDirectory() as folder:
            place = data
            if place is None:
                try:
                    place = self.find_text(None)
                except UserError:
                    place = Path(folder)
                    self._stand_in(place)
                    self.state.pop(provenance.KEY, None)  # the dictionaries that stand in are no training's
            try:
                model, _, task = self.build({"data": str(place), "load_checkpoint_heads": True})
            except Exception as error:  # whatever fairseq finds wrong, of many types
                remedy = f"--data {data} may be another model's" if data else "give its --data"
                raise UserError(f"checkpoint {self.path} does not load: {remedy} ({one_line(error)})") from error
        return model, task

    def _stand_in(self, folder: Path) -> None:
        """Write dictionaries as large as the checkpoint's embeddings."""
        rows: Counter = Counter()
        for key, value in self.state["model"].items():
            if _EMBEDDING.search(key):
                rows[key.partition(".")[0]] += len(value)
        source, target = (own or side for own, side in zip(self.options.languages, ("source", "target"), strict=True))
        # fairseq infers languages that it was not told from the name of any such file.
        (folder / f"languages.{source}-{target}.txt").touch()
        names = {"encoder": source, "decoder": target}
        for side, count in rows.items():
            # Tasks that mask add <mask> themselves where the dictionary lacks it.
            words = [*(f"word{number}" for number in range(count - NSPECIAL - 1)), MASK]
            for name in ("dict.txt", f"dict.{names.get(side)}.txt"):
                (folder / name).write_text("".join(f"{word} 1\n" for word in words), encoding="utf-8")


def one_line(error: Exception) -> str:
    """Return the first two lines of an error's message as one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def check_trusted(state: dict[str, Any], path: Path | str) -> None:
    """Raise the errors of `SavedModel.open` for a checkpoint that is loaded already."""
    saved = saved_options(state)
    if saved is None or not state.get("cfg"):
        raise UserError(f"{path} holds no options of a model: it is no checkpoint of fairseq-train")
    state["args"] = None  # fairseq prefers them to the config, which it has made from them
    for what, name, kind, names, known in (
        ("holds a model", saved.model_name, ARCH_MODEL_REGISTRY.get(saved.model_name), MODELS, MODEL_REGISTRY),
        ("is of task", saved.task_name, None, TASKS, TASK_REGISTRY),
    ):
        kind = kind or known.get(name)
        if kind is None or not (kind.__module__.startswith(PACKAGE) or kind in [known.get(one) for one in names]):
            theirs = ", ".join(names)
            raise UserError(f"{path} {what} {name!r}: only relpos_fairseq's own and fairseq's {theirs} are loaded")
