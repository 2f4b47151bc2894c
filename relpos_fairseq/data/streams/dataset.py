"""Divide a long text into contiguous rows and blocks, and read them in order.

A split is one stream of N tokens.  Token t > 0 is predicted from the tokens before it, so there are N - 1 predictions.
They are divided among R rows as evenly as possible (the first rows have one more), each row a contiguous part.  A row
is read in blocks of T tokens: the block at p has inputs [p, p + T) and targets [p + 1, p + T + 1).  A row's first input
is the last target of the row before, so that a row that begins inside the stream (a seam) loses context, but no
prediction.  Nothing is trimmed; rows that have ended are padded.  (fairseq's truncated_bptt trims the remainder, and so
counts other tokens at every batch size.)

With W processes of B rows each, the stream is divided into R = B W rows, and process r reads rows rB .. rB + B - 1.
W processes with B rows thus see what one process with B W rows sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from fairseq.data import ConcatDataset, Dictionary, FairseqDataset, data_utils
from fairseq.data.indexed_dataset import MMapIndexedDataset
from fairseq.data.iterators import EpochBatchIterator
from torch import Tensor

from relpos_fairseq.io.indexed import read_indexed
from relpos_fairseq.io.reading import reading


@dataclass(frozen=True)
class StreamPlan:
    """Divide a stream of N tokens into R rows and blocks of T tokens: which positions a row reads at a step."""

    tokens: int  # tokens of the stream, N
    rows: int  # rows of all processes together, R
    block: int  # tokens of a block in one row, T

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"tokens_per_sample must be >= 1, got {self.block}")
        if self.rows < 1:
            raise ValueError(f"batch size must be >= 1, got {self.rows} rows")
        if self.tokens < 2:
            raise ValueError(
                f"a stream needs two tokens or more, one to be predicted from the other; it has "
                f"{self.tokens}: give more text"
            )
        if self.block > self.predictions:
            raise ValueError(
                f"tokens_per_sample {self.block} is longer than the data, which has "
                f"{self.predictions} tokens to predict: give a smaller --tokens-per-sample"
            )

    @property
    def predictions(self) -> int:
        """The number of targets of the whole stream: every token but the first."""
        return self.tokens - 1

    @property
    def seams(self) -> int:
        """The number of rows that begin inside the stream, and so without the context before them."""
        return min(self.rows, self.predictions) - 1

    @property
    def steps(self) -> int:
        """The number of blocks in the longest row: the steps of an epoch."""
        return -(-self.row_length(0) // self.block)

    def row_start(self, row: int) -> int:
        """Return the position in the stream of a row's first input."""
        return row * (self.predictions // self.rows) + min(row, self.predictions % self.rows)

    def row_length(self, row: int) -> int:
        """Return the number of predictions in a row; 0 in the last rows if there are more rows than predictions."""
        return self.predictions // self.rows + (row < self.predictions % self.rows)

    def width(self, step: int) -> int:
        """Return the number of tokens of the longest row at a step: T, or fewer at the last step."""
        return min(self.block, self.row_length(0) - step * self.block)

    def span(self, step: int, row: int) -> tuple[int, int]:
        """Return positions in the stream, [start, end), of a row's inputs at a step; targets are one position later."""
        start, length = self.row_start(row), self.row_length(row)
        first = min(step * self.block, length)
        return start + first, start + min(first + self.block, length)


@dataclass(frozen=True)
class Block:
    """Inputs and targets of B rows at one step."""

    inputs: Tensor  # (B, width) token ids, right-padded
    targets: Tensor  # (B, width), `pad` where nothing is predicted
    lengths: Tensor  # (B,) tokens in each row, without padding
    starts: Tensor | None  # (B, width) bool, True where an input begins a document; None without documents


def read_block(
    tokens: np.ndarray, plan: StreamPlan, step: int, rows: range, pad: int, document_starts: np.ndarray | None = None
) -> Block:
    """Read the inputs and targets of some rows at one step from a stream.

    `tokens` (N,) are the stream; `document_starts` are the sorted positions of the documents' first tokens.
    """
    shape = (len(rows), plan.width(step))
    inputs, targets = np.full(shape, pad, np.int64), np.full(shape, pad, np.int64)
    starts = None if document_starts is None else np.zeros(shape, bool)
    lengths = np.zeros(len(rows), np.int64)
    for number, row in enumerate(rows):
        first, end = plan.span(step, row)
        lengths[number] = end - first
        inputs[number, : end - first] = tokens[first:end]
        targets[number, : end - first] = tokens[first + 1 : end + 1]
        if starts is not None:
            low, high = np.searchsorted(document_starts, (first, end))
            starts[number, document_starts[low:high] - first] = True
    return Block(
        torch.from_numpy(inputs),
        torch.from_numpy(targets),
        torch.from_numpy(lengths),
        None if starts is None else torch.from_numpy(starts),
    )


def check_document_starts(starts: np.ndarray, tokens: int, source: str) -> np.ndarray:
    """Check that document starts increase within 0..`tokens` - 1; return them as int64.

    Raises:
        ValueError: they do not; the message begins with `source`.
    """
    if starts.ndim != 1 or not np.issubdtype(starts.dtype, np.integer):
        raise ValueError(f"{source}: not a list of positions ({starts.dtype}, {starts.shape})")
    starts = starts.astype(np.int64)
    if len(starts) and (starts[0] < 0 or starts[-1] >= tokens or (np.diff(starts) <= 0).any()):
        raise ValueError(
            f"{source}: positions must increase within 0..{tokens - 1}; they run from {starts[0]} "
            f"to {starts[-1]}: it belongs to other data, prepare it again"
        )
    return starts


# fairseq's datasets: a split, and its blocks as batches


class StreamDataset(FairseqDataset):
    """A split as one stream of tokens; `blocks` divides it into batches.  The tokens are not copied.

    Args:
        split: name of the split (`train`).
        tokens: (N,) ids.
        pad: id of padding.
        tokens_per_sample: length T of a block.
        document_starts: positions of tokens that begin a document; None: one document.
        word_ends: (V,) bool, True for ids that complete a word; None if words are not counted.
    """

    def __init__(
        self,
        split: str,
        tokens: np.ndarray,
        pad: int,
        tokens_per_sample: int,
        document_starts: np.ndarray | None = None,
        word_ends: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.split, self.tokens, self.pad = split, tokens, pad
        self.tokens_per_sample = tokens_per_sample
        self.document_starts, self.word_ends = document_starts, word_ends

    def plan(self, rows: int) -> StreamPlan:
        """Return the division of the split into `rows` rows.

        Raises:
            ValueError: the split is too short; the message names it.
        """
        try:
            return StreamPlan(len(self.tokens), rows, self.tokens_per_sample)
        except ValueError as error:
            raise ValueError(f"{self.split}: {error}") from None

    def blocks(self, batch_size: int, processes: int = 1) -> StreamBlocks:
        """Return the batches of the split, with `batch_size` rows in each of `processes` processes."""
        return StreamBlocks(self, self.plan(batch_size * processes), processes)

    def __len__(self) -> int:
        """Return the number of tokens of the split."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        """Return a single token; training reads the batches of `blocks` instead."""
        return torch.tensor(int(self.tokens[index]))


class StreamBlocks(FairseqDataset):
    """Batches of a stream in order: item `step * processes + rank` is the batch of that rank at that step."""

    def __init__(self, stream: StreamDataset, plan: StreamPlan, processes: int) -> None:
        super().__init__()
        self.stream, self.plan, self.processes = stream, plan, processes
        self.batch_size = plan.rows // processes

    def __len__(self) -> int:
        """Return the number of batches of all processes together."""
        return self.plan.steps * self.processes

    def __getitem__(self, index: int) -> dict:
        """Return one batch, as fairseq's criterions take it.

        Returns:
            `net_input` {src_tokens (B, T), src_lengths (B,), document_starts (B, T) if the split has documents},
            `target` (B, T), `ntokens` predictions, `nwords` words that they complete, `split` and `step`.
        """
        step, rank = divmod(int(index), self.processes)
        rows = range(rank * self.batch_size, (rank + 1) * self.batch_size)
        stream = self.stream
        block = read_block(stream.tokens, self.plan, step, rows, stream.pad, stream.document_starts)
        net_input = {"src_tokens": block.inputs, "src_lengths": block.lengths}
        if block.starts is not None:
            net_input["document_starts"] = block.starts
        real = block.targets.ne(stream.pad)
        words = 0
        if stream.word_ends is not None:
            words = int((stream.word_ends[block.targets] & real).sum())
        return {
            "id": torch.tensor(rows),
            "nsentences": len(rows),
            "ntokens": int(real.sum()),
            "nwords": words,
            "net_input": net_input,
            "target": block.targets,
            "split": stream.split,
            "step": step,
        }

    def collater(self, samples: Sequence[dict]) -> dict:
        """Return the only sample of the list: an item of this dataset is a batch already."""
        if len(samples) != 1:
            raise ValueError(f"a block is one batch; got {len(samples)} together")
        return samples[0]


def read_stream(path: Path, dictionary: Dictionary, impl: str | None, combine: bool) -> np.ndarray:
    """Return all tokens of a binarised split in the order of its lines, (N,).

    fairseq's mmap format stores the tokens in one array, which is memory-mapped, not copied.

    Args:
        path: the split's path without suffix (`data-bin/train`).
        dictionary: of the data.
        impl: fairseq's dataset implementation; None: detect it.
        combine: append `train1`, `train2` .. to `train`.

    Raises:
        ValueError: the split is missing, or has fewer than two tokens.
    """
    data = path.with_name(path.name + ".bin")
    if data.exists() and data.stat().st_size == 0:
        raise ValueError(f"{path} is empty: binarise a text that has lines")
    dataset = data_utils.load_indexed_dataset(str(path), dictionary, impl, combine=combine)
    if dataset is None:
        raise ValueError(f"no split {path} (.bin and .idx): check the data folder")
    parts = dataset.datasets if isinstance(dataset, ConcatDataset) else [dataset]
    names = [f"{path}{number or ''}" for number in range(len(parts))]
    arrays = [_tokens_of(part, name) for part, name in zip(parts, names, strict=True)]
    tokens = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    if len(tokens) < 2:
        raise ValueError(f"{path} has {len(tokens)} tokens: nothing can be predicted")
    return tokens


def _tokens_of(dataset: FairseqDataset, path: str) -> np.ndarray:
    if isinstance(dataset, MMapIndexedDataset):  # it unmaps its file when deleted, so map the file again
        return read_indexed(path).ids
    return np.concatenate([dataset[line].numpy() for line in range(len(dataset))])


def find_documents(path: Path, tokens: np.ndarray, boundaries: str, eos: int, combine: bool = False) -> np.ndarray:
    """Return the positions of tokens that begin a document.

    Args:
        path: the split's path without suffix.
        tokens: the split's tokens.
        boundaries: "sidecar": read them from `SPLIT.documents.npy` beside the split; "eos": every line is a document.
        eos: id of the end of a line.
        combine: whether `train1`, `train2` .. were appended to `train`.

    Raises:
        ValueError: the sidecar is missing, or belongs to other data or to a part of them.
    """
    if boundaries == "eos":
        starts = np.flatnonzero(tokens[:-1] == eos) + 1
        return np.concatenate([np.zeros(1, np.int64), starts.astype(np.int64)])
    sidecar = path.with_name(path.name + ".documents.npy")
    if not sidecar.exists():
        raise ValueError(
            f"--reset-memory-at-document needs {sidecar} (relpos prepare lm writes it), or "
            f"--document-boundaries eos where every line is a document"
        )
    second = path.with_name(f"{path.name}1.bin")
    if combine and second.exists():
        raise ValueError(
            f"{sidecar} knows nothing of {second}, which is read as well: remove that, make it a "
            f"data folder of its own (dir1:dir2), or give --document-boundaries eos"
        )
    with reading(sidecar, "the starts of documents of this text", "prepare the text again"):
        return check_document_starts(np.load(sidecar, allow_pickle=False), len(tokens), str(sidecar))


# fairseq's epoch iterator


class StreamBatchIterator(EpochBatchIterator):
    """Iterate over the batches of a stream in order, without shuffling or dropping any.

    The saved state records how the stream was divided into rows and blocks: memory fits only the row that it is from.

    Args:
        blocks: the batches of all processes.
        rank: the process whose batches are iterated over.
        options: fairseq's (seed, num_workers, epoch, buffer_size).
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
        """Return the position, and the division of the stream to which the position refers."""
        return {**super().state_dict(), "streams": self._cut()}

    def load_state_dict(self, state_dict: dict) -> None:
        """Continue at a saved position.

        Raises:
            ValueError: the saved stream was divided into other rows or blocks, or nothing is known of it.
        """
        saved, here = state_dict.get("streams"), self._cut()
        if saved is None:
            raise ValueError(
                "the checkpoint was not written by segment_language_modeling, and has no position in a stream: give "
                "--reset-dataloader (or --finetune-from-model) to start at its beginning"
            )
        if state_dict.get("iterations_in_epoch", 0) == 0:
            here["tokens of the stream"] = saved.get("tokens of the stream")  # the next shard has its own number
        if saved != here:
            differ = [f"{name} ({saved.get(name)}, now {here[name]})" for name in here if saved.get(name) != here[name]]
            raise ValueError(
                f"cannot resume: the checkpoint's stream was cut with another {', '.join(differ)}; "
                f"its memory and position fit the saved rows only. Give the saved values, or "
                f"--reset-dataloader to start at the beginning of the stream"
            )
        super().load_state_dict(state_dict)
