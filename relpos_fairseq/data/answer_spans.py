"""Cut questions and long contexts into overlapping windows of ids, and predict answers as spans of a context.

The windows are those of Devlin et al. 2018 for SQuAD: `<s> question </s> </s> part of the context </s>` (one `</s>`
between them for BERT's vocabularies), a window every `stride` tokens, and for each token the window in which it has the
most context around it.  One thing differs: an answer that fits into no window is kept, its first token is a target in
one window and its last in another, and prediction can join such a span again.

The prediction's rules are those of BERT's run_squad.py (sections 4.2 and 4.3 of the paper).  The best `n_best` starts
and ends of every window are paired; spans that end before they start or are longer than `max_answer_length` tokens are
left out; a span's score is the sum of both logits; "no answer" scores as `<s>` in the window where that is least.  A
span that several windows hold is scored where it has the most context (BERT's script asks that of its first token
alone); one that no window holds whole takes either logit from the window where that token has the most context.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relpos_fairseq.data.squad import Question, QuestionFile
from relpos_fairseq.io.progress import progress
from relpos_fairseq.text import Encoding, Tokenizer

IGNORED = -1  # a target that the loss leaves out
NULL = 0  # position of <s>, the target of "no answer here"


@dataclass(frozen=True)
class Context:
    """A tokenized context of L tokens."""

    ids: np.ndarray  # (L,) in the dictionary
    begins: np.ndarray  # (L,) first character of every token
    ends: np.ndarray  # (L,) the character after its last one

    def span(self, start: int, end: int) -> tuple[int, int] | None:
        """Return the first and last token of a range of characters; None if no token covers any of it."""
        inside = np.flatnonzero((self.ends > start) & (self.begins < end) & (self.begins < self.ends))
        return (int(inside[0]), int(inside[-1])) if len(inside) else None


@dataclass(frozen=True)
class Window:
    """A part of a context, in tokens."""

    start: int  # the first token
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length

    def holds(self, token: int) -> bool:
        return self.start <= token < self.end

    def surroundings(self, first: int, last: int) -> float:
        """Return how much context a span of tokens has here: that of its smaller side, as in BERT's script."""
        return min(first - self.start, self.end - 1 - last) + 0.01 * self.length


def windows(length: int, room: int, stride: int) -> tuple[Window, ...]:
    """Return windows of at most `room` tokens over `length` tokens, one every `stride` tokens.

    Every token is in a window, even if `stride` is larger than `room`; an empty context has one empty window.
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
    """Return the number of the window in which a span of tokens has the most context; None if no window holds it."""
    holding = [n for n, one in enumerate(spans) if one.holds(first) and one.holds(last)]
    return max(holding, key=lambda n: (spans[n].surroundings(first, last), -n), default=None)


def targets(spans: Sequence[Window], answer: tuple[int, int] | None, offset: int):
    """Return what each window has to predict.

    Args:
        spans: a context's windows.
        answer: the answer's first and last token; None for an unanswerable question.
        offset: position of a window's first context token in its sample.

    Returns:
        A (start, end) pair of positions for every window: the answer's; `NULL` twice if the window does not hold the
        whole answer but another one does; if none does, `IGNORED` beside the end that the window holds.
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


# Samples: tokenized questions with the windows of their contexts

logger = logging.getLogger(__name__)
LONG_QUESTION = ("fail", "truncate", "drop")
_AT_ONCE = 256


@dataclass(frozen=True)
class Shape:
    """How a question and a part of its context become one sample."""

    tokens_per_sample: int = 512  # tokens of a sample at most, special ones included
    doc_stride: int = 128  # tokens from the start of a window to that of the next
    max_query_length: int = 64  # tokens of a question at most
    separators: int = 2  # `</s>` between question and context: RoBERTa's two, or BERT's one
    # "fail", "truncate" or "drop" the question; evaluation counts every question, and truncates instead of dropping
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
        """Return the position of a window's first context token: after `<s> question </s> </s>`."""
        return 1 + len(question) + self.separators

    def room(self, question: np.ndarray) -> int:
        """Return how many context tokens fit beside a question."""
        return self.tokens_per_sample - self.offset(question) - 1


@dataclass
class EncodedFile:
    """The tokenized questions of a file."""

    source: QuestionFile
    contexts: list[Context]
    questions: list[Question]
    asked: list[np.ndarray]  # the ids of each question
    spans: list[tuple[Window, ...]]  # the windows of each question
    shape: Shape  # how samples are made

    def answer(self, index: int) -> tuple[int, int] | None:
        """Return the first and last token of a question's first gold answer; None if it has none."""
        question = self.questions[index]
        for answer in question.answers:
            text = answer.text
            start = answer.start + len(text) - len(text.lstrip())
            span = self.contexts[question.context].span(start, answer.start + len(text.rstrip()))
            if span is not None:
                return span
        return None


class QuestionEncoder:
    """Tokenizes files of questions; a dictionary that lacks the tokenizer's symbols is refused.

    Args:
        tokenizer: the tokenizer.
        dictionary: fairseq's dictionary of the model.
        shape: how samples are made.
        name: what errors call the dictionary.
    """

    def __init__(self, tokenizer: Tokenizer, dictionary: Any, shape: Shape, name: str = "dict.txt"):
        tokenizer.check_dictionary(dictionary, name)
        self.tokenizer = tokenizer
        self.dictionary = dictionary
        self.shape = shape

    def encode(self, source: QuestionFile, training: bool) -> EncodedFile:
        """Tokenize a file.

        Args:
            source: the file.
            training: leave out questions whose answer is in no context, which teach nothing, and those that "drop"
                drops; an evaluation has every question of its file.

        Raises:
            ValueError: a question is too long, or leaves no room for context.
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
        for first in progress(range(0, len(texts), _AT_ONCE), description=f"tokenise {what}", unit="chunks"):
            yield from self.tokenizer.encode_batch(texts[first : first + _AT_ONCE])

    def _numbers(self, encoding: Encoding) -> np.ndarray:
        return np.array([self.dictionary.index(p) for p in encoding.pieces], dtype=np.int32)

    def _context(self, encoding: Encoding) -> Context:
        offsets = np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2)
        return Context(self._numbers(encoding), offsets[:, 0].copy(), offsets[:, 1].copy())


# Answers from logits


@dataclass(frozen=True)
class PredictionOptions:
    """How spans are chosen."""

    n_best: int = 20  # answers that are kept, and starts and ends of a window that are paired
    max_answer_length: int = 30  # tokens of an answer at most
    null_threshold: float = 0.0  # "no answer" is predicted if its score exceeds the best answer's by more


@dataclass(frozen=True)
class Answer:
    """A predicted answer: its text (empty: no answer), logits, and probability among the n best."""

    text: str
    start_logit: float
    end_logit: float
    probability: float = 0.0

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


@dataclass(frozen=True)
class Prediction:
    """The prediction for a question."""

    best: str  # the best span's text; empty if there is no span
    odds: float  # score of "no answer" minus the best answer's
    text: str  # the prediction: `best`, or empty if "no answer" may win and its odds are above the threshold
    n_best: list[Answer] = field(default_factory=list)  # best first, with probabilities


def predict(
    context: Context,
    text: str,
    spans: Sequence[Window],
    starts: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
    nulls: Sequence[float] | None,
    options: PredictionOptions,
) -> Prediction:
    """Return the answer to a question from the logits of all its windows.

    Args:
        context: the tokenized context.
        text: the context's characters.
        spans: its windows.
        starts: for each window the start logits (length,) of its context tokens.
        ends: their end logits.
        nulls: for each window the sum of both logits of `<s>`; None if every question has an answer.
        options: how spans are chosen.
    """
    chosen: dict[str, Answer] = {}
    found = sorted(_candidates(spans, starts, ends, options), key=lambda one: (-one[0], one[1], one[2]))
    for _, first, last, start, end in found:
        answer = text[context.begins[first] : context.ends[last]].strip()
        if answer and answer not in chosen:
            chosen[answer] = Answer(answer, start, end)
        if len(chosen) == options.n_best:
            break
    answers = list(chosen.values())
    best = answers[0] if answers else Answer("", 0.0, 0.0)
    if nulls is None:
        return Prediction(best.text, 0.0, best.text, _with_probabilities(answers or [best]))
    null = min(nulls)
    odds = null - best.score if answers else math.inf
    answers.append(Answer("", null / 2, null / 2))
    ranked = sorted(answers, key=lambda one: -one.score)[: max(options.n_best, 2)]
    said = "" if odds > options.null_threshold else best.text
    return Prediction(best.text, odds, said, _with_probabilities(ranked))


def _candidates(
    spans: Sequence[Window], starts: Sequence[np.ndarray], ends: Sequence[np.ndarray], options: PredictionOptions
) -> Iterator[tuple[float, int, int, float, float]]:
    """Yield the spans to rank: score, first token, last token, start logit, end logit."""
    seen = set()
    tops = [
        (_top(one, options.n_best) + span.start, _top(other, options.n_best) + span.start)
        for span, one, other in zip(spans, starts, ends, strict=True)
    ]
    if len(spans) > 1:
        every_first, every_last = map(np.concatenate, zip(*tops, strict=True))
        tops.append((np.unique(every_first), np.unique(every_last)))
    for firsts, lasts in tops:
        for first in map(int, firsts):
            for last in map(int, lasts):
                short = first <= last < first + options.max_answer_length
                if not short or (first, last) in seen:
                    continue
                seen.add((first, last))
                whole = best_window(spans, first, last)
                start_in = best_window(spans, first, first) if whole is None else whole
                end_in = best_window(spans, last, last) if whole is None else whole
                start = float(starts[start_in][first - spans[start_in].start])
                end = float(ends[end_in][last - spans[end_in].start])
                yield start + end, first, last, start, end


def _top(logits: np.ndarray, count: int) -> np.ndarray:
    """Return the positions of the highest logits, the earlier one of equal logits first."""
    return np.argsort(-logits, kind="stable")[:count]


def _with_probabilities(answers: Sequence[Answer]) -> list[Answer]:
    highest = max(one.score for one in answers)
    weights = [math.exp(one.score - highest) for one in answers]
    return [
        Answer(one.text, one.start_logit, one.end_logit, weight / sum(weights))
        for one, weight in zip(answers, weights, strict=True)
    ]
