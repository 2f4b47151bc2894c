"""Answers the questions of files of SQuAD's format by a checkpoint, or scores predictions.

    python scripts/evaluate_qa.py FILE... --path checkpoint_best.pt --data DATA --out DIR
    python scripts/evaluate_qa.py FILE --predictions predictions.json [--null-odds null_odds.json]

With a checkpoint, predictions.json (id to answer, empty for none), nbest.json and, where there are
unanswerable questions, null_odds.json go to DIR for one file, to DIR/NAME for several. Exact match
and F1 are those of the official scripts: SQuAD v1.1's (XQuAD and TyDiQA-GoldP use them, too),
v2.0's where there are unanswerable questions (HasAns, NoAns and the thresholds that would be best),
MLQA's with --metric mlqa. Several files or languages become one table with its mean, and
results.json has the same numbers. With predictions the numbers are those that the official script
prints for these files, missing answers and --na-prob-thresh included.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.data.question_answering.encoding import LONG_QUESTION
from relpos_fairseq.data.question_answering.reading import split_name
from relpos_fairseq.engine.command import run_command
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import write_json
from relpos_fairseq.engine.tables import table
from relpos_fairseq.engine.progress import progress
from relpos_fairseq.evaluation.answers import score, score_predictions, write_answers
from relpos_fairseq.metrics.question_answering import METRICS, best_thresholds, summary
from relpos_fairseq.tasks.question_answering_config import UNANSWERABLE

MAX_TOKENS = 8192
# Options of the task; those that are given replace the checkpoint's.
OVERRIDES = ("metric", "language", "null_threshold", "n_best", "max_answer_length",
             "tokens_per_sample", "doc_stride", "max_query_length", "on_long_question",
             "unanswerable")  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("files", nargs="+", type=Path, help="questions, .json or .json.gz")
    add("--path", type=Path, help="checkpoint to answer with")
    add("--data", type=Path, help="its data folder (default: the one it was trained on, or "
        "where convert_checkpoint.py wrote it)")  # fmt: skip
    add("--out", type=Path, help="folder of the files written")
    add("--predictions", type=Path, help="score this file instead of answering")
    add("--null-odds", type=Path, help="with --predictions: odds of 'no answer'")
    add("--na-prob-thresh", type=float,
        help="with --null-odds: above it there is no answer (default 1.0)")  # fmt: skip
    add("--metric", choices=METRICS, help="normalisation (default: the checkpoint's, or squad)")
    add("--language", help="language for --metric mlqa (default: from the file's name)")
    add("--max-tokens", type=int, help="tokens of a batch (default 8192)")
    for name, kind in (("null-threshold", float), ("n-best", int), ("max-answer-length", int),
                       ("tokens-per-sample", int), ("doc-stride", int),
                       ("max-query-length", int)):  # fmt: skip
        add(f"--{name}", type=kind, help="as in training (default: the checkpoint's)")
    for name, choices in (("on-long-question", LONG_QUESTION), ("unanswerable", UNANSWERABLE)):
        add(f"--{name}", choices=choices, help="as in training (default: the checkpoint's)")
    add("--cpu", action="store_true", help="no GPU")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Answers or scores every file, and prints a table.

    Raises:
        PreparationError: options that contradict each other.
    """
    args = make_parser().parse_args(argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING, stream=sys.stderr)
    if bool(args.path) == bool(args.predictions):
        raise PreparationError("give either --path CHECKPOINT or --predictions FILE")
    check_unused(args)
    if args.predictions:
        if len(args.files) > 1:
            raise PreparationError("--predictions belongs to one file of questions")
        results = score_predictions(args)
    else:
        if args.out is None:
            raise PreparationError("give --out, where predictions.json is written")
        results = answer_files(args)
    print_results(results, {split_name(path) for path in args.files})
    if args.out:
        write_json(args.out / "results.json", results)


def check_unused(args: argparse.Namespace) -> None:
    """Refuses options that would be ignored, and numbers that cannot be.

    Raises:
        PreparationError: one is given.
    """
    if args.path:
        unused, needs = ("null_odds", "na_prob_thresh"), "--predictions"
    else:
        unused = (*(name for name in OVERRIDES if name not in ("metric", "language")),
                  "data", "max_tokens")  # fmt: skip
        needs = "--path"
    given = [name for name in unused if getattr(args, name) is not None]
    if not args.path and args.na_prob_thresh is not None and not args.null_odds:
        given, needs = ["na_prob_thresh"], "--null-odds"
    if given:
        raise PreparationError(f"--{given[0].replace('_', '-')} needs {needs}: leave it out")
    if args.max_tokens is not None and args.max_tokens < 1:
        raise PreparationError(f"--max-tokens must be 1 or more, got {args.max_tokens}")


def answer_files(args: argparse.Namespace) -> dict[str, dict]:
    """Answer every file's questions; write what was answered."""
    model, task = load(args)
    names = [split_name(path) for path in args.files]
    if len(set(names)) != len(names):
        raise PreparationError(f"two files have the same name: {', '.join(sorted(names))}")
    results: dict[str, dict] = {}
    for path, name in zip(args.files, names, strict=True):
        dataset = task.read_dataset(path)
        answered = answer(model, task, dataset, args.max_tokens or MAX_TOKENS, name)
        write_answers(args.out / name if len(names) > 1 else args.out, answered, dataset)
        scored = [score(asked, one) for asked, one in answered]
        numbers = summary([final for final, _ in scored])
        if dataset.unanswerable:
            numbers |= best_thresholds([raw for _, raw in scored])
        results[name] = numbers
        languages = [asked.question.language for asked, _ in answered]
        for language in sorted(set(languages) - {""}):
            part = [one for one, said in zip(scored, languages, strict=True) if said == language]
            results[f"{name} {language}"] = summary([final for final, _ in part])
    return results


def load(args: argparse.Namespace):
    """The model, in evaluation, and its task with the options of the command line."""
    import torch
    from fairseq import checkpoint_utils

    import relpos_fairseq  # noqa: F401

    given = {name: getattr(args, name) for name in OVERRIDES}
    overrides = {name: value for name, value in given.items() if value is not None}
    converted = (args.path.parent / "conversion.json").is_file()
    if args.data or converted:
        overrides["data"] = str(args.data or args.path.parent)
    if not args.path.is_file():
        raise PreparationError(f"no such checkpoint: {args.path}")
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(args.path)], arg_overrides=overrides
    )
    if not hasattr(task, "read_dataset"):
        raise PreparationError(
            f"{args.path} was trained on {type(task).__name__}, not on question_answering"
        )
    device = "cuda" if torch.cuda.is_available() and not args.cpu else "cpu"
    return models[0].eval().to(device), task


def answer(model, task, dataset, max_tokens: int, name: str) -> list:
    """Every question with its prediction, in the file's order."""
    import torch
    from fairseq import utils

    from relpos_fairseq.criterions.question_answering import predictions, span_logits

    device = next(model.parameters()).device
    batches = grouped(dataset.ordered_indices().tolist(), dataset, max_tokens)
    found = []
    with torch.no_grad():
        for batch in progress(batches, description=name, unit="batch"):
            sample = dataset.collater([dataset[index] for index in batch])
            sample = utils.move_to_cuda(sample) if device.type == "cuda" else sample
            logits = span_logits(model, sample, task.cfg.span_head_name)
            found += zip(sample["asked"], predictions(sample, logits, task.options), strict=True)
    return sorted(found, key=lambda pair: pair[0].index)


def grouped(order: Sequence[int], dataset, max_tokens: int) -> list[list[int]]:
    """Batches of questions with at most `max_tokens` tokens, one question at least."""
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
    """One row a file or language, and the mean of several files, whose names are `whole`."""
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


if __name__ == "__main__":
    sys.exit(run_command(main))
