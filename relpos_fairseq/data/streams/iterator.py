"""fairseq's epoch iterator over blocks in order, which knows what it can be resumed with."""

from __future__ import annotations

from fairseq.data.iterators import EpochBatchIterator

from relpos_fairseq.data.streams.dataset import StreamBlocks


class StreamBatchIterator(EpochBatchIterator):
    """Blocks of a stream in their order: never shuffled, dropped or dealt out of turn.

    Its saved state holds how the stream was cut: the memory of a row is of use to that row only.
    `rank` says which process's batches to give; options are fairseq's (seed, num_workers, epoch,
    buffer_size).
    """

    def __init__(self, blocks: StreamBlocks, rank: int, **options) -> None:
        super().__init__(
            blocks,
            collate_fn=blocks.collater,
            batch_sampler=[[number] for number in range(len(blocks))],
            num_shards=blocks.processes,
            shard_id=rank,
            disable_shuffling=True,
            **options,
        )

    def _cut(self) -> dict[str, int]:
        return {
            "batch size": self.dataset.batch_size,
            "processes": self.dataset.processes,
            "tokens per sample": self.dataset.plan.block,
            "tokens of the stream": self.dataset.plan.tokens,
        }

    def state_dict(self) -> dict:
        """Position, and the cut that it refers to."""
        return {**super().state_dict(), "streams": self._cut()}

    def load_state_dict(self, state_dict: dict) -> None:
        """Continue at a saved position of a stream that is cut in the same way."""
        saved, here = state_dict.get("streams"), self._cut()
        if saved is None:
            raise ValueError(
                "the checkpoint was not written by segment_language_modeling, and has no position "
                "in a stream: give --reset-dataloader (or --finetune-from-model) to start at its "
                "beginning"
            )
        if state_dict.get("iterations_in_epoch", 0) == 0:
            here["tokens of the stream"] = saved.get("tokens of the stream")  # the next shard's
        if saved != here:
            differ = [f"{name} ({saved.get(name)}, now {here[name]})" for name in here if saved.get(name) != here[name]]
            raise ValueError(
                f"cannot resume: the checkpoint's stream was cut with another {', '.join(differ)}; "
                f"its memory and position fit the saved rows only. Give the saved values, or "
                f"--reset-dataloader to start at the beginning of the stream"
            )
        super().load_state_dict(state_dict)
