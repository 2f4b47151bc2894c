"""Segment numbers of sentence pairs, for models that read them in fairseq's `sentence_prediction`.

A model with --segment-encoding input or head asks its task for them; for every other model the
task is untouched.

The datasets know how long each part is, so nothing is guessed from separators: fairseq's
sentence_prediction joins `[<s>] first </s>` and `[separator] second </s>`, and the first is segment
0, the second, its separator included, segment 1.  `--shorten-method` cuts both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from fairseq.data import (
    BaseWrapperDataset,
    ConcatSentencesDataset,
    FairseqDataset,
    NestedDictionaryDataset,
    RightPadDataset,
)
from fairseq.data.shorten_dataset import maybe_shorten_dataset
from torch import Tensor


def segments_of_parts(lengths: Sequence[int]) -> Tensor:
    """Return the segment numbers (sum of lengths,) of joined parts: part p, special tokens included, is segment p."""
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.as_tensor(list(lengths)))


class PartSegments(FairseqDataset):
    """Segment numbers of the samples of joined datasets."""

    def __init__(self, parts: Sequence[FairseqDataset]) -> None:
        """Keep the lengths of the datasets whose samples are joined, in their order."""
        super().__init__()
        self.lengths = np.stack([np.asarray(part.sizes) for part in parts], axis=1)

    def __getitem__(self, index: int) -> Tensor:
        """Return the segment numbers (T,) of a sample."""
        return segments_of_parts(self.lengths[index].tolist())

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sizes(self) -> np.ndarray:
        return self.lengths.sum(axis=1)

    def num_tokens(self, index: int) -> int:
        return int(self.sizes[index])

    def size(self, index: int) -> int:
        return int(self.sizes[index])


def request_segments(task: Any) -> None:
    """Tell a task that its model reads segments."""
    task.wants_segments = True


def load_dataset(original, self, split, combine=False, **kwargs):
    """Supply segments to a model that called `request_segments`."""
    original(self, split, combine=combine, **kwargs)
    if getattr(self, "wants_segments", False):
        add_segments(self, split)
    return self.datasets[split]


def add_segments(task: Any, split: str) -> None:
    """Put `segments` into a loaded sentence_prediction split, beside `src_tokens`.

    Args:
        task: fairseq's sentence_prediction task, or one derived from it.
        split: name of the split.

    Raises:
        ValueError: the split is not built as fairseq's task builds it.
    """
    nested = task.datasets[split]
    while not isinstance(nested, NestedDictionaryDataset) and hasattr(nested, "dataset"):
        nested = nested.dataset
    padded = getattr(nested, "defn", {}).get("net_input.src_tokens")
    if not isinstance(padded, RightPadDataset):
        raise ValueError(
            f"--segment-encoding needs src_tokens padded on the right in split {split}, and "
            f"{type(task).__name__} has none: use --segment-encoding none"
        )
    parts = _parts(padded)
    segments = maybe_shorten_dataset(
        PartSegments(parts),
        split,
        task.cfg.shorten_data_split_list,
        task.cfg.shorten_method,
        task.max_positions(),
        task.cfg.seed,
    )
    if not np.array_equal(np.asarray(segments.sizes), np.asarray(padded.dataset.sizes)):
        raise ValueError(
            f"split {split}: the parts of a pair are not as long as its tokens; "
            f"{type(task).__name__} joins them in a way that --segment-encoding does not know"
        )
    nested.defn["net_input.segments"] = RightPadDataset(segments, pad_idx=0)


def _parts(dataset: FairseqDataset) -> Sequence[FairseqDataset]:
    """Return the datasets of which a split's tokens are joined: two parts of a pair, or one."""
    whole = inner = dataset.dataset
    while isinstance(inner, BaseWrapperDataset):
        inner = inner.dataset
    if isinstance(inner, ConcatSentencesDataset):
        return inner.datasets
    return [whole.dataset if hasattr(whole, "truncation_length") else whole]  # unshortened
