"""Questions of SQuAD's format, answered by a checkpoint and scored."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from fairseq import checkpoint_utils, utils

from relpos_fairseq.criterions.question_answering import predictions, span_logits
from relpos_fairseq.data.question_answering.prediction import Answer, Prediction
from relpos_fairseq.data.question_answering.reading import split_name
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import TEMPORARY, sha256_of, write_json
from relpos_fairseq.engine.progress import progress
from relpos_fairseq.engine.tables import table
from relpos_fairseq.evaluation.answers import score, score_predictions, write_answers
from relpos_fairseq.evaluation.journal import Journal
from relpos_fairseq.inference.checkpoints.trusted import read_trusted
from relpos_fairseq.metrics.question_answering import best_thresholds, summary
from relpos_fairseq.version import __version__

MAX_TOKENS = 8192
# Options of the task; those that are given replace the checkpoint's.
OVERRIDES = (
    *("metric", "language", "null_threshold", "n_best", "max_answer_length"),
    *("tokens_per_sample", "doc_stride", "max_query_length", "on_long_question", "unanswerable"),
)


@dataclass(frozen=True)
class Options:
    """What is answered or scored; None: the checkpoint's own, or the default.

    Attributes:
        files: questions, .json or .json.gz.
        path: checkpoint to answer with.
        data: its data folder.
        out: folder of the files written.
        predictions: answers to score instead.
        null_odds: with them, odds of `no answer`.
        na_prob_thresh: odds above it are `no answer`.
        max_tokens: tokens of a batch.
        cpu: whether to use no GPU.

    The others are options of the task question_answering.
    """

    files: list[Path]
    path: Path | None = None
    data: Path | None = None
    out: Path | None = None
    predictions: Path | None = None
    null_odds: Path | None = None
    na_prob_thresh: float | None = None
    max_tokens: int | None = None
    cpu: bool = False
    metric: str | None = None
    language: str | None = None
    null_threshold: float | None = None
    n_best: int | None = None
    max_answer_length: int | None = None
    tokens_per_sample: int | None = None
    doc_stride: int | None = None
    max_query_length: int | None = None
    on_long_question: str | None = None
    unanswerable: str | None = None

    def check(self) -> None:
        """Refuse options that contradict each other or would be ignored.

        Raises:
            PreparationError: one is given.
        """
        if bool(self.path) == bool(self.predictions):
            raise PreparationError("give either --path CHECKPOINT or --predictions FILE")
        if self.path:
            unused, needs = ("null_odds", "na_prob_thresh"), "--predictions"
        else:
            own = [name for name in OVERRIDES if name not in ("metric", "language")]
            unused, needs = (*own, "data", "max_tokens"), "--path"
        given = [name for name in unused if getattr(self, name) is not None]
        if not self.path and self.na_prob_thresh is not None and not self.null_odds:
            given, needs = ["na_prob_thresh"], "--null-odds"
        if given:
            raise PreparationError(f"--{given[0].replace('_', '-')} needs {needs}: leave it out")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise PreparationError(f"--max-tokens must be 1 or more, got {self.max_tokens}")
        if self.predictions and len(self.files) > 1:
            raise PreparationError("--predictions belongs to one file of questions")
        if self.path and self.out is None:
            raise PreparationError("give --out, where predictions.json is written")


def evaluate(options: Options) -> dict[str, dict]:
    """Answer or score every file; print a table and write it to `out`.

    Returns:
        Every file's numbers, by its name, and those of its languages.

    Raises:
        PreparationError: options contradict each other, or a file is wrong.
    """
    options.check()
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


def answer_files(options: Options) -> dict[str, dict]:
    """Answer every file's questions; write what was answered.

    Until all files are, a journal keeps each batch's answers: an interrupted run goes on with it.
    """
    model, task = load(options)
    names = [split_name(path) for path in options.files]
    if len(set(names)) != len(names):
        raise PreparationError(f"two files have the same name: {', '.join(sorted(names))}")
    results: dict[str, dict] = {}
    journals = []
    key = depends_on(options, model, task)
    for path, name in zip(options.files, names, strict=True):
        dataset = task.read_dataset(path)
        kept = options.out / f"{TEMPORARY}answers-{name}.jsonl"
        journals.append(Journal(kept, key | {"questions": sha256_of(path)}))
        max_tokens = options.max_tokens or MAX_TOKENS
        answered = answer(model, task, dataset, max_tokens, name, journals[-1])
        write_answers(options.out / name if len(names) > 1 else options.out, answered, dataset)
        scored = [score(question, one, dataset) for question, one in answered]
        numbers = summary([final for final, _ in scored])
        if dataset.unanswerable:
            numbers |= best_thresholds([raw for _, raw in scored])
        results[name] = numbers
        languages = [question.language for question, _ in answered]
        for language in sorted(set(languages) - {""}):
            part = [one for one, said in zip(scored, languages, strict=True) if said == language]
            results[f"{name} {language}"] = summary([final for final, _ in part])
    for journal in journals:
        journal.path.unlink()
    return results


def depends_on(options: Options, model, task) -> dict:
    """Return what answers depend on besides the questions."""
    return {
        "checkpoint": sha256_of(options.path),
        "data": [str(Path(task.cfg.data).absolute()), sha256_of(Path(task.cfg.data) / "dict.txt")],
        "options": {name: getattr(options, name) for name in (*OVERRIDES, "max_tokens")},
        "device": next(model.parameters()).device.type,
        "version": __version__,
    }


def load(options: Options):
    """Return the model, in evaluation, and its task with the options of the command line."""
    given = {name: getattr(options, name) for name in OVERRIDES}
    overrides = {name: value for name, value in given.items() if value is not None}
    converted = (options.path.parent / "conversion.json").is_file()
    if options.data or converted:
        overrides["data"] = str(options.data or options.path.parent)
    if not options.path.is_file():
        raise PreparationError(f"no such checkpoint: {options.path}")
    state = read_trusted(options.path, overrides)
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(options.path)], state=state)
    if not hasattr(task, "read_dataset"):
        raise PreparationError(f"{options.path} was trained on {type(task).__name__}, not on question_answering")
    device = "cuda" if torch.cuda.is_available() and not options.cpu else "cpu"
    return models[0].eval().to(device), task


def answer(model, task, dataset, max_tokens: int, name: str, journal: Journal) -> list:
    """Return every question with its prediction, in the file's order."""
    batches = grouped(dataset.ordered_indices().tolist(), dataset, max_tokens)
    if journal.kept:
        print(f"{name}: {len(journal.kept)} of {len(batches)} batches are answered already")
    found = [
        (index, Prediction(**one | {"n_best": [Answer(**each) for each in one["n_best"]]}))
        for kept in journal.kept
        for index, one in kept
    ]
    rest = batches[len(journal.kept) :]
    with torch.no_grad(), journal.opened() as keep:
        for batch in progress(rest, description=name, unit="batch"):
            answered = answer_batch(model, task, dataset, batch)
            keep([(index, asdict(one)) for index, one in answered])
            found += answered
    asked = dataset.encoded.questions
    return [(asked[index], one) for index, one in sorted(found, key=lambda one: one[0])]


def answer_batch(model, task, dataset, batch: list[int]) -> list[tuple[int, Prediction]]:
    """Return a batch's predictions by the question's place in its file."""
    sample = dataset.collater([dataset[index] for index in batch])
    if next(model.parameters()).is_cuda:
        sample = utils.move_to_cuda(sample)
    logits = span_logits(model, sample, task.cfg.span_head_name)
    indices = [asked.index for asked in sample["asked"]]
    return list(zip(indices, predictions(sample, logits, task.options), strict=True))


def grouped(order: Sequence[int], dataset, max_tokens: int) -> list[list[int]]:
    """Return batches of questions with at most `max_tokens` tokens, one question at least."""
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
    """Print one row a file or language, and the mean of several files, whose names are `whole`."""
    rows = [(name, one["total"], one["exact"], one["f1"]) for name, one in results.items()]
    files = [row for row in rows if row[0] in whole]
    if len(files) > 1:
        count = len(files)
        means = [sum(row[column] for row in files) / count for column in (2, 3)]
        rows.append(("mean", sum(row[1] for row in files), *means))
    print(table(rows, ("file", "questions", "EM", "F1")))
    for name, one in results.items():
        more = {key: value for key, value in one.items() if key not in ("exact", "f1", "total")}
        if more:
            print(f"\n{name}")
            print("\n".join(f"  {key:24} {value:,.4f}" for key, value in more.items()))
