"""Answer the questions of files of SQuAD's format by a checkpoint, or score predictions.

    relpos evaluate qa FILE... --path checkpoint_best.pt --data DATA --out DIR
    relpos evaluate qa FILE --predictions predictions.json [--null-odds null_odds.json]

With a checkpoint, predictions.json (id to answer, empty for none), nbest.json and, where there are
unanswerable questions, null_odds.json go to DIR for one file, to DIR/NAME for several. Exact match
and F1 are those of the official scripts: SQuAD v1.1's (XQuAD and TyDiQA-GoldP use them, too),
v2.0's where there are unanswerable questions (HasAns, NoAns and the thresholds that would be best),
MLQA's with --metric mlqa. Several files or languages become one table with its mean, and
results.json has the same numbers. After an interruption the same command continues. With
predictions the numbers are those that the official script prints for these files, missing answers
and --na-prob-thresh included.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.engine.command import CONTINUE

HELP = "answer questions of SQuAD's format, and score answers"
INTERRUPTED = CONTINUE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    trained = "as in training (default: the checkpoint's)"
    add = parser.add_argument
    add("files", nargs="+", type=Path, help="questions, .json or .json.gz")
    add("--path", type=Path, help="checkpoint to answer with")
    add("--data", type=Path, help="its data folder (default: the one it was trained on, or where it was converted to)")
    add("--out", type=Path, help="folder of the files written")
    add("--predictions", type=Path, help="score this file instead of answering")
    add("--null-odds", type=Path, help="with --predictions: odds of 'no answer'")
    add("--na-prob-thresh", type=float, help="with --null-odds: above it there is no answer (default 1.0)")
    add("--metric", choices=("squad", "mlqa"), help="normalisation (the checkpoint's, or squad)")
    add("--language", help="language for --metric mlqa (default: from the file's name)")
    add("--max-tokens", type=int, help="tokens of a batch (default 8192)")
    add("--null-threshold", type=float, help=trained)
    for name in ("n-best", "max-answer-length", "tokens-per-sample", "doc-stride"):
        add(f"--{name}", type=int, help=trained)
    add("--max-query-length", type=int, help=trained)
    add("--on-long-question", choices=("fail", "truncate", "drop"), help=trained)
    add("--unanswerable", choices=("auto", "yes", "no"), help=trained)
    add("--cpu", action="store_true", help="no GPU")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.evaluation.questions import Options, evaluate

    evaluate(Options(**vars(args)))
