"""All runs of a protocol, and their table."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.comparison.glue.pretrained import Pretrained, read_pretrained
from relpos_fairseq.comparison.glue.protocols import PROTOCOLS, Protocol, Summary, summarise
from relpos_fairseq.comparison.glue.runs import Finetuning, Shared
from relpos_fairseq.comparison.glue.tables import choices, scores
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import Hashes, write_json, write_text
from relpos_fairseq.preparation.glue.tasks import TASKS, Task, chosen_tasks

NAMED = re.compile(r"(?P<name>[\w+.-]+)=(?P<path>.+)")


@dataclass(frozen=True)
class Options:
    """What is fine-tuned, and how.

    Attributes:
        data: folder that `relpos prepare glue` wrote.
        models: pre-trained checkpoints, `path` or `name=path`.
        out: folder of the runs and the table.
        protocol: `huang` or `chen`.
        tasks: names joined by commas; None: those in `data`.
        lr: other learning rates than the protocol's; epochs and seeds likewise.
        max_update: updates that end a run; 0: none.
        model_flags: flags of the model beside its checkpoint's, as in a shell.
        train_flags: further flags of fairseq-train.
        keep_models: whether each run's model is kept.
        threads: threads of a run.

    Raises:
        PreparationError: a value is wrong.
    """

    data: Path
    models: list[str]
    out: Path
    protocol: str = "huang"
    tasks: str | None = None
    lr: list[float] | None = None
    epochs: list[int] | None = None
    seeds: list[int] | None = None
    max_update: int = 0
    model_flags: str = ""
    train_flags: str = ""
    keep_models: bool = False
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("lr", "epochs", "seeds"):
            if any(value <= 0 for value in getattr(self, name) or ()):
                raise PreparationError(f"--{name} must be above 0, got {getattr(self, name)}")
        if self.max_update < 0 or self.threads < 1:
            raise PreparationError("--max-update must not be negative, --threads at least 1")
        if not self.data.is_dir():
            raise PreparationError(f"there is no folder {self.data}: make it with prepare_glue.py")


def finetune(options: Options) -> None:
    """Make every run of a protocol that is not there; print and write the table.

    Raises:
        ValueError: what is wrong with the input or the options.
        ToolError: a run failed.
    """
    protocol = PROTOCOLS[options.protocol]
    tasks, models = tasks_of(options), models_of(options.models)
    more = shlex.split(options.train_flags)
    more = (*shlex.split(options.model_flags), *more, *device_flags(more))
    shared = Shared(
        data=options.data,
        out=options.out,
        checkpoint=protocol.checkpoint,
        interval=protocol.interval,
        max_update=options.max_update,
        keep=options.keep_models,
        threads=options.threads,
        more=more,
    )
    runs = plan(options, protocol, models, tasks)
    for run in runs:
        run.arguments(shared)  # whatever is wrong with the data is said before hours of work
    hashes = Hashes()
    results: dict[tuple[str, str], list] = {}
    for number, run in enumerate(runs, start=1):
        chosen = f"learning rate {run.learning_rate:g}, {run.epochs} epochs, seed {run.seed}"
        where = f"[{number}/{len(runs)}] {run.model.name} on {run.task.name}"
        print(f"{where}, {chosen} ...", flush=True)
        result = run.finish(shared, [hashes.of(path) for path in run.inputs(shared)])
        results.setdefault((run.model.name, run.task.name), []).append(result)
        metric = run.task.metrics[0]
        print(f"    {metric} {result.counted(metric, protocol.checkpoint)[metric]:.2f}", flush=True)
    found = {
        key: summarise(some, TASKS[key[1]].metrics[0], protocol.checkpoint)
        for key, some in results.items()
    }
    report(options, tasks, models, found)


def models_of(names: Sequence[str]) -> list[Pretrained]:
    """Return the models of the command line.

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


def tasks_of(options: Options) -> list[Task]:
    """Return the tasks of the command line, or those that are prepared.

    Raises:
        PreparationError: there are none.
    """
    if options.tasks:
        return chosen_tasks(options.tasks)
    tasks = [task for task in TASKS.values() if (options.data / task.name / "task.json").is_file()]
    if not tasks:
        raise PreparationError(f"{options.data} has no task: make it with prepare_glue.py")
    return tasks


def plan(
    options: Options, protocol: Protocol, models: list[Pretrained], tasks: list[Task]
) -> list[Finetuning]:
    """Return all runs, a model after the other."""
    return [
        Finetuning(model, task, learning_rate, epochs, seed)
        for model in models
        for task in tasks
        for learning_rate in options.lr or protocol.learning_rates
        for epochs in options.epochs or protocol.epochs
        for seed in options.seeds or protocol.seeds
    ]


def device_flags(given: Sequence[str]) -> list[str]:
    """Return --cpu where there is no GPU, and one process, as flags."""
    import torch

    flags = [] if "--cpu" in given or torch.cuda.is_available() else ["--cpu"]
    if "--distributed-world-size" not in given and "RANK" not in os.environ:
        flags += ["--distributed-world-size", "1"]
    return flags


def report(
    options: Options,
    tasks: list[Task],
    models: list[Pretrained],
    found: dict[tuple[str, str], Summary],
) -> None:
    """Print and write the tables."""
    text = scores(tasks, options.data, found, [model.name for model in models])
    print(f"\n{text}\n\n{choices(found)}")
    write_text(options.out / f"{options.protocol}.md", f"{text}\n\n{choices(found)}\n")
    write_json(
        options.out / f"{options.protocol}.json",
        {f"{model}/{task}": vars(one) for (model, task), one in found.items()},
    )
