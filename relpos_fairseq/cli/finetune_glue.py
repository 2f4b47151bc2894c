#!/usr/bin/env python3
"""Fine-tunes pre-trained models on GLUE by a published protocol and prints one table.

    python scripts/finetune_glue.py data-bin/glue m4=checkpoints/m4.pt m4m=checkpoints/m4m.pt \
        --protocol huang --tasks RTE,MRPC,CoLA,STS-B --out runs/glue

Runs that have ended are kept: the same command again goes on where it was interrupted, and with
more models, tasks or learning rates it does what is missing. Several commands may share the work if
each has tasks or models of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.comparison.glue.pretrained import Pretrained, read_pretrained
from relpos_fairseq.comparison.glue.protocols import PROTOCOLS, Protocol, Summary, summarise
from relpos_fairseq.comparison.glue.runs import Run, Settings
from relpos_fairseq.comparison.glue.tables import choices, scores
from relpos_fairseq.engine.command import run_command
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import sha256_of, write_json, write_text
from relpos_fairseq.preparation.glue.tasks import TASKS, Task, chosen_tasks

NAMED = re.compile(r"(?P<name>[\w+.-]+)=(?P<path>.+)")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read and check the command line.

    Raises:
        PreparationError: a value is wrong.
    """
    parser = argparse.ArgumentParser(prog="finetune_glue.py", description="Fine-tune on GLUE.")
    add = parser.add_argument
    add("data", type=Path, help="folder that prepare_glue.py wrote")
    add("models", nargs="+", metavar="[NAME=]CHECKPOINT", help="pre-trained models")
    add("--out", type=Path, required=True, help="folder of the runs and the table")
    add("--protocol", choices=PROTOCOLS, default="huang",
        help="huang: 3 epochs, best of 2e-5, 3e-5, 4e-5; chen: 5 or 10 epochs, 1e-5 to 4e-5, "
        "median of five runs' best checkpoints (default: %(default)s)")  # fmt: skip
    add("--tasks", help="separated by commas (default: those in DATA)")
    add("--lr", type=float, nargs="+", help="other learning rates than the protocol's")
    add("--epochs", type=int, nargs="+", help="other numbers of epochs")
    add("--seeds", type=int, nargs="+", help="other seeds")
    add("--max-update", type=int, default=0, help="end runs after so many updates")
    add("--model-flags", default="", metavar="'--FLAG ...'",
        help="the model's, beside its own: --model-flags='--segment-encoding head'")  # fmt: skip
    add("--train-flags", default="", metavar="'--FLAG ...'",
        help="further ones of fairseq-train: --train-flags=--fp16")  # fmt: skip
    add("--keep-models", action="store_true", help="keep each run's model as model.pt")
    add("--threads", type=int, default=1, help="threads of a run (default: %(default)s)")
    args = parser.parse_args(argv)
    for name in ("lr", "epochs", "seeds"):
        if any(value <= 0 for value in getattr(args, name) or ()):
            raise PreparationError(f"--{name} must be above 0, got {getattr(args, name)}")
    if args.max_update < 0 or args.threads < 1:
        raise PreparationError("--max-update must not be negative, --threads at least 1")
    if not args.data.is_dir():
        raise PreparationError(f"there is no folder {args.data}: make it with prepare_glue.py")
    return args


def models_of(names: Sequence[str]) -> list[Pretrained]:
    """The models of the command line.

    Raises:
        PreparationError: two have the same name.
    """
    models = {}
    for text in names:
        match = NAMED.fullmatch(text)
        name, path = (match["name"], match["path"]) if match else (Path(text).stem, text)
        if name in models:
            raise PreparationError(f"two models are called {name!r}: give names, NAME=CHECKPOINT")
        models[name] = read_pretrained(name, Path(path))
    return list(models.values())


def tasks_of(args: argparse.Namespace) -> list[Task]:
    """The tasks of the command line, or those that are prepared.

    Raises:
        PreparationError: there are none.
    """
    if args.tasks:
        return chosen_tasks(args.tasks)
    tasks = [task for task in TASKS.values() if (args.data / task.name / "task.json").is_file()]
    if not tasks:
        raise PreparationError(f"{args.data} has no task: make it with prepare_glue.py")
    return tasks


def main(argv: Sequence[str] | None = None) -> None:
    """Fine-tune.

    Raises:
        ValueError: what is wrong with the input or the command line, or a run that failed.
    """
    args = parse(argv)
    protocol = PROTOCOLS[args.protocol]
    tasks, models = tasks_of(args), models_of(args.models)
    more = shlex.split(args.train_flags)
    more = (*shlex.split(args.model_flags), *more, *device_flags(more))
    settings = Settings(args.data, args.out, protocol.checkpoint, protocol.interval,
                        args.max_update, args.keep_models, args.threads, more)  # fmt: skip
    runs = plan(args, protocol, models, tasks)
    for run in runs:
        run.arguments(settings)  # whatever is wrong with the data is said before hours of work
    inputs = dict.fromkeys(path for run in runs for path in run.inputs(settings))
    keys = {path: sha256_of(path) for path in inputs}
    results: dict[tuple[str, str], list] = {}
    for number, run in enumerate(runs, start=1):
        chosen = f"learning rate {run.learning_rate:g}, {run.epochs} epochs, seed {run.seed}"
        where = f"[{number}/{len(runs)}] {run.model.name} on {run.task.name}"
        print(f"{where}, {chosen} ...", flush=True)
        result = run.finish(settings, [keys[path] for path in run.inputs(settings)])
        results.setdefault((run.model.name, run.task.name), []).append(result)
        metric = run.task.metrics[0]
        print(f"    {metric} {result.counted(metric, protocol.checkpoint)[metric]:.2f}", flush=True)
    found = {
        key: summarise(some, TASKS[key[1]].metrics[0], protocol.checkpoint)
        for key, some in results.items()
    }
    report(args, tasks, models, found)


def plan(
    args: argparse.Namespace, protocol: Protocol, models: list[Pretrained], tasks: list[Task]
) -> list[Run]:
    """All runs, a model after the other."""
    return [
        Run(model, task, learning_rate, epochs, seed)
        for model in models
        for task in tasks
        for learning_rate in args.lr or protocol.learning_rates
        for epochs in args.epochs or protocol.epochs
        for seed in args.seeds or protocol.seeds
    ]


def device_flags(given: Sequence[str]) -> list[str]:
    """--cpu where there is no GPU, and one process."""
    import torch

    flags = [] if "--cpu" in given or torch.cuda.is_available() else ["--cpu"]
    if "--distributed-world-size" not in given and "RANK" not in os.environ:
        flags += ["--distributed-world-size", "1"]
    return flags


def report(
    args: argparse.Namespace,
    tasks: list[Task],
    models: list[Pretrained],
    found: dict[tuple[str, str], Summary],
) -> None:
    """Print and write the tables."""
    text = scores(tasks, args.data, found, [model.name for model in models])
    print(f"\n{text}\n\n{choices(found)}")
    write_text(args.out / f"{args.protocol}.md", f"{text}\n\n{choices(found)}\n")
    write_json(
        args.out / f"{args.protocol}.json",
        {f"{model}/{task}": vars(one) for (model, task), one in found.items()},
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
