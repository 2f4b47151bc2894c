"""Answer questions of SQuAD's format with a checkpoint, or read answers, and score them.

A function that takes `options` takes those of `relpos evaluate qa`; None is the checkpoint's own, or the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import utils

from relpos_fairseq.criterions.question_answering import predictions, span_logits
from relpos_fairseq.data.answer_spans import Answer, Prediction
from relpos_fairseq.data.squad import read_questions, split_name
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import TEMPORARY, sha256_of, write_json
from relpos_fairseq.io.progress import progress, table
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.io.stages import ResumeLog, locked
from relpos_fairseq.metrics.answer_scores import (
    Scored,
    best_scores,
    best_thresholds,
    normaliser,
    score_file,
    summary,
    with_threshold,
)
from relpos_fairseq.saved.model import SavedModel
from relpos_fairseq.version import __version__

MAX_TOKENS = 8192  # of a batch
# Options of the task that replace the checkpoint's where they are given.
OVERRIDES = (
    *("metric", "language", "null_threshold", "n_best", "max_answer_length"),
    *("tokens_per_sample", "doc_stride", "max_query_length", "on_long_question", "unanswerable"),
)


def check(options: Any) -> None:
    """Raise an error for options that contradict each other or would be ignored.

    Raises:
        UserError: it names one.
    """
    if bool(options.checkpoint) == bool(options.predictions):
        raise UserError("give either --checkpoint FILE or --predictions FILE")
    if options.checkpoint:
        unused, needs = ("null_odds", "na_prob_thresh"), "--predictions"
    else:
        own = [name for name in OVERRIDES if name not in ("metric", "language")]
        unused, needs = (*own, "data", "max_tokens"), "--checkpoint"
    given = [name for name in unused if getattr(options, name) is not None]
    if not options.checkpoint and options.na_prob_thresh is not None and not options.null_odds:
        given, needs = ["na_prob_thresh"], "--null-odds"
    if given:
        raise UserError(f"--{given[0].replace('_', '-')} needs {needs}: leave it out")
    if options.max_tokens is not None and options.max_tokens < 1:
        raise UserError(f"--max-tokens must be 1 or more, got {options.max_tokens}")
    if options.predictions and len(options.files) > 1:
        raise UserError("--predictions belongs to one file of questions")
    if options.checkpoint and options.out is None:
        raise UserError("give --out, where predictions.json is written")


def evaluate(options: Any) -> dict[str, dict]:
    """Answer or score every file; print a table and write it to `out`.

    Returns:
        The scores of every file by its name, and of each of its languages.

    Raises:
        UserError: options contradict each other, or a file is wrong.
    """
    check(options)
    if options.predictions:
        results = score_predictions(
            options.files[0],
            options.predictions,
            options.null_odds,
            1.0 if options.na_prob_thresh is None else options.na_prob_thresh,
            options.metric or "squad",
            options.language,
        )
    else:
        results = answer_files(options)
    print_results(results, {split_name(path) for path in options.files})
    if options.out:
        write_json(options.out / "results.json", results)
    return results


def answer_files(options: Any) -> dict[str, dict]:
    """Answer every file's questions, write the answers and return their scores.

    Until all files are answered, a log keeps each batch's answers, with which an interrupted run goes on.
    """
    model, task = load(options)
    names = [split_name(path) for path in options.files]
    if len(set(names)) != len(names):
        raise UserError(f"two files have the same name: {', '.join(sorted(names))}")
    with locked(options.out, wait=False):
        return _answer_files(options, model, task, names)


def _answer_files(options: Any, model, task, names: list[str]) -> dict[str, dict]:
    results: dict[str, dict] = {}
    logs = []
    key = depends_on(options, model, task)
    for path, name in zip(options.files, names, strict=True):
        dataset = task.read_dataset(path)
        kept = options.out / f"{TEMPORARY}answers-{name}.jsonl"
        logs.append(ResumeLog(kept, key | {"questions": sha256_of(path)}))
        max_tokens = options.max_tokens or MAX_TOKENS
        answered = answer(model, task, dataset, max_tokens, name, logs[-1])
        write_answers(options.out / name if len(names) > 1 else options.out, answered, dataset)
        scored = [score_question(question, one, dataset) for question, one in answered]
        numbers = summary([final for final, _ in scored])
        if dataset.unanswerable:
            numbers |= best_thresholds([raw for _, raw in scored])
        results[name] = numbers
        languages = [question.language for question, _ in answered]
        for language in sorted(set(languages) - {""}):
            part = [one for one, said in zip(scored, languages, strict=True) if said == language]
            results[f"{name} {language}"] = summary([final for final, _ in part])
    for log in logs:
        log.path.unlink()
    return results


def depends_on(options: Any, model, task) -> dict:
    """Return everything that the answers depend on besides the questions."""
    return {
        "checkpoint": sha256_of(options.checkpoint),
        "data": [str(Path(task.cfg.data).absolute()), sha256_of(Path(task.cfg.data) / "dict.txt")],
        "options": {name: getattr(options, name) for name in (*OVERRIDES, "max_tokens")},
        "device": next(model.parameters()).device.type,
        "version": __version__,
    }


def load(options: Any):
    """Return the model in evaluation mode, and its task with the options of the command line."""
    given = {name: getattr(options, name) for name in OVERRIDES}
    overrides = {name: value for name, value in given.items() if value is not None}
    converted = (options.checkpoint.parent / "conversion.json").is_file()
    if options.data or converted:
        overrides["data"] = str(options.data or options.checkpoint.parent)
    saved = SavedModel.open(options.checkpoint, overrides)
    saved.require("relpos answer")
    model, _, task = saved.build()
    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    return model.to(device), task


def answer(model, task, dataset, max_tokens: int, name: str, log: ResumeLog) -> list:
    """Return every question with its prediction, in the order of the file; `log` has those of an earlier process."""
    batches = grouped(dataset.ordered_indices().tolist(), dataset, max_tokens)
    if log.kept:
        print(f"{name}: {len(log.kept)} of {len(batches)} batches are answered already")
    found = [
        (index, Prediction(**one | {"n_best": [Answer(**each) for each in one["n_best"]]}))
        for kept in log.kept
        for index, one in kept
    ]
    rest = batches[len(log.kept) :]
    with torch.no_grad(), log.opened() as keep:
        for batch in progress(rest, description=name, unit="batch"):
            answered = answer_batch(model, task, dataset, batch)
            keep([(index, asdict(one)) for index, one in answered])
            found += answered
    asked = dataset.encoded.questions
    return [(asked[index], one) for index, one in sorted(found, key=lambda one: one[0])]


def answer_batch(model, task, dataset, batch: list[int]) -> list[tuple[int, Prediction]]:
    """Return a batch's predictions, each with the index of its question in the file."""
    sample = dataset.collater([dataset[index] for index in batch])
    if next(model.parameters()).is_cuda:
        sample = utils.move_to_cuda(sample)
    logits = span_logits(model, sample, task.cfg.span_head_name)
    indices = [asked.index for asked in sample["asked"]]
    return list(zip(indices, predictions(sample, logits, task.options), strict=True))


def example_scores(model, task, dataset) -> np.ndarray:
    """Return every question's exact match and F1, 0 to 1, and the tokens of its article and question: (N, 3)."""
    found = []
    with torch.no_grad():
        for batch in grouped(dataset.ordered_indices().tolist(), dataset, MAX_TOKENS):
            found += answer_batch(model, task, dataset, batch)
    asked, rows = dataset.encoded.questions, np.zeros((len(found), 3))
    for index, prediction in found:
        scored, _ = score_question(asked[index], prediction, dataset)
        rows[index] = scored.exact, scored.f1, dataset.size(index)
    return rows


def grouped(order: Sequence[int], dataset, max_tokens: int) -> list[list[int]]:
    """Return batches of at least one question, and of at most `max_tokens` tokens if there are several."""
    batches: list[list[int]] = []
    rows = width = 0
    for index in order:
        windows = dataset.num_tokens(index) // dataset.size(index)
        wider = max(width, dataset.size(index))
        if batches and (rows + windows) * wider <= max_tokens:
            batches[-1].append(index)
            rows, width = rows + windows, wider
        else:
            batches.append([index])
            rows, width = windows, dataset.size(index)
    return batches


def print_results(results: dict[str, dict], whole: set[str]) -> None:
    """Print a row for every file and language, and the mean of the files, whose names are `whole`."""
    rows = [(name, one["total"], one["exact"], one["f1"]) for name, one in results.items()]
    files = [row for row in rows if row[0] in whole]
    if len(files) > 1:
        means = [sum(row[column] for row in files) / len(files) for column in (2, 3)]
        rows.append(("mean", sum(row[1] for row in files), *means))
    print(table(rows, ("file", "questions", "EM", "F1")))
    for name, one in results.items():
        more = {key: value for key, value in one.items() if key not in ("exact", "f1", "total")}
        if more:
            print(f"\n{name}")
            print("\n".join(f"  {key:24} {value:,.4f}" for key, value in more.items()))


def score_predictions(
    path: Path, answers: Path, null_odds: Path | None, threshold: float, metric: str, language: str | None
) -> dict[str, dict]:
    """Return the official script's scores of a predictions file.

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
    predictions = read_json(answers, dict[str, str])
    odds = None
    if null_odds:
        odds = read_json(null_odds, dict[str, float])
        lost = [name for name in predictions if name not in odds]
        if lost:
            raise UserError(f"{null_odds} lacks {len(lost)} of the ids of {answers}: {', '.join(lost[:5])}")
    normalised = normaliser(metric, language or language_of(path))
    scored, missing = score_file(predictions, found.questions, normalised, odds)
    if missing:
        print(f"{len(missing)} questions without a prediction: {', '.join(missing[:5])}")
    numbers = summary(scored)
    if odds is not None and found.unanswerable:
        numbers = summary(with_threshold(scored, threshold)) | best_thresholds(scored)
    return {path.name: numbers}


def score_question(question, prediction, dataset) -> tuple[Scored, Scored]:
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
    keys = ("text", "probability", "start_logit", "end_logit")
    n_best = {name: [{key: getattr(answer, key) for key in keys} for answer in one.n_best] for name, one in ids}
    write_json(folder / "nbest.json", n_best)
    if dataset.unanswerable:
        write_json(folder / "null_odds.json", {name: min(one.odds, 1e30) for name, one in ids})
