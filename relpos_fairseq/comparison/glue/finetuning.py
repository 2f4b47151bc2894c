"""All runs of a protocol, and their table."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.comparison.commands import device
from relpos_fairseq.comparison.glue.pretrained import Pretrained, read_pretrained
from relpos_fairseq.comparison.glue.protocols import PROTOCOLS, Protocol, Result, Summary, summarise
from relpos_fairseq.comparison.glue.tables import choices, scores
from relpos_fairseq.comparison.runs import Comparison
from relpos_fairseq.comparison.spec import Spec
from relpos_fairseq.comparison.tasks import base
from relpos_fairseq.comparison.tasks.glue import MODEL, MODELS, Glue
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import write_json, write_text
from relpos_fairseq.preparation.glue.tasks import TASKS, Task, chosen_tasks

NAMED = re.compile(r"(?P<name>[\w+.-]+)=(?P<path>.+)")


@dataclass(frozen=True, kw_only=True)
class Search:
    """The runs of pre-trained models by a protocol; values that cannot be are refused."""

    models: list[str]  # pre-trained checkpoints, `path` or `name=path`
    out: Path  # folder of the runs, the predictions and the table
    # other learning rates than the protocol's; epochs and seeds likewise
    lr: list[float] | None = None
    epochs: list[int] | None = None
    seeds: list[int] | None = None
    max_update: int = 0  # updates that end a run; 0: none
    model_flags: str = ""  # flags of the model beside its checkpoint's, as in a shell
    train_flags: str = ""  # further flags of fairseq-train
    threads: int = 1  # threads of a run

    def __post_init__(self) -> None:
        for name in ("lr", "epochs", "seeds"):
            if any(value <= 0 for value in getattr(self, name) or ()):
                raise PreparationError(f"--{name} must be above 0, got {getattr(self, name)}")
        if self.max_update < 0 or self.threads < 1:
            raise PreparationError("--max-update must not be negative, --threads at least 1")

    def settings(self, protocol: Protocol) -> dict[str, dict[str, float]]:
        """Return options of tasks by name, for each learning rate and number of epochs."""
        return {
            f"lr{rate:g}-epochs{n}": {"lr": rate, "epochs": n, "max_update": self.max_update}
            for rate in self.lr or protocol.learning_rates
            for n in self.epochs or protocol.epochs
        }

    def spec(
        self, name: str, title: str, protocol: Protocol, models: list[Pretrained], tasks: dict[str, base.Task]
    ) -> Spec:
        """Return all runs as a comparison of the models."""
        own = flags_of(self.model_flags)
        MODELS.update({model.path: model for model in models})  # under their names, in errors
        schemes = {model.name: {MODEL: str(model.path), **own} for model in models}
        seeds = tuple(self.seeds or protocol.seeds)
        return Spec(name, title, schemes, seeds, tasks, models[0].name, ())

    def run(self, spec: Spec, keep: bool) -> tuple[int, dict[tuple[str, str], list[Result]]]:
        """Make every run that is not there.

        Returns:
            The exit status, 1 where a run failed; results by model and task.
        """
        comparison = Comparison(spec, self.out, self.out / "results", threads=self.threads, keep=keep)
        for cell in comparison.cells:
            cell.settings  # noqa: B018  what is wrong with the data is said before hours of work
        status, results = comparison.run(), defaultdict(list)
        for cell in comparison.cells:
            if found := comparison.result(cell):
                # Those of a second set begin with its name.
                validations = tuple(
                    {name.removeprefix("valid_"): value for name, value in one.items()} for one in found["validations"]
                )
                task, folder = cell.task, cell.folder(comparison.work, comparison.code)
                one = Result(task.lr, task.epochs, cell.seed, validations, folder)
                results[cell.scheme, task.name].append(one)
        return status, results


@dataclass(frozen=True, kw_only=True)
class Options(Search):
    """What is fine-tuned on GLUE, and how."""

    data: Path  # folder that `relpos prepare glue` wrote
    protocol: str = "huang"  # of PROTOCOLS
    tasks: str | None = None  # names joined by commas; None: those in `data`
    keep_models: bool = False  # whether each run's model is kept
    # whether the models that the table reports predict all sets (keeps models)
    predictions: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data.is_dir():
            raise PreparationError(f"there is no folder {self.data}: make it with relpos prepare glue")


def finetune(options: Options) -> int:
    """Make every run of a protocol that is not there; print and write the table.

    Returns:
        The exit status: 1 where a run failed.
    """
    protocol = PROTOCOLS[options.protocol]
    tasks, models = tasks_of(options), models_of(options.models)
    train, made = flags_of(options.train_flags), {}
    for task in tasks:
        own = {"train": train, "data": options.data, "name": task.name, "protocol": protocol.name}
        for name, setting in options.settings(protocol).items():
            label = f"{task.name}-{name}"
            made[label] = Glue(label=label, **own, **setting)
    spec = options.spec("glue", "GLUE", protocol, models, made)
    status, results = options.run(spec, options.keep_models or options.predictions)
    chosen = {key: summarise(some, TASKS[key[1]].metrics[0], protocol.checkpoint) for key, some in results.items()}
    report(options, tasks, models, chosen)
    if options.predictions:
        predict(options, chosen, "--cpu" in device())
    return status


def predict(options: Options, found: dict[tuple[str, str], Summary], cpu: bool) -> None:
    """Let the models that the table reports predict all sets, and write what GLUE's server takes.

    Raises:
        PreparationError: a run was made without keeping its model.
    """
    from relpos_fairseq.comparison.glue.predictions import kept_model, write_predictions

    for (model, task), one in found.items():
        folder = options.out / "predictions" / options.protocol / model
        submission = options.out / "submission" / options.protocol / model
        data, checkpoint = (options.data / task, kept_model(one.folder, PROTOCOLS[options.protocol].checkpoint))
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
        raise PreparationError(f"{options.data} has no task: make it with relpos prepare glue")
    return tasks


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
    options: Options, tasks: list[Task], models: list[Pretrained], found: dict[tuple[str, str], Summary]
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
