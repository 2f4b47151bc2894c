"""All runs of a protocol, and their table."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos_fairseq.comparison.cell import Cell
from relpos_fairseq.comparison.commands import device
from relpos_fairseq.comparison.glue.pretrained import Pretrained, read_pretrained
from relpos_fairseq.comparison.glue.protocols import (
    PROTOCOLS,
    Protocol,
    Result,
    Summary,
    summarise,
)
from relpos_fairseq.comparison.glue.tables import choices, scores
from relpos_fairseq.comparison.runs import Comparison
from relpos_fairseq.comparison.spec import Spec
from relpos_fairseq.comparison.tasks.glue import MODEL, MODELS, Glue
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import write_json, write_text
from relpos_fairseq.preparation.glue.tasks import TASKS, Task, chosen_tasks

NAMED = re.compile(r"(?P<name>[\w+.-]+)=(?P<path>.+)")


@dataclass(frozen=True)
class Options:
    """What is fine-tuned, and how.

    Raises:
        PreparationError: a value is wrong.
    """

    data: Path  # folder that `relpos prepare glue` wrote
    models: list[str]  # pre-trained checkpoints, `path` or `name=path`
    out: Path  # folder of the runs and the table
    protocol: str = "huang"  # `huang` or `chen`
    tasks: str | None = None  # names joined by commas; None: those in `data`
    # other learning rates than the protocol's; epochs and seeds likewise
    lr: list[float] | None = None
    epochs: list[int] | None = None
    seeds: list[int] | None = None
    max_update: int = 0  # updates that end a run; 0: none
    model_flags: str = ""  # flags of the model beside its checkpoint's, as in a shell
    train_flags: str = ""  # further flags of fairseq-train
    keep_models: bool = False  # whether each run's model is kept
    # whether the models that the table reports predict all sets (keeps models)
    predictions: bool = False
    threads: int = 1  # threads of a run

    def __post_init__(self) -> None:
        check_search(self)
        if not self.data.is_dir():
            raise PreparationError(f"there is no folder {self.data}: make it with prepare_glue.py")


def check_search(options: Any) -> None:
    """Refuse values of a search that cannot be: lr, epochs, seeds, max_update, threads.

    Raises:
        PreparationError: names the option.
    """
    for name in ("lr", "epochs", "seeds"):
        if any(value <= 0 for value in getattr(options, name) or ()):
            raise PreparationError(f"--{name} must be above 0, got {getattr(options, name)}")
    if options.max_update < 0 or options.threads < 1:
        raise PreparationError("--max-update must not be negative, --threads at least 1")


def finetune(options: Options) -> int:
    """Make every run of a protocol that is not there; print and write the table.

    Returns:
        The exit status: 1 where a run failed.

    Raises:
        ValueError: what is wrong with the input or the options.
    """
    protocol = PROTOCOLS[options.protocol]
    tasks, models = tasks_of(options), models_of(options.models)
    spec = plan(options, protocol, models, tasks)
    comparison = Comparison(
        spec,
        options.out,
        options.out / "results",
        threads=options.threads,
        keep=options.keep_models or options.predictions,
    )
    for cell in comparison.cells:
        cell.settings  # noqa: B018  whatever is wrong with the data is said before hours of work
    status = comparison.run()
    results: dict[tuple[str, str], list[Result]] = {}
    for cell in comparison.cells:
        if found := comparison.result(cell):
            folder = cell.folder(comparison.work, comparison.code)
            one = result_of(cell, found, folder)
            results.setdefault((cell.scheme, cell.task.name), []).append(one)
    chosen = {
        key: summarise(some, TASKS[key[1]].metrics[0], protocol.checkpoint)
        for key, some in results.items()
    }
    report(options, tasks, models, chosen)
    if options.predictions:
        predict(options, chosen, "--cpu" in device())
    return status


def result_of(cell: Cell, found: dict, folder: Path) -> Result:
    """Return a run's validations by metric; those of a second set begin with its name."""
    validations = tuple(
        {name.removeprefix("valid_"): value for name, value in one.items()}
        for one in found["validations"]
    )
    return Result(cell.task.lr, cell.task.epochs, cell.seed, validations, folder)


def predict(options: Options, found: dict[tuple[str, str], Summary], cpu: bool) -> None:
    """Let the models that the table reports predict all sets, and write what GLUE's server takes.

    Raises:
        PreparationError: a run was made without keeping its model.
    """
    from relpos_fairseq.comparison.glue.predictions import kept_model, write_predictions

    for (model, task), one in found.items():
        folder = options.out / "predictions" / options.protocol / model
        submission = options.out / "submission" / options.protocol / model
        data, checkpoint = (
            options.data / task,
            kept_model(one.folder, PROTOCOLS[options.protocol].checkpoint),
        )
        write_predictions(checkpoint, data, TASKS[task], folder / task, submission, cpu)
        print(f"predictions of {model} on {task}: {folder / task}")


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


def plan(options: Options, protocol: Protocol, models: list[Pretrained], tasks: list[Task]) -> Spec:
    """Return all runs as a comparison: a task for each learning rate and number of epochs."""
    train = flags_of(options.train_flags)
    made = {}
    for task in tasks:
        for rate in options.lr or protocol.learning_rates:
            for epochs in options.epochs or protocol.epochs:
                label = f"{task.name}-lr{rate:g}-epochs{epochs}"
                made[label] = Glue(
                    label=label,
                    train=train,
                    data=options.data,
                    name=task.name,
                    protocol=protocol.name,
                    lr=rate,
                    epochs=epochs,
                    max_update=options.max_update,
                )
    own = flags_of(options.model_flags)
    MODELS.update({model.path: model for model in models})  # under their names, in errors
    schemes = {model.name: {MODEL: str(model.path), **own} for model in models}
    seeds = tuple(options.seeds or protocol.seeds)
    return Spec("glue", "GLUE", schemes, seeds, made, models[0].name, ())


def flags_of(text: str) -> dict[str, str | None]:
    """Return flags as on a command line.

    Raises:
        PreparationError: a value stands without its flag.
    """
    flags: dict[str, str | None] = {}
    last = None
    for word in shlex.split(text):
        if word.startswith("--"):
            last, _, value = word.removeprefix("--").partition("=")
            flags[last] = value or None
        elif last is None:
            raise PreparationError(f"{text!r}: {word} belongs to no flag")
        else:
            flags[last] = f"{flags[last]} {word}" if flags[last] else word
    return flags


def report(
    options: Options,
    tasks: list[Task],
    models: list[Pretrained],
    found: dict[tuple[str, str], Summary],
) -> None:
    """Print and write the tables."""
    text = scores(tasks, options.data, found, [model.name for model in models])
    text = f"{text}\n\n{choices(found, options.max_update)}"
    print(f"\n{text}")
    write_text(options.out / f"{options.protocol}.md", f"{text}\n")
    named = {}
    for (model, task), one in found.items():
        named[f"{model}/{task}"] = {key: vars(one)[key] for key in vars(one) if key != "folder"}
    write_json(options.out / f"{options.protocol}.json", named)
