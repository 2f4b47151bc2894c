"""fairseq's datasets over streams: a split as it lies on disk, and its blocks as batches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from fairseq.data import ConcatDataset, Dictionary, FairseqDataset, data_utils
from fairseq.data.indexed_dataset import MMapIndexedDataset, data_file_path, index_file_path
from torch import Tensor

from relpos_fairseq.data.streams.plan import StreamPlan, check_document_starts, read_block


class StreamDataset(FairseqDataset):
    """A split as one stream of tokens, none of them copied; `blocks` cuts it into batches.

    Args:
        split: its name (`train`).
        tokens: (N,) ids.
        pad: id of padding.
        tokens_per_sample: T.
        document_starts: positions of tokens that begin a document, or None: one document.
        word_ends: (vocabulary,) bool, ids that complete a word; None where words are not counted.
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
        """The cut into rows; that a split is too short for it is said of the split."""
        try:
            return StreamPlan(len(self.tokens), rows, self.tokens_per_sample)
        except ValueError as error:
            raise ValueError(f"{self.split}: {error}") from None

    def blocks(self, batch_size: int, processes: int = 1) -> StreamBlocks:
        """Batches of a number of rows for each of a number of processes."""
        return StreamBlocks(self, self.plan(batch_size * processes), processes)

    def __len__(self) -> int:
        """Tokens of the split."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        """A single token; training reads `blocks`."""
        return torch.tensor(int(self.tokens[index]))


class StreamBlocks(FairseqDataset):
    """Batches of a stream in order: item step * processes + rank is what that rank reads."""

    def __init__(self, stream: StreamDataset, plan: StreamPlan, processes: int) -> None:
        super().__init__()
        self.stream, self.plan, self.processes = stream, plan, processes
        self.batch_size = plan.rows // processes

    def __len__(self) -> int:
        """Batches of all processes together."""
        return self.plan.steps * self.processes

    def __getitem__(self, index: int) -> dict:
        """One batch, as fairseq's criterions take it.

        Returns:
            `net_input` {src_tokens (B, T), src_lengths (B,), document_starts (B, T) where the split
            has documents}, `target` (B, T), `ntokens` predictions, `nwords` words completed by
            them, and where it stands: `split`, `step`.
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
        """A sample is a batch already."""
        if len(samples) != 1:
            raise ValueError(f"a block is one batch; got {len(samples)} together")
        return samples[0]


def read_stream(path: Path, dictionary: Dictionary, impl: str | None, combine: bool) -> np.ndarray:
    """All tokens of a binarised split, in the order of its lines; there must be some.

    fairseq's mmap format stores them in one piece, which is viewed, not copied.

    Args:
        path: its path without suffix (`data-bin/train`).
        dictionary: of the data.
        impl: fairseq's dataset implementation, or None to find out.
        combine: whether `train1`, `train2` .. follow `train`.
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
    if isinstance(dataset, MMapIndexedDataset):  # which unmaps its file when it goes: map our own
        dtype = MMapIndexedDataset.Index(index_file_path(path)).dtype
        return np.memmap(data_file_path(path), dtype=dtype, mode="r")
    return np.concatenate([dataset[line].numpy() for line in range(len(dataset))])


def find_documents(path: Path, tokens: np.ndarray, boundaries: str, eos: int, combine: bool = False) -> np.ndarray:
    """Positions of tokens that begin a document.

    Args:
        path: the split's path without suffix.
        tokens: its tokens.
        boundaries: `sidecar`: `SPLIT.documents.npy` beside it; `eos`: every line is a document.
        eos: id of the end of a line.
        combine: whether `train1`, `train2` .. were read after `train`.

    Raises:
        ValueError: the sidecar is missing, belongs to other data or to a part of it only.
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
    starts = np.load(sidecar, allow_pickle=False)
    return check_document_starts(starts, len(tokens), str(sidecar))
