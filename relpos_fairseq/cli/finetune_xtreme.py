r"""Fine-tune pre-trained models on English and evaluate them in every language (XTREME).

    relpos finetune xtreme chen=checkpoints/multilingual/checkpoint_best.pt --out runs/xtreme \
        --xnli data-bin/xtreme/XNLI --squad data-bin/squad \
        --xquad xquad --mlqa MLQA_V1/test --tydiqa tydiqa-goldp-v1.1-dev

As Chen et al. 2021, section 4.2 and Table 7: XNLI's and SQuAD's English training data, 3 epochs,
batches of 32, learning rates 1e-5 to 4e-5, five trials. Of each model and data set the learning
rate with the best median on English is evaluated in all languages; a row a model, each number the
median of its trials. Runs that have ended and evaluations are kept: the same command goes on.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.cli.evaluate_xtreme import add_questions, answering_of
from relpos_fairseq.cli.finetune_glue import add_training

HELP = "fine-tune on English, evaluate in every language of XTREME: 004's table"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("models", nargs="+", metavar="[NAME=]CHECKPOINT", help="pre-trained models")
    add("--out", type=Path, required=True, help="folder of the runs, predictions and the table")
    add("--xnli", type=Path, help="XNLI, as `relpos prepare glue` wrote it")
    add("--squad", type=Path, help="English questions, as `relpos prepare qa` wrote them")
    add_questions(add)
    add_training(add)
    add(
        "--squad-flags",
        default="",
        metavar="'--FLAG ...'",
        help="of fairseq-train for questions alone: --squad-flags='--tokens-per-sample 384'",
    )


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from relpos_fairseq.comparison.xtreme.finetuning import Options, finetune

    return finetune(Options(**vars(args), answering=answering_of(args.qa_flags)))
