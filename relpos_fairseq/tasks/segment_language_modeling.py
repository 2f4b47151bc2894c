"""Task `segment_language_modeling`: contiguous streams, read block by block with memory.

The data is cut as data/streams/dataset.py says.  Memory goes to the model in `net_input` as a carrier
(modules/memory.py), one for each split and each of training and validation, so that fairseq's own
criterions work and validation never touches the memory of training.  Models without memory
(`relpos_transformer_lm`) read the same blocks, each by itself.

A checkpoint holds every rank's memory and position: memory recomputed from newer weights would differ.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

import torch
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.logging import metrics
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask
from omegaconf import II

from relpos_fairseq.core.config import help_text as _help
from relpos_fairseq.data.streams import dataset as streams
from relpos_fairseq.data.streams.dataset import StreamBatchIterator, StreamBlocks
from relpos_fairseq.modules.memory import MemoryCarrier, StreamMemory
from relpos_fairseq.text import levels

logger = logging.getLogger(__name__)
BOUNDARIES = ("sidecar", "eos")


@dataclass
class SegmentLanguageModelingConfig(FairseqDataclass):
    """Flags of the task."""

    data: Optional[str] = _help(  # noqa: UP045  (fairseq reads the annotation)
        None, "data folder, or several joined by : (one a training epoch)"
    )
    tokens_per_sample: int = _help(128, "tokens a row and block (the paper's segment length)")
    text_level: ChoiceEnum(list(levels.LEVELS)) = _help(
        "auto",
        "what a token is: word, subword (perplexity per word is logged too), char or "
        "byte (bits per character or byte are logged); auto: manifest.json's, else by the "
        "dictionary",
    )
    reset_memory_at_document: bool = _help(False, "what stands before a document's start is invisible after it")
    document_boundaries: ChoiceEnum(list(BOUNDARIES)) = _help(
        "sidecar", "where documents start: SPLIT.documents.npy, or after every end of line"
    )
    add_bos_token: bool = _help(False, "refused: a stream has no sentence starts")
    max_target_positions: Optional[int] = _help(  # noqa: UP045
        None, "longest input of a model with a table of positions"
    )
    dataset_impl: Any = II("dataset.dataset_impl")


UNITS = {"char": "bpc", "byte": "bpb"}


def read_dictionary(data: str, level: str) -> tuple[Dictionary, str]:
    """Return the dictionary that all data folders share, and the level of its tokens.

    Args:
        data: folders joined by colons.
        level: --text-level.

    Raises:
        ValueError: no folder, one without dictionary, or several dictionaries.
    """
    folders = [Path(path) for path in utils.split_paths(data)]
    if not folders:
        raise ValueError("segment_language_modeling needs a data folder; none was given")
    texts = {}
    for folder in folders:
        if not (folder / "dict.txt").exists():
            raise ValueError(f"{folder} has no dict.txt: give a folder of binarised text")
        texts[folder] = (folder / "dict.txt").read_bytes()
    other = [folder for folder in folders if texts[folder] != texts[folders[0]]]
    if other:
        raise ValueError(f"{other[0]} has another dict.txt than {folders[0]}: binarise all shards with one")
    dictionary = Dictionary.load(str(folders[0] / "dict.txt"))
    level = levels.text_level(folders[0], dictionary, level)
    logger.info("dictionary: %d types, text level %s", len(dictionary), level)
    return dictionary, level


class WithMemory:
    """Samples in order, each with the carrier that the sample before it filled."""

    def __init__(self, samples: Any, model: Any) -> None:
        """Wrap an iterator over the blocks of a split, for a model."""
        self.samples, self.model = samples, model

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[dict]:
        """Yield the blocks, with an empty memory before the first."""
        reading = StreamMemory()
        device = next(self.model.parameters()).device  # samples are moved there afterwards
        for sample in self.samples:
            with reading.block(sample["step"], sample["step"], device) as carrier:
                yield with_carrier(sample, self.model, carrier)


def with_carrier(sample: dict, model: Any, carrier: MemoryCarrier) -> dict:
    """Return the sample with the carrier in its input, if the model has memory."""
    net_input = dict(sample["net_input"])
    if hasattr(model, "mem_len"):
        net_input["memory"] = carrier
    return {**sample, "net_input": net_input}


def memory_flags(cfg: Any, task: Any, model: Any) -> dict[str, int | bool | str]:
    """Return the resolved flags on which a training memory depends, beside the cut of its stream.

    A model without memory depends on nothing.
    """
    if not hasattr(model, "mem_len"):
        return {}
    members = model.decoder.positions.plan.members
    found = {
        "mem_len": cfg.mem_len,
        "same_length": bool(cfg.same_length),
        # Only a scheme that takes the option has it.
        "clamp_len": max(getattr(member.options, "clamp_len", 0) for member in members),
        "reset_memory_at_document": bool(task.reset_memory_at_document),
    }
    if task.reset_memory_at_document:
        found["document_boundaries"] = str(task.document_boundaries)
    return found


def check_memory_flags(saved: dict | None, here: dict) -> None:
    """Raise an error if the saved memory was filled under other flags.

    Args:
        saved: of the checkpoint; None, or without a flag, where it is older than the check of it.
        here: of this run.

    Raises:
        ValueError: names the flags and both values.
    """
    differ = [
        f"--{name.replace('_', '-')} ({saved[name]}, now {here[name]})"
        for name in here
        if saved is not None and name in saved and saved[name] != here[name]
    ]
    if differ:
        raise ValueError(
            f"cannot resume: the checkpoint's memory was filled with another {', '.join(differ)}. "
            f"Give the saved values, or --reset-dataloader to start at the beginning of the stream"
        )


def gather(own: dict, group: Any, rank: int, world_size: int) -> list[dict | None]:
    """Return every rank's memories on rank 0, and on any other rank its own alone."""
    gathered: list = [None] * world_size
    if world_size > 1:
        torch.distributed.gather_object(own, gathered if rank == 0 else None, dst=0, group=group)
    gathered[rank] = own
    return gathered


def own_part(ranks: list[dict]) -> dict:
    """Return this rank's part of the result of `gather`.

    Raises:
        ValueError: it was gathered from another number of processes.
    """
    here, rank = 1, 0
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        here, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    if len(ranks) != here:
        raise ValueError(
            f"cannot resume: the checkpoint holds the memory of {len(ranks)} processes, and "
            f"here are {here}: start as many, or give --reset-dataloader"
        )
    return ranks[rank]


def rows_of(max_tokens: int | None, max_sentences: int | None, length: int) -> int:
    """Return the number of rows of a process, from --batch-size or --max-tokens.

    Raises:
        ValueError: neither, or less than one block.
    """
    limits = [] if max_sentences is None else [max_sentences]
    if max_tokens is not None:
        if max_tokens < length:
            raise ValueError(
                f"--max-tokens {max_tokens} is less than one block of {length} tokens: raise it, or give --batch-size"
            )
        limits.append(max_tokens // length)
    if not limits:
        raise ValueError("segment_language_modeling needs --batch-size or --max-tokens")
    return min(limits)


def log_plan(split: str, blocks: StreamBlocks) -> None:
    """Log how a split is cut into rows and blocks."""
    plan = blocks.plan
    logger.info(
        "%s: %s tokens, %s predicted, in %d row(s) x %d process(es): %d seam(s), where context is "
        "lost and no prediction; %s blocks of %d",
        split,
        f"{plan.tokens:,}",
        f"{plan.predictions:,}",
        blocks.batch_size,
        blocks.processes,
        plan.seams,
        f"{plan.steps:,}",
        plan.block,
    )
    if plan.rows > plan.predictions:
        logger.warning(
            "%s: only %d of %d rows have anything to read: give a smaller batch", split, plan.predictions, plan.rows
        )


def log_units(logging_outputs: list[dict], level: str) -> None:
    """Log the number of predictions, and their likelihood in the unit of the text's level.

    A criterion that smooths labels reports the likelihood beside its loss, as `nll_loss`.
    """
    smoothed = any("nll_loss" in output for output in logging_outputs)
    likelihood = "nll_loss" if smoothed else "loss"
    total = {
        name: utils.item(sum(output.get(name, 0) for output in logging_outputs))
        for name in (likelihood, "ntokens", "nwords")
    }
    bits = total[likelihood] / math.log(2)
    metrics.log_scalar_sum("predicted", total["ntokens"], priority=170, round=0)
    if level in UNITS and total["ntokens"]:
        metrics.log_scalar(UNITS[level], bits / total["ntokens"], total["ntokens"], priority=30, round=4)
    if level == "subword" and total["nwords"]:
        metrics.log_scalar("word_loss", bits / total["nwords"], total["nwords"], priority=30, round=3)
        metrics.log_derived("word_ppl", _word_perplexity, priority=31)


def _word_perplexity(meters: Any) -> float:
    return utils.get_perplexity(meters["word_loss"].avg)


@register_task("segment_language_modeling", dataclass=SegmentLanguageModelingConfig)
class SegmentLanguageModelingTask(LanguageModelingTask):
    """The task of language modelling over contiguous streams with memory.

    Args:
        args: the config above.
        dictionary: of the data.
        level: what a token is.
    """

    carries_memory = True

    def __init__(self, args: Any, dictionary: Dictionary, level: str) -> None:
        """Start without data and without memory."""
        super().__init__(args, dictionary)
        self.level = level
        self.memories: dict[tuple[str, str], StreamMemory] = {}
        self.newest_model: Any = None  # fairseq-eval-lm's loader is not told whose it is
        self.memory_flags: dict = {}
        self._gathered: list[dict] | None = None

    @classmethod
    def setup_task(cls, args: Any, **kwargs: Any) -> "SegmentLanguageModelingTask":
        """Read the dictionary.

        Raises:
            ValueError: a flag out of range, or data folders of several dictionaries.
        """
        if args.tokens_per_sample < 1:
            raise ValueError(f"tokens_per_sample must be >= 1, got {args.tokens_per_sample}")
        if args.add_bos_token:
            raise ValueError(
                "--add-bos-token: a stream has no sentence starts; leave it out (or train with "
                "--task language_modeling)"
            )
        dictionary, level = read_dictionary(args.data or "", str(args.text_level))
        return cls(args, dictionary, level)

    def build_model(self, args: Any, from_checkpoint: bool = False) -> Any:
        """Build the model as fairseq does, and keep it.

        Raises:
            ValueError: document boundaries for a model without memory.
        """
        model = super().build_model(args, from_checkpoint)
        if self.args.reset_memory_at_document and not hasattr(model, "mem_len"):
            raise ValueError(
                f"--reset-memory-at-document needs a model with memory (--arch "
                f"relpos_transformer_xl), and {type(model).__name__} has none; leave it out"
            )
        self.memory_flags = memory_flags(args, self.args, model)
        self.newest_model = model
        return model

    def load_dataset(self, split: str, epoch: int = 1, combine: bool = False, **kwargs: Any) -> None:
        """Read a split: of several data folders that of the epoch.

        Raises:
            ValueError: there is none, it is empty, or its characters or documents do not fit.
        """
        paths = utils.split_paths(self.args.data)
        path = Path(paths[(epoch - 1) % len(paths)]) / split
        tokens = streams.read_stream(path, self.dictionary, self.args.dataset_impl, combine)
        if self.level in ("char", "byte"):
            levels.refuse_unknown_characters(tokens, self.dictionary, str(path))
        starts = None
        if self.args.reset_memory_at_document:
            boundaries = str(self.args.document_boundaries)
            starts = streams.find_documents(path, tokens, boundaries, self.dictionary.eos(), combine)
            logger.info("%s: %s documents", split, f"{len(starts):,}")
        words = levels.word_ends(self.dictionary) if self.level == "subword" else None
        self.datasets[split] = streams.StreamDataset(
            split, tokens, self.dictionary.pad(), self.args.tokens_per_sample, starts, words
        )

    def get_batch_iterator(
        self,
        dataset: Any,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        max_positions: int | None = None,
        **options: Any,
    ) -> Any:
        """Return the blocks of a split in order; any other dataset (for generation) is left to fairseq.

        Raises:
            ValueError: no batch size, blocks longer than the model takes, or dropped batches.
        """
        if not isinstance(dataset, streams.StreamDataset):
            return super().get_batch_iterator(dataset, max_tokens, max_sentences, max_positions, **options)
        if options.get("skip_remainder_batch"):
            raise ValueError("--skip-remainder-batch would leave the end of every row unread: leave it out")
        processes = options.get("num_shards", 1)
        length = self.args.tokens_per_sample
        rows = rows_of(max_tokens, max_sentences, length)
        longest = max_positions[0] if isinstance(max_positions, tuple) else max_positions
        if longest is not None and length > longest:
            raise ValueError(
                f"tokens_per_sample {length} is more than the {longest} positions that the model "
                f"takes: give a smaller --tokens-per-sample, or a relative scheme"
            )
        blocks = dataset.blocks(rows, processes)
        log_plan(dataset.split, blocks)
        kept = {"num_workers", "epoch", "seed"} & options.keys()
        return StreamBatchIterator(
            blocks,
            options.get("shard_id", 0),
            buffer_size=options.get("data_buffer_size", 0),
            **{name: options[name] for name in kept},
        )

    def eval_lm_dataloader(
        self,
        dataset: Any,
        max_tokens: int | None = None,
        batch_size: int | None = None,
        context_window: int = 0,
        max_positions: int | None = None,
        **options: Any,
    ) -> Any:
        """Return the samples of fairseq-eval-lm, with memory: one row, or as many as --batch-size says.

        Raises:
            ValueError: a context window, which memory replaces, or no model yet.
        """
        if self.newest_model is None:
            raise ValueError("build the model by this task before asking for what it is to read")
        if context_window > 0:
            raise ValueError(
                f"--context-window {context_window}: segment_language_modeling gives context by "
                f"memory; leave it out, and set eval_mem_len by --model-overrides"
            )
        iterator = self.get_batch_iterator(dataset, None, batch_size or 1, max_positions, **options).next_epoch_itr(
            shuffle=False
        )
        return WithMemory(iterator, self.newest_model)

    def train_step(
        self,
        sample: dict,
        model: Any,
        criterion: Any,
        optimizer: Any,
        update_num: int,
        ignore_grad: bool = False,
        **more: Any,
    ) -> tuple:
        """Take fairseq's training step with the split's training memory."""
        reading = self.memories.setdefault(("train", sample["split"]), StreamMemory())
        device = sample["target"].device
        with reading.block(sample["step"], update_num, device) as carrier:
            sample = with_carrier(sample, model, carrier)
            loss, size, output = super().train_step(
                sample, model, criterion, optimizer, update_num, ignore_grad, **more
            )
        return loss, size, {**output, "nwords": sample["nwords"]}

    def valid_step(self, sample: dict, model: Any, criterion: Any, **more: Any) -> tuple:
        """Take fairseq's validation step with the split's validation memory."""
        reading = self.memories.setdefault(("valid", sample["split"]), StreamMemory())
        device = sample["target"].device
        with reading.block(sample["step"], sample["step"], device) as carrier:
            sample = with_carrier(sample, model, carrier)
            loss, size, output = super().valid_step(sample, model, criterion, **more)
        return loss, size, {**output, "nwords": sample["nwords"]}

    def post_validate(self, *unused: Any) -> None:
        """Free the memory of validation."""
        self.memories = {key: kept for key, kept in self.memories.items() if key[0] != "valid"}

    def reduce_metrics(self, logging_outputs: list[dict], criterion: Any) -> None:
        """Log fairseq's numbers, predictions counted, and the loss in the level's own unit."""
        super().reduce_metrics(logging_outputs, criterion)
        log_units(logging_outputs, self.level)

    def gather_checkpoint_state(self, group: Any, rank: int, world_size: int) -> None:
        """Collect every rank's training memory on rank 0; all ranks call it before a save."""
        own = {split: reading.state_dict() for (mode, split), reading in self.memories.items() if mode == "train"}
        self._gathered = gather(own, group, rank, world_size)

    def get_checkpoint_dict(self) -> dict:
        """Return the task's state for a checkpoint: {class name: every rank's memories}."""
        return {type(self).__name__: {"ranks": self._gathered or [], "flags": self.memory_flags}}

    def set_checkpoint_dict(self, state: dict) -> None:
        """Restore this rank's memory from a checkpoint.

        Raises:
            ValueError: the checkpoint is of another number of processes, or remembers otherwise.
        """
        check_memory_flags(state.get("flags"), self.memory_flags)
        for split, saved in own_part(state["ranks"]).items():
            self.memories["train", split] = StreamMemory.from_state_dict(saved)
        logger.info("restored the memory of %d process(es)", len(state["ranks"]))
