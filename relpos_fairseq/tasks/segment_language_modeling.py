"""Task `segment_language_modeling`: contiguous streams, read block by block with memory.

The data is cut as data/streams/plan.py says; memory goes to the model in `net_input` as a carrier
(modules/memory.py), one for each split and each of training and validation, so that fairseq's own
criterions work and validation never touches the memory of training.  Models without memory
(`relpos_transformer_lm`) read the same blocks, each on its own.

A checkpoint holds every rank's memory and position: memory computed again from newer weights would
not be the same.
"""

import logging
from pathlib import Path
from typing import Any

from fairseq import utils
from fairseq.data import Dictionary
from fairseq.tasks import register_task
from fairseq.tasks.language_modeling import LanguageModelingTask

from relpos_fairseq.data.streams import dataset as streams
from relpos_fairseq.data.streams import text_level
from relpos_fairseq.data.streams.carried import StreamMemory
from relpos_fairseq.data.streams.iterator import StreamBatchIterator
from relpos_fairseq.tasks import segment_language_modeling_steps as steps
from relpos_fairseq.tasks.segment_language_modeling_config import SegmentLanguageModelingConfig

logger = logging.getLogger(__name__)


@register_task("segment_language_modeling", dataclass=SegmentLanguageModelingConfig)
class SegmentLanguageModelingTask(LanguageModelingTask):
    """Language modelling over contiguous streams with memory.

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
        dictionary, level = steps.read_dictionary(args.data or "", str(args.text_level))
        return cls(args, dictionary, level)

    def build_model(self, args: Any, from_checkpoint: bool = False) -> Any:
        """As fairseq's, and remember it.

        Raises:
            ValueError: document boundaries for a model without memory.
        """
        model = super().build_model(args, from_checkpoint)
        if self.args.reset_memory_at_document and not hasattr(model, "mem_len"):
            raise ValueError(
                f"--reset-memory-at-document needs a model with memory (--arch "
                f"relpos_transformer_xl), and {type(model).__name__} has none; leave it out"
            )
        self.memory_flags = steps.memory_flags(args, self.args, model)
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
            text_level.refuse_unknown_characters(tokens, self.dictionary, str(path))
        starts = None
        if self.args.reset_memory_at_document:
            boundaries = str(self.args.document_boundaries)
            starts = streams.find_documents(path, tokens, boundaries, self.dictionary.eos(), combine)
            logger.info("%s: %s documents", split, f"{len(starts):,}")
        words = text_level.word_ends(self.dictionary) if self.level == "subword" else None
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
        """Blocks of a split in order; any other dataset (for generation) is fairseq's own affair.

        Raises:
            ValueError: no batch size, blocks longer than the model takes, or dropped batches.
        """
        if not isinstance(dataset, streams.StreamDataset):
            return super().get_batch_iterator(dataset, max_tokens, max_sentences, max_positions, **options)
        if options.get("skip_remainder_batch"):
            raise ValueError("--skip-remainder-batch would leave the end of every row unread: leave it out")
        processes = options.get("num_shards", 1)
        length = self.args.tokens_per_sample
        rows = steps.rows_of(max_tokens, max_sentences, length)
        longest = max_positions[0] if isinstance(max_positions, tuple) else max_positions
        if longest is not None and length > longest:
            raise ValueError(
                f"tokens_per_sample {length} is more than the {longest} positions that the model "
                f"takes: give a smaller --tokens-per-sample, or a relative scheme"
            )
        blocks = dataset.blocks(rows, processes)
        steps.log_plan(dataset.split, blocks)
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
        """What fairseq-eval-lm reads: one row unless --batch-size says more, with memory.

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
        return steps.WithMemory(iterator, self.newest_model)

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
        """fairseq's, with the split's training memory."""
        reading = self.memories.setdefault(("train", sample["split"]), StreamMemory())
        device = sample["target"].device
        with reading.block(sample["step"], update_num, device) as carrier:
            sample = steps.with_carrier(sample, model, carrier)
            loss, size, output = super().train_step(
                sample, model, criterion, optimizer, update_num, ignore_grad, **more
            )
        return loss, size, {**output, "nwords": sample["nwords"]}

    def valid_step(self, sample: dict, model: Any, criterion: Any, **more: Any) -> tuple:
        """fairseq's, with the split's validation memory."""
        reading = self.memories.setdefault(("valid", sample["split"]), StreamMemory())
        device = sample["target"].device
        with reading.block(sample["step"], sample["step"], device) as carrier:
            sample = steps.with_carrier(sample, model, carrier)
            loss, size, output = super().valid_step(sample, model, criterion, **more)
        return loss, size, {**output, "nwords": sample["nwords"]}

    def post_validate(self, *unused: Any) -> None:
        """Drop the memory of a split that is read: training has a use for the room."""
        self.memories = {key: kept for key, kept in self.memories.items() if key[0] != "valid"}

    def reduce_metrics(self, logging_outputs: list[dict], criterion: Any) -> None:
        """Log fairseq's numbers, predictions counted, and the loss in the level's own unit."""
        super().reduce_metrics(logging_outputs, criterion)
        steps.log_units(logging_outputs, self.level)

    def gather_checkpoint_state(self, group: Any, rank: int, world_size: int) -> None:
        """Collect every rank's training memory on rank 0; all ranks call it before a save."""
        own = {split: reading.state_dict() for (mode, split), reading in self.memories.items() if mode == "train"}
        self._gathered = steps.gather(own, group, rank, world_size)

    def get_checkpoint_dict(self) -> dict:
        """What fairseq puts into a checkpoint: {class: every rank's memories}."""
        return {type(self).__name__: {"ranks": self._gathered or [], "flags": self.memory_flags}}

    def set_checkpoint_dict(self, state: dict) -> None:
        """Continue with this rank's memory.

        Raises:
            ValueError: the checkpoint is of another number of processes, or remembers otherwise.
        """
        steps.check_memory_flags(state.get("flags"), self.memory_flags)
        for split, saved in steps.own_part(state["ranks"]).items():
            self.memories["train", split] = StreamMemory.from_state_dict(saved)
        logger.info("restored the memory of %d process(es)", len(state["ranks"]))
