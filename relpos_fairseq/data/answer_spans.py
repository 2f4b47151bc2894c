"""Cut questions and long contexts into overlapping windows of ids, and predict answers as spans of a context."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tqdm import tqdm

from relpos_fairseq.data.squad import Question, QuestionFile
from relpos_fairseq.text import Encoding, Tokenizer

# ---- A question and a long context as overlapping windows, and answers as positions in them.
# Devlin et al. 2018's treatment of SQuAD: `<s> question </s> </s> part of the context </s>` (one
# `</s>` between them for BERT's vocabularies), windows that begin every `stride` pieces, and for each
# piece the window in which it has the most context around it.  What differs: an answer that fits into
# no window is not given up, its first piece is a target in one window and its last in another, and
# `prediction` can put such a span together again.


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


# ---- Questions and contexts as numbers of a fairseq dictionary.


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


# ---- Answers out of start and end logits: n-best spans, the null score, the text.
# The rules are those of BERT's run_squad.py (Devlin et al. 2018, section 4.2-4.3): the best `n_best`
# starts and ends of every window are paired, spans that end before they start or are longer than
# `max_answer_length` pieces are left out, the score is the sum of both logits, and "no answer" scores
# as `<s>` in the window where that is least.  A span that several windows hold is scored where it has
# the most context (BERT's script asks that of its first piece alone), and one that no window holds
# whole takes either logit from the window where that piece has the most context.


@dataclass(frozen=True)
class PredictionOptions:
    """How spans are chosen."""

    # how many answers are kept, and how many starts and ends of a window are paired
    n_best: int = 20
    max_answer_length: int = 30  # an answer's pieces at most
    # "no answer" is predicted where its score exceeds the best answer's by more
    null_threshold: float = 0.0


@dataclass(frozen=True)
class Answer:
    """A predicted answer: text (empty: none), both logits and its probability among the n best."""

    text: str
    start_logit: float
    end_logit: float
    probability: float = 0.0

    @property
    def score(self) -> float:
        return self.start_logit + self.end_logit


@dataclass(frozen=True)
class Prediction:
    """What is predicted for a question."""

    best: str  # the best answer that is one; empty where there is no span at all
    odds: float  # score of "no answer" minus the best answer's
    # the prediction: `best`, or empty where "no answer" may win and its odds are above the
    # threshold
    text: str
    # the best answers, best first, with probabilities
    n_best: list[Answer] = field(default_factory=list)


def predict(
    context: Context,
    text: str,
    spans: Sequence[Window],
    starts: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
    nulls: Sequence[float] | None,
    options: PredictionOptions,
) -> Prediction:
    """The answer to a question from the logits of all its windows.

    Args:
        context: the tokenised context.
        text: the context's characters.
        spans: its windows, W of them.
        starts: for each window the start logits of its context pieces (length,).
        ends: the same of end logits.
        nulls: for each window the sum of both logits of `<s>`; None where every question has an
            answer.
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
    """(score, first piece, last piece, start logit, end logit) of the spans worth looking at."""
    seen = set()
    tops = [
        (_top(one, options.n_best) + span.start, _top(other, options.n_best) + span.start)
        for span, one, other in zip(spans, starts, ends, strict=True)
    ]
    every_first = np.unique(np.concatenate([first for first, _ in tops]))
    every_last = np.unique(np.concatenate([last for _, last in tops]))
    pairs = [(first, last) for first, last in tops]
    if len(spans) > 1:
        pairs.append((every_first, every_last))
    for firsts, lasts in pairs:
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
    """Positions of the highest logits; the earlier of equals."""
    return np.argsort(-logits, kind="stable")[:count]


def _with_probabilities(answers: Sequence[Answer]) -> list[Answer]:
    highest = max(one.score for one in answers)
    weights = [math.exp(one.score - highest) for one in answers]
    return [
        Answer(one.text, one.start_logit, one.end_logit, weight / sum(weights))
        for one, weight in zip(answers, weights, strict=True)
    ]
