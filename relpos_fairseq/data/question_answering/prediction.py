"""Answers out of start and end logits: n-best spans, the null score, the text.

The rules are those of BERT's run_squad.py (Devlin et al. 2018, section 4.2-4.3): the best `n_best`
starts and ends of every window are paired, spans that end before they start or are longer than
`max_answer_length` pieces are left out, the score is the sum of both logits, and "no answer" scores
as `<s>` in the window where that is least.  A span that several windows hold is scored where it has
the most context (BERT's script asks that of its first piece alone), and one that no window holds
whole takes either logit from the window where that piece has the most context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from relpos_fairseq.data.question_answering.windows import Context, Window, best_window


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
