r"""A question and a long context as overlapping windows, and answers as positions in them.

Devlin et al. 2018's treatment of SQuAD: `<s> question </s> </s> part of the context </s>` (one
`</s>` between them for BERT's vocabularies), windows that begin every `stride` pieces, and for each
piece the window in which it has the most context around it.  What differs: an answer that fits into
no window is not given up, its first piece is a target in one window and its last in another, and
`prediction` can put such a span together again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IGNORED = -1  # a target that the loss leaves out
NULL = 0  # position of <s>, the target of "no answer here"


@dataclass(frozen=True)
class Context:
    """A tokenised context."""

    ids: np.ndarray  # (L,) numbers of its pieces in the dictionary
    begins: np.ndarray  # (L,) first character of every piece
    ends: np.ndarray  # (L,) the character after its last

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        """First and last piece of a range of characters; None where no piece covers any of it."""
        inside = np.flatnonzero((self.ends > start) & (self.begins < end) & (self.begins < self.ends))
        return (int(inside[0]), int(inside[-1])) if len(inside) else None


@dataclass(frozen=True)
class Window:
    """A part of a context."""

    start: int  # its first piece
    length: int  # how many pieces

    @property
    def end(self) -> int:
        return self.start + self.length

    def holds(self, piece: int) -> bool:
        return self.start <= piece < self.end

    def surroundings(self, first: int, last: int) -> float:
        """How much context a span of pieces has here: the smaller side's, as BERT's script."""
        return min(first - self.start, self.end - 1 - last) + 0.01 * self.length


def windows(length: int, room: int, stride: int) -> tuple[Window, ...]:
    """Windows over `length` pieces, `room` pieces at most, a new one every `stride` pieces.

    Every piece is in some window, also where `stride` is larger than `room`; an empty context has
    one empty window.
    """
    found = []
    start = 0
    while True:
        size = min(length - start, room)
        found.append(Window(start, size))
        if start + size >= length:
            return tuple(found)
        start += min(size, stride)


def best_window(spans: Sequence[Window], first: int, last: int) -> int | None:
    """The window in which a span of pieces has the most context; None if no window holds it."""
    holding = [n for n, one in enumerate(spans) if one.holds(first) and one.holds(last)]
    return max(holding, key=lambda n: (spans[n].surroundings(first, last), -n), default=None)


def targets(spans: Sequence[Window], answer: tuple[int, int] | None, offset: int):
    """What each window has to predict.

    Args:
        spans: a context's windows.
        answer: the answer's first and last piece; None for an unanswerable question.
        offset: position of a window's first context piece in its sample.

    Returns:
        A (start, end) pair of positions for every window: the answer's; `NULL` twice where the
        window does not hold it all; and where no window does, `IGNORED` beside the half that the
        window holds.
    """
    if answer is None:
        return [(NULL, NULL)] * len(spans)
    first, last = answer
    whole = any(one.holds(first) and one.holds(last) for one in spans)
    found = []
    for one in spans:
        start = first - one.start + offset if one.holds(first) else NULL
        end = last - one.start + offset if one.holds(last) else NULL
        if whole and NULL in (start, end):
            start = end = NULL
        elif start == NULL and end != NULL:
            start = IGNORED
        elif end == NULL and start != NULL:
            end = IGNORED
        found.append((start, end))
    return found
