r"""Fine-tune pre-trained models on GLUE by a published protocol and print one table.

    relpos finetune glue data-bin/glue m4=checkpoints/m4.pt m4m=checkpoints/m4m.pt \
        --protocol huang --tasks RTE,MRPC,CoLA,STS-B --out runs/glue

Runs that have ended are kept: the same command again goes on where it was interrupted, and with
more models, tasks or learning rates it does what is missing. Several commands may share the work if
each has tasks or models of its own.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

HELP = "fine-tune pre-trained models on GLUE by a published protocol"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("data", type=Path, help="folder that `relpos prepare glue` wrote")
    add("models", nargs="+", metavar="[NAME=]CHECKPOINT", help="pre-trained models")
    add("--out", type=Path, required=True, help="folder of the runs and the table")
    add(
        "--protocol",
        choices=("huang", "multiplicative", "chen", "xtreme"),
        default="huang",
        help="huang: 3 epochs, 3e-5; multiplicative: 3 epochs, best of 2e-5, 3e-5, 4e-5; chen: 5 "
        "or 10 epochs, 1e-5 to 4e-5, median of five runs' best checkpoints; xtreme: its XNLI, "
        "3 epochs (default: %(default)s)",
    )
    add("--tasks", help="separated by commas (default: those in DATA)")
    add_training(add)
    add(
        "--predictions",
        action="store_true",
        help="let the models that the table reports predict all sets: OUT/predictions, and for "
        "GLUE's server OUT/submission; keeps the models",
    )
    add("--keep-models", action="store_true", help="keep each run's model")


def add_training(add: Callable[..., object]) -> None:
    """Add what every fine-tuning by a protocol takes."""
    add("--lr", type=float, nargs="+", help="other learning rates than the protocol's")
    add("--epochs", type=int, nargs="+", help="other numbers of epochs")
    add("--seeds", type=int, nargs="+", help="other seeds")
    add("--max-update", type=int, default=0, help="end runs after so many updates")
    add(
        "--model-flags",
        default="",
        metavar="'--FLAG ...'",
        help="the model's, beside its own: --model-flags='--segment-encoding head'",
    )
    add("--train-flags", default="", metavar="'--FLAG ...'", help="further ones of fairseq-train: --train-flags=--fp16")
    add("--threads", type=int, default=1, help="threads of a run (default: %(default)s)")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from relpos_fairseq.comparison.glue.finetuning import Options, finetune

    return finetune(Options(**vars(args)))
