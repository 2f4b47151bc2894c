"""Connect text and checkpoint assets to fairseq: `--bpe relpos`, `from_pretrained`, and what training saves."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils, hub_utils, utils
from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass
from omegaconf import open_dict
from torch import Tensor

from relpos_fairseq.config import help_text
from relpos_fairseq.inference.model_card import write_card
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import read_json
from relpos_fairseq.modules.memory import Memory
from relpos_fairseq.patches.table import replaces
from relpos_fairseq.placement import Placement
from relpos_fairseq.text.assets import (
    TEXT_FOLDER,
    SymbolText,
    TokenizerText,
    copy_assets,
    find_assets,
    manifest_of,
    read_text,
    text_folders,
)

# ---- `--bpe relpos --tokenizer-folder DIR`: our text where fairseq asks for a BPE.
# fairseq's whole-word masking and fairseq-interactive use it.  DIR is the text/ beside a checkpoint,
# a data folder, or a tokenizer's.


@dataclass
class TokenizerFolderConfig(FairseqDataclass):
    """Where the text's units are."""

    tokenizer_folder: str = help_text("", "folder with tokenizer.json, sentencepiece.model, ...")


@register_bpe("relpos", dataclass=TokenizerFolderConfig)
class FolderText:
    """The text of a folder as a fairseq BPE."""

    def __init__(self, cfg: TokenizerFolderConfig):
        """Read the folder.

        Raises:
            ValueError: nothing there says how text becomes symbols.
        """
        folder = Path(cfg.tokenizer_folder)
        manifest = manifest_of(folder)
        settings = (read_json(manifest) if manifest else {}).get("settings", {})
        source, target = settings.get("languages", (None, None))
        self.source, self.target = read_text(folder, source), read_text(folder, target)
        if isinstance(self.source, SymbolText):
            raise UserError(
                f"--tokenizer-folder {folder} has no tokenizer, and no manifest.json of `relpos "
                f"prepare`: name the text/ beside the checkpoint, or the data folder"
            )

    def encode(self, x: str) -> str:
        return " ".join(self.source.encode(x))

    def decode(self, x: str) -> str:
        return self.target.decode(x.split(" "))

    def is_beginning_of_word(self, x: str) -> bool:
        """Whether a symbol begins a word.

        Raises:
            ValueError: the text is of no tokenizer, which alone knows.
        """
        if not isinstance(self.source, TokenizerText):
            raise UserError("--mask-whole-words needs a tokenizer in --tokenizer-folder")
        return self.source.tokenizer.begins_word(x)


# ---- `from_pretrained` of our generating models: raw text, and memory, without arguments.


Fairseq = hub_utils.GeneratorHubInterface


def install_text_hub() -> None:
    """Let `from_pretrained` read text/ beside a checkpoint, and give our models this interface."""
    hub_utils.GeneratorHubInterface = TextHub

    @replaces(hub_utils, "from_pretrained")
    def from_pretrained(
        original, model_name_or_path, checkpoint_file="model.pt", data_name_or_path=".", archive_map=None, **kwargs
    ):
        folder = Path(str(model_name_or_path))
        if data_name_or_path == "." and text_folders(folder):
            first = folder / str(checkpoint_file).split(os.pathsep)[0]
            data_name_or_path = str(find_assets(first, None).absolute())
        where = (model_name_or_path, checkpoint_file, data_name_or_path)
        return original(*where, archive_map, **kwargs)


class TextHub(Fairseq):
    """fairseq's interface; of our models it takes and gives plain text.

    `encode` and `decode` go by the data's manifest, unless a tokenizer or BPE is given; `generate`
    takes the memory of a text that was read before.
    """

    def __init__(self, cfg: Any, task: Any, models: Any) -> None:
        super().__init__(cfg, task, models)
        self.source = self.target = None
        ours = all(type(model).__module__.startswith("relpos_fairseq.") for model in models)
        paths = utils.split_paths(getattr(cfg.task, "data", None) or "")
        if ours and paths and self.bpe is None and self.tokenizer is None:
            languages = (getattr(cfg.task, f"{side}_lang", None) for side in ("source", "target"))
            self.source, self.target = (read_text(Path(paths[0]), name) for name in languages)

    def encode(self, sentence: str) -> Tensor:
        """(T,) ids of a text and </s>."""
        if self.source is None:
            return super().encode(sentence)
        symbols = self.source.encode(sentence)
        return torch.tensor([*map(self.src_dict.index, symbols), self.src_dict.eos()])

    def decode(self, tokens: Tensor) -> str:
        """The text of (T,) ids; one </s> at the end is no part of it."""
        if self.target is None:
            return super().decode(tokens)
        never = (self.tgt_dict.pad(), self.tgt_dict.bos())
        ids = [number for number in tokens.tolist() if number not in never]
        ids = ids[: -1 if ids[-1:] == [self.tgt_dict.eos()] else None]
        return self.target.decode([self.tgt_dict[number] for number in ids])

    @torch.no_grad()
    def read(self, text: str, memory: Memory | None = None) -> Memory:
        """Return the memory of a model with memory after a text.

        Args:
            text: of any length; what is generated with the memory begins on a new line.
            memory: of what stands before it.

        Raises:
            ValueError: the model has no memory.
        """
        decoder = self._decoder()
        tokens = self.encode(text.removesuffix("\n")).roll(1).to(self.device)  # </s> begins a line
        for part in tokens[None].split(max(1, self.cfg.task.tokens_per_sample), dim=1):
            memory = decoder.extract_features(part, None, memory=memory)[1]["memory"]
        return memory

    def generate(self, tokenized_sentences, beam: int = 5, *args, memory=None, **kwargs):
        """As fairseq's.

        Args:
            tokenized_sentences: (T,) ids each, as `encode` gives them.
            beam: width of the search.
            args: fairseq's.
            memory: of the text before every sentence (one row), or before each (a row each).
            kwargs: fairseq's, and options of generation.
        """
        if memory is None:
            return super().generate(tokenized_sentences, beam, *args, **kwargs)
        if torch.is_tensor(tokenized_sentences) and tokenized_sentences.dim() == 1:
            return self.generate([tokenized_sentences], beam, *args, memory=memory, **kwargs)[0]
        if memory.batch not in (1, len(tokenized_sentences)):
            raise ValueError(
                f"memory has {memory.batch} rows, and there are {len(tokenized_sentences)} "
                f"sentences: give one row for all of them, or a row each"
            )
        generation = copy.deepcopy(self.cfg.generation)
        with open_dict(generation):
            generation.update({"beam": beam, **kwargs})
        generator = self.task.build_generator(self.models, generation)
        found = []
        for number, tokens in enumerate(tokenized_sentences):
            row = torch.full((beam,), number if memory.batch > 1 else 0, device=self.device)
            [sample] = self._build_batches([tokens], False)
            sample = utils.apply_to_sample(lambda tensor: tensor.to(self.device), sample)
            with remembering(self._decoder(), memory.reorder(row)):
                found += self.task.inference_step(generator, self.models, sample)
        return found

    def _decoder(self) -> Any:
        """The one decoder.

        Raises:
            ValueError: it has no memory, or there are several.
        """
        if len(self.models) > 1 or not hasattr(self.models[0], "mem_len"):
            raise ValueError("memory needs one model of --arch relpos_transformer_xl")
        return self.models[0].decoder


@contextlib.contextmanager
def remembering(decoder: Any, memory: Memory) -> Iterator[None]:
    """Let a decoder begin with a memory whenever it is given none."""
    decoder.forward = functools.partial(decoder.forward, memory=memory)
    try:
        yield
    finally:
        del decoder.forward


# ---- What training writes beside its checkpoints: text/, so that the folder is enough, and a card.


logger = logging.getLogger(__name__)


def save_assets_with_checkpoints() -> None:
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
                text = write_assets(folder, trainer.cfg.task)
                facts = facts_of(trainer, epoch_itr.epoch, val_loss, best)
                command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
                write_card(folder, facts, command, text / "manifest.json")
            except (OSError, UserError) as error:  # a checkpoint was saved: training goes on
                logger.warning("%s or its card was not written beside %s: %s", TEXT_FOLDER, saved, error)
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


def write_assets(folder: Path, task: Any) -> Path:
    """Copy what the text of a task's config needs into a checkpoint's folder, and return where it lies."""
    paths = utils.split_paths(getattr(task, "data", None) or "")
    if not paths:
        return folder / TEXT_FOLDER
    tokenizer = getattr(task, "tokenizer_folder", "")
    return copy_assets(Path(paths[0]), folder, Path(tokenizer) if tokenizer else None)
