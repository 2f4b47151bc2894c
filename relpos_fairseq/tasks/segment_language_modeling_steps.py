"""What the task is made of: its dictionary, a batch with its memory, numbers, and a resume."""

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from fairseq import utils
from fairseq.data import Dictionary
from fairseq.logging import metrics

from relpos_fairseq.data.streams import text_level
from relpos_fairseq.data.streams.carried import StreamMemory
from relpos_fairseq.data.streams.dataset import StreamBlocks
from relpos_fairseq.modules.memory import MemoryCarrier

logger = logging.getLogger(__name__)
UNITS = {"char": "bpc", "byte": "bpb"}


def read_dictionary(data: str, level: str) -> tuple[Dictionary, str]:
    """The dictionary that all data folders have, and what a token is.

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
    level = text_level.text_level(folders[0], dictionary, level)
    logger.info("dictionary: %d types, text level %s", len(dictionary), level)
    return dictionary, level


class WithMemory:
    """Samples in order, each with the carrier that the one before filled."""

    def __init__(self, samples: Any, model: Any) -> None:
        """Wrap an iterator over the blocks of a split, for a model that is there already."""
        self.samples, self.model = samples, model

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[dict]:
        """Blocks, with an empty memory before the first."""
        reading = StreamMemory()
        device = next(self.model.parameters()).device  # samples are moved there afterwards
        for sample in self.samples:
            with reading.block(sample["step"], sample["step"], device) as carrier:
                yield with_carrier(sample, self.model, carrier)


def with_carrier(sample: dict, model: Any, carrier: MemoryCarrier) -> dict:
    """The sample with memory in its input, where the model carries any."""
    net_input = dict(sample["net_input"])
    if hasattr(model, "mem_len"):
        net_input["memory"] = carrier
    return {**sample, "net_input": net_input}


def memory_flags(cfg: Any, task: Any, model: Any) -> dict[str, int | bool | str]:
    """What a training memory depends on beside the cut of its stream: flags, every `auto` resolved.

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
    """Refuse to go on with a memory that was filled under other flags.

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
    """Every rank's memories on rank 0; on the others there is only their own."""
    gathered: list = [None] * world_size
    if world_size > 1:
        torch.distributed.gather_object(own, gathered if rank == 0 else None, dst=0, group=group)
    gathered[rank] = own
    return gathered


def own_part(ranks: list[dict]) -> dict:
    """This rank's part of what `gather` gave.

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
    """Rows of a process, from --batch-size or --max-tokens.

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
    """Say how a split is cut."""
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
    """Count predictions, and log their likelihood in the unit of the text's level.

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
