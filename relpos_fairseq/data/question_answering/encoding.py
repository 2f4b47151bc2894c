"""Questions and contexts as numbers of a fairseq dictionary."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from relpos_fairseq.data.question_answering.reading import Question, QuestionFile
from relpos_fairseq.data.question_answering.windows import Context, Window, windows
from relpos_fairseq.data.tokenizers import Encoding, Tokenizer

logger = logging.getLogger(__name__)
LONG_QUESTION = ("fail", "truncate", "drop")
_AT_ONCE = 256


@dataclass(frozen=True)
class Shape:
    """How a question and a part of its context become one sample."""

    tokens_per_sample: int = 512  # a sample's tokens at most, special ones included
    doc_stride: int = 128  # pieces from one window's beginning to the next's
    max_query_length: int = 64  # a question's pieces at most
    separators: int = 2  # `</s>` between question and context: RoBERTa's two, or BERT's one
    # `fail`, `truncate`, or `drop` the question (from training; where questions are counted it is
    # truncated)
    on_long_question: str = "fail"

    def __post_init__(self) -> None:
        for name in ("tokens_per_sample", "doc_stride", "max_query_length"):
            if getattr(self, name) < 1:
                flag = name.replace("_", "-")
                raise ValueError(f"--{flag} must be 1 or more, got {getattr(self, name)}")
        if self.on_long_question not in LONG_QUESTION:
            raise ValueError(
                f"--on-long-question must be one of {', '.join(LONG_QUESTION)}, got {self.on_long_question!r}"
            )
        if self.separators not in (1, 2):
            raise ValueError(f"separators must be 1 or 2, got {self.separators}")

    def offset(self, question: np.ndarray) -> int:
        """Position of a window's first context piece: after `<s> question </s> </s>`."""
        return 1 + len(question) + self.separators

    def room(self, question: np.ndarray) -> int:
        """Context pieces that fit beside a question."""
        return self.tokens_per_sample - self.offset(question) - 1


@dataclass
class EncodedFile:
    """A file's questions, tokenised."""

    source: QuestionFile
    contexts: list[Context]
    questions: list[Question]
    asked: list[np.ndarray]  # for each of them its pieces' numbers
    spans: list[tuple[Window, ...]]  # for each of them its windows
    shape: Shape  # how samples are made

    def answer(self, index: int) -> tuple[int, int] | None:
        """First and last piece of a question's first gold answer; None where it has none."""
        question = self.questions[index]
        for answer in question.answers:
            text = answer.text
            start = answer.start + len(text) - len(text.lstrip())
            span = self.contexts[question.context].span(start, answer.start + len(text.rstrip()))
            if span is not None:
                return span
        return None


class QuestionEncoder:
    """Tokenises files of questions; a dictionary that lacks the tokenizer's pieces is refused.

    Args:
        tokenizer: the tokenizer.
        dictionary: fairseq's dictionary of the model.
        shape: how samples are made.
        name: the dictionary in the words of an error.
    """

    def __init__(self, tokenizer: Tokenizer, dictionary: Any, shape: Shape, name: str = "dict.txt"):
        tokenizer.check_dictionary(dictionary, name)
        self.tokenizer = tokenizer
        self.dictionary = dictionary
        self.shape = shape

    def encode(self, source: QuestionFile, training: bool) -> EncodedFile:
        """Tokenise a file.

        Args:
            source: the file.
            training: leave out questions whose answer is nowhere, which teach nothing, and those
                that `drop` drops; an evaluation has every question of its file.

        Raises:
            ValueError: a question that is too long, or leaves no room for context.
        """
        contexts = [self._context(one) for one in self._encodings(source.contexts, f"{source.path.name}")]
        encoded = EncodedFile(source, contexts, [], [], [], self.shape)
        texts = [question.text for question in source.questions]
        long, unplaced = [], 0
        for question, one in zip(source.questions, self._encodings(texts, "questions"), strict=True):
            pieces = self._numbers(one)
            if len(pieces) > self.shape.max_query_length:
                long.append(f"{question.id!r} ({len(pieces)} pieces)")
                if training and self.shape.on_long_question == "drop":
                    continue
                pieces = pieces[: self.shape.max_query_length]
            self._add(encoded, question, pieces)
            if training and question.answerable and encoded.answer(-1) is None:
                unplaced += 1
                for part in (encoded.questions, encoded.asked, encoded.spans):
                    part.pop()
        if long:
            self._report_long(source, long, training)
        if unplaced:
            logger.warning(
                "%s: %d questions left out of training: their answer stands nowhere in their context",
                source.path,
                unplaced,
            )
        if not encoded.questions:
            raise ValueError(f"{source.path}: no question is left")
        return encoded

    def _add(self, encoded: EncodedFile, question: Question, pieces: np.ndarray) -> None:
        room = self.shape.room(pieces)
        if room < 1:
            raise ValueError(
                f"{encoded.source.path}: id {question.id!r}: --tokens-per-sample "
                f"{self.shape.tokens_per_sample} leaves no room for context beside a question of "
                f"{len(pieces)} pieces: raise it, or lower --max-query-length"
            )
        encoded.questions.append(question)
        encoded.asked.append(pieces)
        length = len(encoded.contexts[question.context].ids)
        encoded.spans.append(windows(length, room, self.shape.doc_stride))

    def _report_long(self, source: QuestionFile, long: Sequence[str], training: bool) -> None:
        message = (
            f"{source.path}: {len(long)} questions longer than --max-query-length "
            f"{self.shape.max_query_length}: {', '.join(long[:5])}{', ...' if long[5:] else ''}"
        )
        if self.shape.on_long_question == "fail":
            raise ValueError(f"{message}; raise it, or choose --on-long-question truncate or drop")
        dropped = training and self.shape.on_long_question == "drop"
        logger.warning("%s; %s", message, "dropped" if dropped else "truncated")

    def _encodings(self, texts: Sequence[str], what: str) -> Iterator[Encoding]:
        shown = sys.stderr.isatty() and len(texts) > _AT_ONCE
        chunks: Iterable[int] = range(0, len(texts), _AT_ONCE)
        for first in tqdm(chunks, f"tokenise {what}", disable=not shown, leave=False):
            yield from self.tokenizer.encode_batch(texts[first : first + _AT_ONCE])

    def _numbers(self, encoding: Encoding) -> np.ndarray:
        return np.array([self.dictionary.index(p) for p in encoding.pieces], dtype=np.int32)

    def _context(self, encoding: Encoding) -> Context:
        offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
        return Context(self._numbers(encoding), offsets[:, 0].copy(), offsets[:, 1].copy())
