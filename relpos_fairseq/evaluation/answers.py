"""Files of answers: read and scored as the official scripts do, written as they read them."""

from __future__ import annotations

from pathlib import Path

from relpos_fairseq.data.question_answering.reading import read_questions
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import read_json, write_json
from relpos_fairseq.metrics.question_answering import (
    Scored,
    best_scores,
    best_thresholds,
    normaliser,
    score_file,
    summary,
    with_threshold,
)


def score_predictions(
    path: Path, answers: Path, null_odds: Path | None, threshold: float, metric: str, language: str | None
) -> dict[str, dict]:
    """Return the official script's numbers for a predictions file.

    Args:
        path: the questions.
        answers: the predictions, id to text.
        null_odds: id to odds of `no answer`.
        threshold: odds above it are `no answer`.
        metric: `squad` or `mlqa`.
        language: the answers' language; None: that of the file's name.
    """
    from relpos_fairseq.tasks.question_answering import language_of

    found = read_questions(path)
    predictions = read_answers(answers, str, "the text of an answer")
    odds = None
    if null_odds:
        odds = read_answers(null_odds, (int, float), "a number")
        lost = [name for name in predictions if name not in odds]
        if lost:
            raise PreparationError(f"{null_odds} lacks {len(lost)} of the ids of {answers}: {', '.join(lost[:5])}")
    normalised = normaliser(metric, language or language_of(path))
    scored, missing = score_file(predictions, found.questions, normalised, odds)
    if missing:
        print(f"{len(missing)} questions without a prediction: {', '.join(missing[:5])}")
    numbers = summary(scored)
    if odds is not None and found.unanswerable:
        numbers = summary(with_threshold(scored, threshold)) | best_thresholds(scored)
    return {path.name: numbers}


def read_answers(path: Path, kind: type | tuple[type, ...], said: str) -> dict:
    """Read a JSON object by id, all of one kind.

    Raises:
        PreparationError: it is absent or another.
    """
    found = read_json(path)
    if not isinstance(found, dict):
        raise PreparationError(f"{path} is absent, or no object of id to answer")
    for name, value in found.items():
        if not isinstance(value, kind):
            raise PreparationError(f"{path}: id {name!r} must have {said}, got {value!r:.60}")
    return found


def score(question, prediction, dataset) -> tuple[Scored, Scored]:
    """Return a question's scores as predicted, and without the threshold."""
    texts = (prediction.text, prediction.best)
    return tuple(
        Scored(
            *best_scores(text, question.gold, dataset.normalised, dataset.unanswerable),
            question.answerable,
            prediction.odds,
            bool(text),
        )
        for text in texts
    )


def write_answers(folder: Path, answered: list, dataset) -> None:
    """Write predictions.json, nbest.json and null_odds.json, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    ids = [(question.id, one) for question, one in answered]
    write_json(folder / "predictions.json", {name: one.text for name, one in ids})
    n_best = {
        name: [
            {
                "text": answer.text,
                "probability": answer.probability,
                "start_logit": answer.start_logit,
                "end_logit": answer.end_logit,
            }
            for answer in one.n_best
        ]
        for name, one in ids
    }
    write_json(folder / "nbest.json", n_best)
    if dataset.unanswerable:
        write_json(folder / "null_odds.json", {name: min(one.odds, 1e30) for name, one in ids})
