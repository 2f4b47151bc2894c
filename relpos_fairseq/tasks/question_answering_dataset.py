"""fairseq data sets of questions: a window is a sample in training, a question in evaluation.

All windows of a question stand in one batch of evaluation, so that its answer is known at once and
every metric is a sum over questions, whatever the batches and however many processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fairseq.data import FairseqDataset, data_utils

from relpos_fairseq.data.question_answering.encoding import EncodedFile
from relpos_fairseq.data.question_answering.reading import Question
from relpos_fairseq.data.question_answering.windows import NULL, Context, Window, targets
from relpos_fairseq.metrics.question_answering import normalise


@dataclass(frozen=True)
class Asked:
    """What a question's prediction needs beside the logits.

    Attributes:
        question: the question.
        text: its context's characters.
        context: its tokenised context.
        spans: its windows, W of them, rows `row` to `row + W` of the batch.
        row: the first of them.
        offset: position of a window's first context piece.
        index: the question's number in its data set.
        total: how many questions the data set has.
        unanswerable: whether "no answer" may be predicted.
        normalised: normalisation of answers.
    """

    question: Question
    text: str
    context: Context
    spans: tuple[Window, ...]
    row: int
    offset: int
    index: int
    total: int
    unanswerable: bool
    normalised: Callable[[str], str]


class QuestionDataset(FairseqDataset):
    """Samples of a tokenised file.

    Args:
        encoded: the file.
        dictionary: fairseq's.
        training: samples are windows in random order; else questions with all their windows.
        unanswerable: whether "no answer" may be predicted.
        normalised: normalisation of answers, of `metrics.question_answering`.
    """

    def __init__(
        self,
        encoded: EncodedFile,
        dictionary: Any,
        training: bool,
        unanswerable: bool,
        normalised: Callable[[str], str] = normalise,
    ) -> None:
        self.encoded = encoded
        self.dictionary = dictionary
        self.training = training
        self.unanswerable = unanswerable
        self.normalised = normalised
        shape = encoded.shape
        count = [len(spans) for spans in encoded.spans]
        around = [shape.offset(asked) + 1 for asked in encoded.asked]
        longest = [max(one.length for one in spans) for spans in encoded.spans]
        if training:
            self.items = [(n, w) for n, spans in enumerate(encoded.spans) for w in range(len(spans))]
            self.sizes = np.array([around[n] + encoded.spans[n][w].length for n, w in self.items], dtype=np.int64)
            self.costs = self.sizes
        else:
            self.items = [(n, -1) for n in range(len(count))]
            self.sizes = np.array(around, dtype=np.int64) + np.array(longest, dtype=np.int64)
            self.costs = self.sizes * np.array(count, dtype=np.int64)

    def __len__(self) -> int:
        """Windows in training, else questions."""
        return len(self.items)

    def size(self, index: int) -> int:
        """Tokens of the longest window."""
        return int(self.sizes[index])

    def num_tokens(self, index: int) -> int:
        """Tokens of all windows, with padding."""
        return int(self.costs[index])

    def num_tokens_vec(self, indices: np.ndarray) -> np.ndarray:
        return self.costs[indices]

    def batch_by_size(
        self,
        indices: np.ndarray,
        max_tokens: int | None = None,
        max_sentences: int | None = None,
        required_batch_size_multiple: int = 1,
    ) -> list[np.ndarray]:
        """As fairseq's, but a question whose windows exceed `max_tokens` is a batch of its own.

        fairseq asserts that no sample does, and a question's windows cannot be parted here.
        """
        if self.training or not max_tokens:
            return super().batch_by_size(indices, max_tokens, max_sentences, required_batch_size_multiple)
        costs = np.minimum(self.costs, max_tokens)
        return data_utils.batch_by_size(
            indices,
            num_tokens_fn=lambda index: int(costs[index]),
            num_tokens_vec=costs[indices],
            max_tokens=max_tokens,
            max_sentences=max_sentences,
            required_batch_size_multiple=required_batch_size_multiple,
        )

    def ordered_indices(self) -> np.ndarray:
        """At random in training (fairseq seeds numpy), else by length."""
        if self.training:
            return np.random.permutation(len(self))
        return np.argsort(self.costs, kind="stable")

    @property
    def supports_prefetch(self) -> bool:
        return False

    def __getitem__(self, index: int) -> dict[str, Any]:
        """A sample's windows as rows of (tokens, start, end)."""
        number, window = self.items[index]
        encoded = self.encoded
        spans = encoded.spans[number]
        offset = encoded.shape.offset(encoded.asked[number])
        wanted = targets(spans, encoded.answer(number), offset)
        chosen = range(len(spans)) if window < 0 else [window]
        rows = [(self._tokens(number, spans[n]), *wanted[n]) for n in chosen]
        return {"id": index, "rows": rows, "offset": offset, "number": number}

    def _tokens(self, number: int, span: Window) -> torch.Tensor:
        bos, eos = self.dictionary.bos(), self.dictionary.eos()
        question = self.encoded.questions[number]
        part = self.encoded.contexts[question.context].ids[span.start : span.end]
        between = [eos] * self.encoded.shape.separators
        pieces = [[bos], self.encoded.asked[number], between, part, [eos]]
        return torch.from_numpy(np.concatenate(pieces).astype(np.int64))

    def collater(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch of B windows with T tokens at most.

        Returns:
            `net_input`: src_tokens (B, T), src_lengths (B,), segments (B, T): 0 up to
            the question's `</s>`, 1 from there on; `allowed` (B, T): where an answer may begin
            or end, and `<s>`; `start`, `end` (B,): targets; `asked`: the questions, in evaluation.
        """
        if not samples:
            return {}
        rows = [row for sample in samples for row in sample["rows"]]
        offsets = [sample["offset"] for sample in samples for _ in sample["rows"]]
        tokens = data_utils.collate_tokens([row[0] for row in rows], self.dictionary.pad(), left_pad=False)
        lengths = torch.tensor([len(row[0]) for row in rows])
        first = torch.tensor(offsets)[:, None]
        column = torch.arange(tokens.size(1))[None, :]
        in_context = (column >= first) & (column < lengths[:, None] - 1)
        question_end = first - self.encoded.shape.separators
        batch = {
            "id": torch.tensor([sample["id"] for sample in samples]),
            "net_input": {
                "src_tokens": tokens,
                "src_lengths": lengths,
                "segments": ((column > question_end) & (column < lengths[:, None])).long(),
            },
            "allowed": in_context | (column == NULL),
            "start": torch.tensor([row[1] for row in rows]),
            "end": torch.tensor([row[2] for row in rows]),
            "nsentences": len(rows),
            "ntokens": int(lengths.sum()),
        }
        if not self.training:
            batch["asked"] = self._asked(samples)
        return batch

    def _asked(self, samples: list[dict[str, Any]]) -> list[Asked]:
        asked, row = [], 0
        for sample in samples:
            number = sample["number"]
            question = self.encoded.questions[number]
            asked.append(
                Asked(
                    question=question,
                    text=self.encoded.source.contexts[question.context],
                    context=self.encoded.contexts[question.context],
                    spans=self.encoded.spans[number],
                    row=row,
                    offset=sample["offset"],
                    index=number,
                    total=len(self.encoded.questions),
                    unanswerable=self.unanswerable,
                    normalised=self.normalised,
                )
            )
            row += len(sample["rows"])
        return asked
