"""Contiguous streams: how a long text is cut into rows and blocks without losing a token.

A split is one stream of N tokens.  Token t > 0 is predicted from what stands before it, so there
are N - 1 predictions; they are dealt to R rows as evenly as possible (the first rows have one
more), each row a contiguous piece.  A row is read in blocks of T tokens: the block at p has inputs
[p, p + T) and targets [p + 1, p + T + 1).  A row's first input is the token that the row before
predicted last: a seam between rows costs context, never a prediction.  Nothing is trimmed; rows
that have ended are padding.  (fairseq's truncated_bptt trims the remainder, and so counts
other tokens at every batch size.)

With W processes of B rows each, process r reads rows rB .. rB + B - 1 of one cut into R = B W rows:
W processes with B rows see what one process with B W rows sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class StreamPlan:
    """Which tokens of a stream each row and each block reads."""

    tokens: int  # tokens of the stream, N
    rows: int  # rows of all processes together, R
    block: int  # tokens a row and step, T

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
        """Targets of the whole stream: every token but the first."""
        return self.tokens - 1

    @property
    def seams(self) -> int:
        """Places where a row begins inside the stream, without the context before it."""
        return min(self.rows, self.predictions) - 1

    @property
    def steps(self) -> int:
        """Blocks a row, padding included."""
        return -(-self.row_length(0) // self.block)

    def row_start(self, row: int) -> int:
        """Position of a row's first input."""
        return row * (self.predictions // self.rows) + min(row, self.predictions % self.rows)

    def row_length(self, row: int) -> int:
        """Predictions of a row; 0 where there are more rows than predictions."""
        return self.predictions // self.rows + (row < self.predictions % self.rows)

    def width(self, step: int) -> int:
        """Tokens of the longest row at a step: T, but for the last."""
        return min(self.block, self.row_length(0) - step * self.block)

    def span(self, step: int, row: int) -> tuple[int, int]:
        """First input and end of a row's block; targets are one further."""
        start, length = self.row_start(row), self.row_length(row)
        first = min(step * self.block, length)
        return start + first, start + min(first + self.block, length)


@dataclass(frozen=True)
class Block:
    """One step of some rows."""

    inputs: Tensor  # (B, width) token ids, right-padded
    targets: Tensor  # (B, width), `pad` where nothing is predicted
    lengths: Tensor  # (B,) tokens a row
    starts: Tensor | None  # (B, width) bool, inputs that begin a document; None without documents


def read_block(
    tokens: np.ndarray, plan: StreamPlan, step: int, rows: range, pad: int, document_starts: np.ndarray | None = None
) -> Block:
    """The block of some rows at one step.

    `tokens` (N,) are the stream; `document_starts` sorted positions of documents' first tokens.
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
    """Document starts as int64 positions, which must increase within a stream.

    `source` is where they come from, for errors.
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
