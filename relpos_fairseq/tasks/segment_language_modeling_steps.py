"""What the task does with one batch: memory in, numbers out."""

import logging
import math
from collections.abc import Iterator
from typing import Any

from fairseq import utils
from fairseq.logging import metrics

from relpos_fairseq.data.streams_dataset import StreamBlocks
from relpos_fairseq.data.streams_memory import StreamMemory
from relpos_fairseq.modules.memory import MemoryCarrier

logger = logging.getLogger(__name__)
UNITS = {"char": "bpc", "byte": "bpb"}


class WithMemory:
    """Samples in order, each with the carrier that the one before filled."""

    def __init__(self, samples: Any, model: Any) -> None:
        """Wrap an iterator over the blocks of a split, for a model that is there already."""
        self.samples, self.model = samples, model

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self.samples)

    def __iter__(self) -> Iterator[dict]:
        """Blocks, with an empty memory before the first."""
        reading = StreamMemory()
        device = next(self.model.parameters()).device  # samples are moved there afterwards
        for sample in self.samples:
            with reading.block(sample["step"], sample["step"], device) as carrier:
                yield with_carrier(sample, self.model, carrier)


def with_carrier(sample: dict, model: Any, carrier: MemoryCarrier) -> dict:
    """The sample with memory in its input, where the model carries any.

    Raises:
        ValueError: document boundaries for a model without memory.
    """
    net_input = dict(sample["net_input"])
    if hasattr(model, "mem_len"):
        net_input["memory"] = carrier
    elif "document_starts" in net_input:
        raise ValueError(
            "--reset-memory-at-document needs a model with memory (--arch relpos_transformer_xl); "
            "leave it out"
        )
    return {**sample, "net_input": net_input}


def memory_flags(model: Any, task: Any) -> dict[str, int | bool]:
    """What a training memory depends on beside the cut of its stream: flags, as they were given.

    Args:
        model: the model's config.
        task: the task's config.
    """
    found = {name: getattr(model, name, None) for name in ("mem_len", "same_length")}
    found["reset_memory_at_document"] = bool(task.reset_memory_at_document)
    return {name: value for name, value in found.items() if value is not None}


def check_memory_flags(saved: dict | None, here: dict) -> None:
    """Refuse to go on with a memory that was filled under other flags.

    Args:
        saved: of the checkpoint; None where it is older than this check.
        here: of this run.

    Raises:
        ValueError: names the flags and both values.
    """
    differ = [
        f"--{name.replace('_', '-')} ({saved.get(name)}, now {here.get(name)})"
        for name in here | (saved or {})
        if saved is not None and saved.get(name) != here.get(name)
    ]
    if differ:
        raise ValueError(
            f"cannot resume: the checkpoint's memory was filled with another {', '.join(differ)}. "
            f"Give the saved values, or --reset-dataloader to start at the beginning of the stream"
        )


def rows_of(max_tokens: int | None, max_sentences: int | None, length: int) -> int:
    """Rows of a process, from --batch-size or --max-tokens.

    Raises:
        ValueError: neither, or less than one block.
    """
    limits = [] if max_sentences is None else [max_sentences]
    if max_tokens is not None:
        if max_tokens < length:
            raise ValueError(
                f"--max-tokens {max_tokens} is less than one block of {length} tokens: raise it, "
                f"or give --batch-size"
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
            "%s: only %d of %d rows have anything to read: give a smaller batch",
            split,
            plan.predictions,
            plan.rows,
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
        metrics.log_scalar(
            UNITS[level], bits / total["ntokens"], total["ntokens"], priority=30, round=4
        )
    if level == "subword" and total["nwords"]:
        metrics.log_scalar(
            "word_loss", bits / total["nwords"], total["nwords"], priority=30, round=3
        )
        metrics.log_derived("word_ppl", _word_perplexity, priority=31)


def _word_perplexity(meters: Any) -> float:
    return utils.get_perplexity(meters["word_loss"].avg)
