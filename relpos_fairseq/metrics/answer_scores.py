r"""Exact match and F1 of extracted answers, as the official scripts count them.

* SQuAD v1.1 (Rajpurkar et al. 2016; evaluate-v1.1.py), also what XQuAD and TyDiQA-GoldP use in
  every language: lower case, ASCII punctuation and a, an, the removed, white space tokens.
* SQuAD v2.0 (Rajpurkar et al. 2018; evaluate-v2.0.py): an unanswerable question's gold answer is
  the empty string, F1 with an empty side is 1 or 0, gold answers that normalise to nothing are left
  out, and a threshold on the odds of "no answer" is searched.
* MLQA (Lewis et al. 2020; mlqa_evaluation_v1.py): punctuation of all of Unicode, articles of the
  language, Chinese split into characters.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from relpos_fairseq.text.languages import find_language

_ASCII_PUNCTUATION = set(string.punctuation)
_MLQA_ARTICLES = {
    "en": r"\b(a|an|the)\b",
    "es": r"\b(un|una|unos|unas|el|la|los|las)\b",
    "hi": None,
    "vi": r"\b(của|là|cái|chiếc|những)\b",
    "de": r"\b(ein|eine|einen|einem|eines|einer|der|die|das|den|dem|des)\b",
    "ar": r"\sال^|ال",  # as released: the first half never matches, the second everywhere
    "zh": None,
}
MLQA_LANGUAGES = tuple(_MLQA_ARTICLES)
METRICS = ("squad", "mlqa")


def normalise(text: str) -> str:
    """Normalise an answer as SQuAD does."""
    kept = "".join(c for c in text.lower() if c not in _ASCII_PUNCTUATION)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def _is_punctuation(character: str) -> bool:
    return character in _ASCII_PUNCTUATION or unicodedata.category(character).startswith("P")


def normalise_mlqa(text: str, language: str) -> str:
    """Normalise an answer in a language, by any code of it, as MLQA does.

    Raises:
        ValueError: MLQA has no such language.
    """
    code = find_language(language).code
    if code not in _MLQA_ARTICLES:
        raise ValueError(
            f"MLQA's normalisation knows {', '.join(MLQA_LANGUAGES)}, not {language!r}; the "
            f"metric squad takes any language"
        )
    kept = "".join(c for c in text.lower() if not _is_punctuation(c))
    if (articles := _MLQA_ARTICLES[code]) is not None:
        kept = re.sub(articles, " ", kept)
    if code == "zh":
        kept = "".join(f" {c} " if "\u4e00" <= c <= "\u9fa5" else c for c in kept)
    return " ".join(kept.split())


def normaliser(metric: str, language: str) -> Callable[[str], str]:
    """Return the function that normalises answers for a metric, `squad` or `mlqa`.

    Raises:
        ValueError: neither of them, or a language that MLQA lacks.
    """
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, got {metric!r}")
    if metric == "squad":
        return normalise
    normalise_mlqa("", language)
    return functools.partial(normalise_mlqa, language=language)


def exact_match(prediction: str, gold: str, normalised: Callable[[str], str] = normalise) -> float:
    """Return 1 if both answers normalise to the same text, else 0."""
    return float(normalised(prediction) == normalised(gold))


def f1(prediction: str, gold: str, normalised: Callable[[str], str] = normalise, v2: bool = False) -> float:
    """Return F1: the harmonic mean of precision and recall over the tokens of normalised answers.

    Args:
        prediction: what was predicted.
        gold: one gold answer.
        normalised: the normalisation.
        v2: an empty side scores 1 where the other is empty too (SQuAD v1.1 and MLQA: always 0).
    """
    predicted, wanted = normalised(prediction).split(), normalised(gold).split()
    if v2 and not (predicted and wanted):
        return float(predicted == wanted)
    common = sum((collections.Counter(predicted) & collections.Counter(wanted)).values())
    if not common:
        return 0.0
    precision, recall = common / len(predicted), common / len(wanted)
    return 2 * precision * recall / (precision + recall)


def best_scores(
    prediction: str, answers: Sequence[str], normalised: Callable[[str], str] = normalise, v2: bool = False
) -> tuple[float, float]:
    """Return exact match and F1 against the best of several gold answers.

    Args:
        prediction: what was predicted; the empty string says that there is no answer.
        answers: gold answers; v2: none of them, or none that normalises to something, says that
            the question is unanswerable.
        normalised: the normalisation.
        v2: SQuAD v2.0's rules.
    """
    if v2:
        answers = [answer for answer in answers if normalised(answer)] or [""]
    return (
        max((exact_match(prediction, gold, normalised) for gold in answers), default=0.0),
        max((f1(prediction, gold, normalised, v2) for gold in answers), default=0.0),
    )


@dataclass(frozen=True)
class Scored:
    """One question's scores.

    Attributes:
        exact: exact match, 0 or 1.
        f1: F1, 0 to 1.
        answerable: whether the question has an answer.
        odds: score of "no answer" minus that of the best answer; 0 where nothing is known.
        answered: whether an answer was predicted.
    """

    exact: float
    f1: float
    answerable: bool = True
    odds: float = 0.0
    answered: bool = True


def percentage(values: Iterable[float]) -> float:
    """Return the mean in percent; 0 for no scores."""
    values = list(values)
    return 100.0 * sum(values) / len(values) if values else 0.0


def summary(scored: Sequence[Scored]) -> dict[str, float]:
    """Return SQuAD v1.1's numbers, and v2.0's where there are unanswerable questions.

    Returns:
        `exact`, `f1`, `total`; for v2.0 also `HasAns_exact`, `HasAns_f1`, `HasAns_total` and the
        same of `NoAns`.
    """
    groups = {"": list(scored)}
    if any(not one.answerable for one in scored):
        groups["HasAns_"] = [one for one in scored if one.answerable]
        groups["NoAns_"] = [one for one in scored if not one.answerable]
    numbers: dict[str, float] = {}
    for name, group in groups.items():
        if group or not name:
            numbers[f"{name}exact"] = percentage(one.exact for one in group)
            numbers[f"{name}f1"] = percentage(one.f1 for one in group)
            numbers[f"{name}total"] = len(group)
    return numbers


def with_threshold(scored: Iterable[Scored], threshold: float) -> list[Scored]:
    """Return the scores when questions with odds above a threshold are predicted unanswerable."""
    return [
        dataclasses.replace(one, exact=float(not one.answerable), f1=float(not one.answerable), answered=False)
        if one.odds > threshold
        else one
        for one in scored
    ]


def best_thresholds(scored: Sequence[Scored]) -> dict[str, float]:
    """Return the thresholds on the odds of "no answer" that maximise exact match and F1.

    A question whose odds are above a threshold counts as predicted unanswerable.  As the official
    script, the search begins with "everything is unanswerable" and calls that threshold 0, though
    odds that are differences of scores may lie below it: `best_*_thresh` are its numbers, and
    `reached_*_thresh` are thresholds at which the best score is reached.

    Args:
        scored: scores of what is predicted below the threshold.

    Returns:
        `best_exact`, `best_exact_thresh`, `reached_exact_thresh`, and the same of `f1`.
    """
    found: dict[str, float] = {}
    unanswerable = sum(not one.answerable for one in scored)
    ordered = sorted(scored, key=lambda one: one.odds)
    below = ordered[0].odds - 1.0 if ordered else 0.0
    for name in ("exact", "f1"):
        best = current = float(unanswerable)
        threshold, official = below, 0.0
        for one in ordered:
            current += getattr(one, name) if one.answerable else -float(one.answered)
            if current > best:
                best = current
                threshold = official = one.odds
        found[f"best_{name}"] = 100.0 * best / len(scored) if scored else 0.0
        found[f"best_{name}_thresh"] = official
        found[f"reached_{name}_thresh"] = threshold
    return found


def score_file(
    predictions: Mapping[str, str],
    questions: Iterable,
    normalised: Callable[[str], str] = normalise,
    odds: Mapping[str, float] | None = None,
) -> tuple[list[Scored], list[str]]:
    """Return the scores of a file of predictions, and the ids that it lacks.

    SQuAD v1.1 counts a missing prediction as wrong, v2.0 leaves the question out.

    Args:
        predictions: id to answer, the empty string for none.
        questions: of `data.question_answering.reading`, one file's.
        normalised: the normalisation.
        odds: id to the odds of "no answer".
    """
    questions = list(questions)
    v2 = any(not question.answerable for question in questions)
    scored, missing = [], []
    for question in questions:
        if question.id not in predictions:
            missing.append(question.id)
            if not v2:
                scored.append(Scored(0.0, 0.0, answered=False))
            continue
        text = predictions[question.id]
        exact, overlap = best_scores(text, question.gold, normalised, v2)
        known = (odds or {}).get(question.id, 0.0)
        scored.append(Scored(exact, overlap, question.answerable, known, bool(text)))
    return scored, missing
