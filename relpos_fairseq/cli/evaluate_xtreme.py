r"""Evaluate models that were fine-tuned on English in every language that is there (XTREME).

    relpos evaluate xtreme --out runs/xtreme \
        --xnli-model runs/xnli/.../model.pt --xnli data-bin/glue/XNLI \
        --qa-model checkpoints/squad/checkpoint_best.pt --qa-data data-bin/squad \
        --xquad xquad --mlqa MLQA_V1/test --tydiqa tydiqa-goldp-v1.1-dev

Accuracy on XNLI, F1 and exact match on XQuAD, MLQA and TyDiQA-GoldP, a row a language. Several
checkpoints of a kind are trials, of which the median is reported (004, section 4.2). Models and
data sets that are not given are left out; what is done is kept, and the same command goes on.
"""

import argparse
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from relpos_fairseq.cli import evaluate_qa
from relpos_fairseq.cli.parser import Parser

HELP = "accuracy and F1 in every language of XTREME"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder of predictions and the table")
    trials = "; several are trials, whose median is reported"
    add("--xnli-model", type=Path, nargs="+", default=(), help=f"fine-tuned on XNLI's English{trials}")
    add("--xnli", type=Path, help="XNLI, as `relpos prepare glue` wrote it")
    add("--qa-model", type=Path, nargs="+", default=(), help=f"fine-tuned on English questions{trials}")
    add("--qa-data", type=Path, help="its data folder (default: the one it was trained on)")
    add_questions(add)
    add("--cpu", action="store_true", help="no GPU")
    add("--force", action="store_true", help="repeat what is done")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.evaluation.xtreme.languages import Options, evaluate

    evaluate(Options(**vars(args), answering=answering_of(args.qa_flags)))


def answering_of(flags: str) -> object:
    """Return the options of answering that flags of `relpos evaluate qa` say."""
    from relpos_fairseq.evaluation.questions import Options

    parser = Parser(prog="--qa-flags", add_help=False)
    evaluate_qa.add_arguments(parser)
    return Options(**vars(parser.parse_args(["every file", *shlex.split(flags)])))


def add_questions(add: Callable[..., object]) -> None:
    """Add the folders of questions in other languages, and how they are answered."""
    for name in ("XQuAD", "MLQA", "TyDiQA"):
        add(f"--{name.lower()}", type=Path, metavar="FOLDER", help=f"{name}'s files")
    add(
        "--qa-flags",
        default="",
        metavar="'--FLAG ...'",
        help="more of `relpos evaluate qa`: --qa-flags='--on-long-question truncate'",
    )
