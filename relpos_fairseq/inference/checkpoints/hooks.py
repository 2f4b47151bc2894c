"""Connect text and checkpoint assets to fairseq: `--bpe relpos`, `from_pretrained`, and what training saves."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import shlex
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import make_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils, hub_utils, utils
from fairseq.data.encoders import register_bpe
from fairseq.dataclass import FairseqDataclass
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import TASK_REGISTRY
from fairseq.trainer import Trainer
from omegaconf import open_dict
from torch import Tensor

from relpos_fairseq.core.config import help_text
from relpos_fairseq.core.placement import Placement, generation_of
from relpos_fairseq.inference.checkpoints import beam_search
from relpos_fairseq.inference.model_card import write_card
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.manifests import Manifest
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.modules.memory import Memory
from relpos_fairseq.nn.packed import quantize
from relpos_fairseq.patches import checkpoints, training
from relpos_fairseq.patches.sharding import with_whole_model
from relpos_fairseq.patches.training import PINNED, options_of
from relpos_fairseq.saved.model import SavedModel
from relpos_fairseq.text import provenance
from relpos_fairseq.text.assets import (
    TEXT_FOLDER,
    SymbolText,
    TokenizerText,
    asset_files,
    copy_assets,
    manifest_of,
    read_text,
    text_folders,
    tokenizer_folder,
)

logger = logging.getLogger(__name__)
PACKAGE = "relpos_fairseq."


def is_ours(model: Any) -> bool:
    """Return True for a model of this package."""
    return any(kind.__module__.startswith(PACKAGE) for kind in type(model).__mro__)  # FSDP2 derives a class of its own


# --bpe relpos --tokenizer-folder DIR: a folder's text where fairseq asks for a BPE (fairseq-interactive, whole-word
# masking).  DIR is the text/ beside a checkpoint, a data folder or a tokenizer's.


# fairseq makes a flag of a field's type, which is a text where annotations are not evaluated.
TokenizerFolderConfig = make_dataclass(
    "TokenizerFolderConfig",
    [("tokenizer_folder", str, help_text("", "folder with tokenizer.json, sentencepiece.model, ..."))],
    bases=(FairseqDataclass,),
)


@register_bpe("relpos", dataclass=TokenizerFolderConfig)
class FolderText:
    """A folder's text as a BPE of fairseq's."""

    def __init__(self, cfg: Any):
        """Read the folder; one that does not say how text becomes symbols is refused."""
        folder = Path(cfg.tokenizer_folder)
        manifest = manifest_of(folder)
        settings = (read_json(manifest, Manifest) if manifest else {}).get("settings", {})
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
        """Return True if a symbol begins a word; only the text of a tokenizer tells."""
        if not isinstance(self.source, TokenizerText):
            raise UserError("--mask-whole-words needs a tokenizer in --tokenizer-folder")
        return self.source.tokenizer.begins_word(x)


# from_pretrained of generating models: raw text, and memory, without further arguments

GPT2 = "gpt2"  # what fairseq's RobertaModel.from_pretrained takes for any checkpoint, from a server
Fairseq = hub_utils.GeneratorHubInterface


def from_pretrained(
    original, model_name_or_path, checkpoint_file="model.pt", data_name_or_path=".", archive_map=None, **kwargs
):
    """Find the text/ beside a checkpoint, in place of the data; `quantization` is for models of ours."""
    folder = Path(str(model_name_or_path))
    first = folder / str(checkpoint_file).split(os.pathsep)[0]
    place = folder / data_name_or_path if data_name_or_path[:1] == "." else Path(data_name_or_path)
    if data_name_or_path == "." and text_folders(folder):
        data_name_or_path = str(SavedModel.read(first, mapped=True).find_text(None).absolute())
    elif first.is_file() and data_name_or_path not in (archive_map or {}) and "://" not in str(place):
        if not place.is_dir():
            raise UserError(f"{place} is no folder of data: name the one of {first}'s training, or leave it out")
        SavedModel.read(first, mapped=True).check_text(place)
    if kwargs.get("bpe") == GPT2 and (place := tokenizer_folder(folder / data_name_or_path)):
        kwargs |= {"bpe": "relpos", "tokenizer_folder": str(place.absolute())}
    where = (model_name_or_path, checkpoint_file, data_name_or_path)
    quantization = kwargs.pop("quantization", None)
    found = original(*where, archive_map, **kwargs)
    if quantization is not None:
        if not all(map(is_ours, found["models"])):
            raise UserError(f"quantization={quantization!r} is for models of relpos_fairseq")
        for model in found["models"]:
            quantize(model.eval(), quantization)
    if kwargs.get("bpe") == GPT2 and all(map(is_ours, found["models"])):
        logger.warning("no tokenizer beside the data or the checkpoint: this interface reads ids, not text")
        found["args"].bpe = None
    return found


def search(original, self, sample, prefix_tokens=None, constraints=None, bos_token=None):
    """Tell decoders the longest sequence that the search may write, for rotations scaled by length.

    Beam search of one model of ours on a CPU is the kernel's.
    """
    with generation_of(_longest(self, sample)):
        if beam_search.serves(self, sample, prefix_tokens, constraints, bos_token):
            return beam_search.search(self, sample, bos_token)
        return training.generate(original, self, sample, prefix_tokens, constraints, bos_token)


def generate(original, cfg, *more):
    """Search without attention, which fairseq-generate and -interactive do not read; a task of the user's may."""
    name = cfg.task if isinstance(cfg, Namespace) else cfg.task._name
    step = getattr(TASK_REGISTRY.get(name), "inference_step", None)
    is_read = step is not None and step.__module__.split(".")[0] not in ("fairseq", "relpos_fairseq")
    with contextlib.nullcontext() if is_read else beam_search.attention_unread():
        return original(cfg, *more)


def align(original, self, models, sample, **kwargs):
    """Tell decoders the longest sequence that a search writes, and then reads once more for its alignments."""
    with generation_of(_longest(self, sample)):
        return original(self, models, sample, **kwargs)


def _longest(generator: SequenceGenerator, sample: dict[str, Any]) -> int | None:
    """Return the tokens of the longest sequence that a search may write, with the </s> that begins it."""
    most = beam_search.longest(generator, sample["net_input"])
    return None if most is None else most + 1


def _language_token(task: Any) -> int | None:
    """Return the token by which a task of several languages begins its target's text, or None."""
    manager, options = getattr(task, "data_manager", None), options_of(task)
    kind = manager and (getattr(options, "langtoks", None) or {}).get("main", (None, None))[1]
    return manager.get_decoder_langtok(options.target_lang, kind) if kind and options.target_lang else None


class TextHub(Fairseq):
    """fairseq's hub interface, with plain text for models of this package.

    `encode` and `decode` follow the data's manifest, unless a tokenizer or BPE is given; `generate` takes the memory
    of a text that was read before.
    """

    def __init__(self, cfg: Any, task: Any, models: Any) -> None:
        super().__init__(cfg, task, models)
        self.source = self.target = None
        ours = all(map(is_ours, models))
        paths = utils.split_paths(getattr(cfg.task, "data", None) or "")
        if ours and paths and self.bpe is None and self.tokenizer is None:
            languages = (getattr(cfg.task, f"{side}_lang", None) for side in ("source", "target"))
            self.source, self.target = (read_text(Path(paths[0]), name) for name in languages)

    def encode(self, sentence: str) -> Tensor:
        """Return the ids (T,) of a text and </s>."""
        if self.source is None:
            return super().encode(sentence)
        symbols = self.source.encode(sentence)
        return torch.tensor([*map(self.src_dict.index, symbols), self.src_dict.eos()])

    def _build_batches(self, tokens: Any, skip_invalid_size_inputs: bool) -> Any:
        """Return the batches of sentences, without torch's warning of pinned memory, which fairseq always asks for."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=PINNED)
            return super()._build_batches(tokens, skip_invalid_size_inputs)

    def sample(self, sentences: str | list[str], beam: int = 1, verbose: bool = False, **kwargs: Any) -> Any:
        """Return the text that is generated for each sentence, or for the one; `translate` does so with a beam of 5.

        Args:
            sentences: texts; one without symbols has the translation "", as in `relpos translate`, and so has one that
                `skip_invalid_size_inputs` leaves out.
            beam: width of the search.
            verbose: whether fairseq's log has the hypotheses.
            kwargs: options of generation, such as `lenpen`.
        """
        if isinstance(sentences, str):
            return self.sample([sentences], beam, verbose, **kwargs)[0]
        encoded = [self.encode(sentence) for sentence in sentences]
        given = [n for n, ids in enumerate(encoded) if len(ids) > 1 or not hasattr(self.models[0], "encoder")]
        if kwargs.get("skip_invalid_size_inputs"):
            limit = self.max_positions[0] if isinstance(self.max_positions, tuple) else self.max_positions
            given = [n for n in given if len(encoded[n]) <= limit]
        texts = [""] * len(encoded)
        with beam_search.attention_unread():
            hypotheses = self.generate([encoded[n] for n in given], beam, verbose, **kwargs)
        for n, found in zip(given, hypotheses, strict=True):
            texts[n] = self.decode(found[0]["tokens"])
        return texts

    def score(
        self, sentences: Any, replace_newline_with_eos: bool = False, *, targets: Any = None, **kwargs: Any
    ) -> Any:
        """Return tokens and log-probabilities of texts: of a translation model those of `targets`, given the sentences.

        Args:
            sentences: texts, or one.
            replace_newline_with_eos: fairseq's, of a language model.
            targets: as many translations, which a translation model alone takes.
            kwargs: fairseq's, of a language model.

        Returns:
            For each sentence {"tokens", "score" (their mean, in nats), "positional_scores" (T,), ...}, as fairseq's.

        Raises:
            ValueError: targets are missing, of another number, or given to a language model.
        """
        translates = hasattr(self.models[0], "encoder")
        if translates is (targets is None):
            needs = "needs targets" if translates else "takes no targets"
            raise ValueError(f"score of a {'translation' if translates else 'language'} model {needs}")
        if not translates:
            return super().score(sentences, replace_newline_with_eos, **kwargs)
        if isinstance(sentences, str):
            return self.score([sentences], targets=[targets])[0]
        if len(sentences) != len(targets) or isinstance(targets, str):
            raise ValueError(f"{len(sentences)} sentences need as many targets, got {len(targets)}")
        generation = copy.deepcopy(self.cfg.generation)
        with open_dict(generation):
            generation.score_reference = True
        generator = self.task.build_generator(self.models, generation)
        found = []
        for sentence, target in zip(sentences, targets, strict=True):
            source = self.encode(sentence)
            words = (
                self.target.encode(target) if self.target is not None else self.apply_bpe(self.tokenize(target)).split()
            )
            dataset = self.task.build_dataset_for_inference([source], [len(source)])
            dataset.tgt = [torch.tensor([*map(self.tgt_dict.index, words), self.tgt_dict.eos()])]
            dataset.tgt_sizes = np.array([len(dataset.tgt[0])])
            dataset.left_pad_source = options_of(self.task).left_pad_source
            sample = utils.apply_to_sample(lambda tensor: tensor.to(self.device), dataset.collater([dataset[0]]))
            found.append(self.task.inference_step(generator, self.models, sample)[0][0])
        return found

    def decode(self, tokens: Tensor) -> str:
        """Return the text of ids (T,), without the </s> at their end."""
        if self.target is None:
            return super().decode(tokens)
        never = {self.tgt_dict.pad(), self.tgt_dict.bos(), _language_token(self.task)}
        ids = [number for number in tokens.tolist() if number not in never]
        ids = ids[: -1 if ids[-1:] == [self.tgt_dict.eos()] else None]
        return self.target.decode([self.tgt_dict[number] for number in ids])

    @torch.no_grad()
    def read(self, text: str, memory: Memory | None = None) -> Memory:
        """Return the memory of a model with memory after a text.

        Args:
            text: of any length; what is generated with the memory begins on a new line.
            memory: of the text before it.

        Raises:
            ValueError: the model has no memory.
        """
        decoder = self._decoder()
        tokens = self.encode(text.removesuffix("\n")).roll(1).to(self.device)  # </s> begins a line
        for part in tokens[None].split(max(1, self.cfg.task.tokens_per_sample), dim=1):
            memory = decoder.extract_features(part, None, memory=memory)[1]["memory"]
        return memory

    def generate(self, tokenized_sentences, beam: int = 5, *args, memory=None, **kwargs):
        """Generate from sentences as fairseq's interface does, optionally after a memory.

        Args:
            tokenized_sentences: ids (T,) of each sentence, as `encode` returns them.
            beam: width of the search.
            args: fairseq's.
            memory: of the text before the sentences: one row for all, or a row each.
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
        """Return the decoder; a model without memory and several models are refused."""
        if len(self.models) > 1 or not hasattr(self.models[0], "mem_len"):
            raise ValueError("memory needs one model of --arch relpos_transformer_xl")
        return self.models[0].decoder


@contextlib.contextmanager
def remembering(decoder: Any, memory: Memory) -> Iterator[None]:
    """Pass `memory` to a decoder's forward passes in the `with` block, unless the caller passes another."""
    decoder.forward = functools.partial(decoder.forward, memory=memory)
    try:
        yield
    finally:
        del decoder.forward


# What training saves: text/ beside the checkpoints, a model card, and hashes of the text in each checkpoint


def state_dict(original, self):
    """Keep hashes of the text in a checkpoint of our models."""
    state = with_whole_model(self, original(self))
    if is_ours(self.get_model()):
        state[provenance.KEY] = _record(self)
    return state


def save_checkpoint(original, cfg, trainer, epoch_itr, val_loss):
    """Write text/ and the card wherever a model of ours is saved."""
    ours = is_ours(trainer.get_model())
    if ours:
        name_languages(trainer.cfg.task, trainer.task)
    saved = checkpoints.save_checkpoint(original, cfg, trainer, epoch_itr, val_loss)
    if ours and saved:
        folder = Path(saved).parent
        best = getattr(checkpoint_utils.save_checkpoint, "best", None)
        try:
            text = write_assets(folder, trainer.cfg.task)
            facts = facts_of(trainer, epoch_itr.epoch, val_loss, best)
            command = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
            write_card(folder, facts, command, text / "manifest.json")
        except (OSError, UserError) as error:  # the checkpoint is saved, so training goes on
            logger.warning("%s or its card was not written beside %s: %s", TEXT_FOLDER, saved, error)
    return saved


def facts_of(trainer: Any, epoch: int, score: float | None, best: float | None) -> dict:
    """Return what a trainer knows of its model, under the names of the model card."""
    model, cfg = trainer.get_model(), trainer.cfg
    facts = {"architecture": cfg.model._name}
    for name, module in model.named_modules():
        if isinstance(module, Placement):
            facts[f"{name.rpartition('.')[0]}: position scheme"] = module.plan.describe()
    facts["parameters"] = sum(one.numel() for one in model.parameters())
    task = getattr(cfg.task, "_name", None) or getattr(cfg.task, "task", None)
    facts |= {"task": task, "criterion": cfg.criterion._name}
    facts |= {"epoch": epoch, "updates": trainer.get_num_updates(), "seed": cfg.common.seed}
    measure = f"{cfg.dataset.valid_subset} {cfg.checkpoint.best_checkpoint_metric}"
    if score is not None:
        facts |= {f"{measure}, checkpoint_last.pt": score, f"{measure}, checkpoint_best.pt": best}
    return facts


def name_languages(cfg: Any, task: Any) -> None:
    """Write the languages that fairseq inferred from the data's file names into a task's config."""
    for side in ("source_lang", "target_lang"):
        if getattr(cfg, side, "") is None and (found := getattr(options_of(task), side, None)) is not None:
            setattr(cfg, side, found)


def text_places(task: Any) -> tuple[Path, Path | None] | None:
    """Return the data folder and the tokenizer's folder of a task's config; None of a task without data."""
    paths = utils.split_paths(getattr(task, "data", None) or "")
    tokenizer = getattr(task, "tokenizer_folder", "")
    return (Path(paths[0]), Path(tokenizer) if tokenizer else None) if paths else None


def write_assets(folder: Path, task: Any) -> Path:
    """Copy the text files of a task's config beside the checkpoints of a folder, and return their folder."""
    places = text_places(task)
    return copy_assets(places[0], folder, places[1]) if places else folder / TEXT_FOLDER


def compare_text(state: dict[str, Any], task: Any, path: str, begins_anew: bool) -> None:
    """Compare a checkpoint's hashes with a trainer's task; a training that takes parameters alone is warned."""
    try:
        provenance.check_task(state, task, path)
    except UserError as error:
        if not begins_anew:
            raise
        logger.warning("%s; a training that begins with its parameters goes on", error)


def _record(trainer: Trainer) -> dict[str, dict[str, str]]:
    """Return the hashes of a trainer's dictionaries and subwords, computed once."""
    if (known := getattr(trainer, "_text_record", None)) is None:
        try:
            places = text_places(trainer.cfg.task)
            known = provenance.record(trainer.task, asset_files(*places) if places else {})
        except (OSError, UserError) as error:
            logger.warning("checkpoints keep no hashes of the data's units: %s", error)
            known = provenance.record(trainer.task, {})
        trainer._text_record = known
    return known
