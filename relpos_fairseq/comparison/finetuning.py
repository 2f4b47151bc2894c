"""Fine-tune pre-trained models by a published protocol, on GLUE or on English for XTREME, and write one table."""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.comparison.protocols import (
    PROTOCOLS,
    Protocol,
    Result,
    Summary,
    choices_table,
    scores_table,
    summarise,
)
from relpos_fairseq.comparison.scheduling import Comparison
from relpos_fairseq.comparison.spec import Spec
from relpos_fairseq.comparison.tasks import base
from relpos_fairseq.comparison.tasks.base import Task, device
from relpos_fairseq.comparison.tasks.glue import MODEL_FLAG, PRETRAINED, Glue, Pretrained, Questions, read_pretrained
from relpos_fairseq.evaluation import classification, xtreme
from relpos_fairseq.evaluation.classification import Classifier
from relpos_fairseq.evaluation.questions import Options as Answering
from relpos_fairseq.evaluation.xtreme import QA_FILES
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import write_json, write_text
from relpos_fairseq.io.progress import table
from relpos_fairseq.preparation.glue_tasks import HIGHEST_SCORE, LOWEST_SCORE, TASKS, GlueTask, chosen_tasks

# ---- What a fine-tuned model predicts on GLUE's sets, and the files that GLUE's server takes.


# The server's names, where a task's is not its own.
SUBMITTED = {("MNLI", "test"): "MNLI-m", ("MNLI", "test1"): "MNLI-mm", ("MNLI", "test2"): "AX"}


def write_predictions(
    checkpoint: Path, data: Path, task: GlueTask, folder: Path, submission: Path, cpu: bool = False
) -> list[Path]:
    """Predict every validation and test set of a task; return the files for GLUE's server.

    Args:
        checkpoint: of `relpos finetune glue`.
        data: the task's folder of `relpos prepare glue`.
        task: the task.
        folder: takes SPLIT.tsv: `index`, `prediction` and, where it is known, `label`.
        submission: takes the test sets' files under the names of GLUE's server.
        cpu: whether to leave a GPU alone.
    """
    classifier = Classifier(checkpoint, data, cpu)
    found = sorted(path.stem for path in (data / "input0").glob("*.idx"))
    written = []
    for split in (name for name in found if name.startswith(("valid", "test"))):
        predicted, right = _regression_scores(classifier, split) if task.regression else classifier.predict(split)
        columns = [predicted] if right is None else [predicted, right]
        write_text(folder / f"{split}.tsv", _tsv(columns))
        if split.startswith("test"):
            name = SUBMITTED.get((task.name, split), task.name)
            written.append(submission / f"{name}.tsv")
            write_text(written[-1], _tsv([predicted]))
    return written


def _regression_scores(classifier: Classifier, split: str) -> tuple[list[str], list[str] | None]:
    outputs, right = classifier.outputs(split)
    scores = (min(max(float(one), LOWEST_SCORE), HIGHEST_SCORE) for one in outputs)
    return [f"{score:.3f}" for score in scores], right and [f"{one:.3f}" for one in right]


def _tsv(columns: list[list[str]]) -> str:
    header = ("index", "prediction", "label")[: len(columns) + 1]
    rows: Iterable[tuple] = zip(range(len(columns[0])), *columns, strict=True)
    return "".join("\t".join(map(str, row)) + "\n" for row in (header, *rows))


def kept_model(folder: Path, which: str) -> Path:
    """Return a run's model, `last` or `best`; one that was not kept is an error."""
    path = folder / "checkpoints" / f"checkpoint_{which}.pt"
    if not path.is_file():
        raise UserError(
            f"--predictions: {folder} has no model, since its run was made without: delete its "
            f"result, {folder.name}.json, and run the same command again"
        )
    return path


# ---- All runs of a protocol, and their table.


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
                raise UserError(f"--{name} must be above 0, got {getattr(self, name)}")
        if self.max_update < 0 or self.threads < 1:
            raise UserError("--max-update must not be negative, --threads at least 1")

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
        PRETRAINED.update({model.path: model for model in models})  # under their names, in errors
        schemes = {model.name: {MODEL_FLAG: str(model.path), **own} for model in models}
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
class GlueOptions(Search):
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
            raise UserError(f"there is no folder {self.data}: make it with relpos prepare glue")


def finetune_glue(options: GlueOptions) -> int:
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
    report_glue(options, tasks, models, chosen)
    if options.predictions:
        predict_sets(options, chosen, "--cpu" in device())
    return status


def predict_sets(options: GlueOptions, found: dict[tuple[str, str], Summary], cpu: bool) -> None:
    """Let the models that the table reports predict all sets, and write what GLUE's server takes.

    Raises:
        UserError: a run was made without keeping its model.
    """
    for (model, task), one in found.items():
        folder = options.out / "predictions" / options.protocol / model
        submission = options.out / "submission" / options.protocol / model
        data, checkpoint = (options.data / task, kept_model(one.folder, PROTOCOLS[options.protocol].checkpoint))
        write_predictions(checkpoint, data, TASKS[task], folder / task, submission, cpu)
        print(f"predictions of {model} on {task}: {folder / task}")


def models_of(names: Sequence[str]) -> list[Pretrained]:
    """Return the models of the command line.

    Raises:
        UserError: two have the same name.
    """
    models = {}
    for text in names:
        match = NAMED.fullmatch(text)
        name, path = (match["name"], match["path"]) if match else (Path(text).stem, text)
        if name in models:
            raise UserError(f"two models are called {name!r}: give names, NAME=CHECKPOINT")
        models[name] = read_pretrained(name, Path(path))
    return list(models.values())


def tasks_of(options: GlueOptions) -> list[GlueTask]:
    """Return the tasks of the command line, or those that are prepared.

    Raises:
        UserError: there are none.
    """
    if options.tasks:
        return chosen_tasks(options.tasks)
    tasks = [task for task in TASKS.values() if (options.data / task.name / "task.json").is_file()]
    if not tasks:
        raise UserError(f"{options.data} has no task: make it with relpos prepare glue")
    return tasks


def flags_of(text: str) -> dict[str, str | None]:
    """Return flags as on a command line.

    Raises:
        UserError: a value stands without its flag.
    """
    flags: dict[str, str | None] = {}
    last = None
    for word in shlex.split(text):
        if word.startswith("--"):
            last, _, value = word.removeprefix("--").partition("=")
            flags[last] = value or None
        elif last is None:
            raise UserError(f"{text!r}: {word} belongs to no flag")
        else:
            flags[last] = f"{flags[last]} {word}" if flags[last] else word
    return flags


def report_glue(
    options: GlueOptions, tasks: list[GlueTask], models: list[Pretrained], found: dict[tuple[str, str], Summary]
) -> None:
    """Print and write the tables."""
    text = scores_table(tasks, options.data, found, [model.name for model in models])
    text = f"{text}\n\n{choices_table(found, options.max_update)}"
    print(f"\n{text}")
    write_text(options.out / f"{options.protocol}.md", f"{text}\n")
    named = {}
    for (model, task), one in found.items():
        named[f"{model}/{task}"] = {key: vars(one)[key] for key in vars(one) if key != "folder"}
    write_json(options.out / f"{options.protocol}.json", named)


# ---- All runs of pre-trained models on XNLI and SQuAD, every language after them, and one table.


XTREME_PROTOCOL = PROTOCOLS["xtreme"]
DECIDING_METRIC = {"XNLI": "accuracy", "SQuAD": "f1"}  # on English, by which a learning rate is chosen


@dataclass(frozen=True, kw_only=True)
class XtremeOptions(Search):
    """What is fine-tuned and evaluated; what is None is left out."""

    answering: Answering  # how questions are answered
    classification: Path | None = None  # XNLI, as `relpos prepare glue` wrote it
    squad: Path | None = None  # English questions, as `relpos prepare qa` wrote them
    xquad: Path | None = None  # folder of XQuAD's files; mlqa and tydiqa likewise
    mlqa: Path | None = None
    tydiqa: Path | None = None
    squad_flags: str = ""  # further flags of fairseq-train, for questions alone
    qa_flags: str = ""  # further options of the answering, as they were given

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.squad) != any(self.evaluated.values()):
            raise UserError("--squad belongs together with one of --xquad, --mlqa, --tydiqa at least")
        if not self.xnli and not self.squad:
            raise UserError("there is nothing to fine-tune on: give --xnli or --squad")
        for path in filter(None, (self.xnli, self.squad, *self.evaluated.values())):
            if not path.is_dir():
                raise UserError(f"there is no folder {path}")
        if self.xnli and self.xnli.resolve().name != "XNLI":
            raise UserError(f"--xnli {self.xnli}: give the folder XNLI itself, as relpos prepare glue wrote it")

    @property
    def evaluated(self) -> dict[str, Path | None]:
        """Folders of the questions in other languages, by their options."""
        return {"xquad": self.xquad, "mlqa": self.mlqa, "tydiqa": self.tydiqa}


def finetune_xtreme(options: XtremeOptions) -> int:
    """Make every run that is not there, evaluate the chosen ones; print and write the table.

    Returns:
        The exit status: 1 where a run failed.
    """
    spec = xtreme_spec(options)
    status, found = options.run(spec, keep=True)
    chosen = {key: summarise(some, DECIDING_METRIC[key[1]], "last") for key, some in found.items()}
    scores = {}
    for model in spec.schemes:
        trials = {
            name: chosen_checkpoints(found[model, name], chosen[model, name])
            for name in DECIDING_METRIC
            if (model, name) in chosen
        }
        if trials:
            print(f"\n{model}", flush=True)
            scores[model] = evaluate_trials(options, model, trials)
    report_xtreme(options, scores, chosen)
    return status


def xtreme_spec(options: XtremeOptions) -> Spec:
    """Return all runs as a comparison: a task for each data set and learning rate."""
    models, train = models_of(options.models), flags_of(options.train_flags)
    made: dict[str, Task] = {}
    for name, setting in options.settings(XTREME_PROTOCOL).items():
        if options.xnli:
            label, data = f"XNLI-{name}", options.xnli.resolve().parent
            made[label] = Glue(
                label=label, train=train, data=data, name="XNLI", protocol=XTREME_PROTOCOL.name, **setting
            )
        if options.squad:
            label, flags = f"SQuAD-{name}", train | flags_of(options.squad_flags)
            made[label] = Questions(label=label, train=flags, data=options.squad, **setting)
    return options.spec("xtreme", "XTREME", XTREME_PROTOCOL, models, made)


def chosen_checkpoints(results: list[Result], chosen: Summary) -> list[Path]:
    """Return the checkpoints of the chosen learning rate and number of epochs, by seed."""
    settings = (chosen.learning_rate, chosen.epochs)
    runs = [one for one in results if (one.learning_rate, one.epochs) == settings]
    return [kept_model(one.folder, "last") for one in sorted(runs, key=lambda one: one.seed)]


def evaluate_trials(options: XtremeOptions, model: str, trials: dict[str, list[Path]]) -> dict[str, list[dict]]:
    """Evaluate a model's trials in every language; returns them by data set."""
    asked = options.evaluated if "SQuAD" in trials else {}
    return xtreme.evaluate(
        xtreme.Options(
            out=options.out / "evaluated" / model,
            answering=options.answering,
            xnli_model=trials.get("XNLI", ()),
            xnli=options.xnli if "XNLI" in trials else None,
            qa_model=trials.get("SQuAD", ()),
            qa_data=options.squad,
            qa_flags=options.qa_flags,
            cpu="--cpu" in device(),
            **asked,
        )
    )


def median_of_means(trials: dict[str, list[dict]]) -> dict[str, float | list[float] | None]:
    """Return the median over trials of the mean over all languages, by data set."""
    return {
        name: xtreme.median_of_trials([xtreme.mean_of_languages(found, ()) for found in some])
        for name, some in trials.items()
    }


def report_xtreme(
    options: XtremeOptions, scores: dict[str, dict[str, list[dict]]], chosen: dict[tuple[str, str], Summary]
) -> None:
    """Print and write a table as 004's Table 5, what was chosen, and the numbers."""
    names = [name for name in (classification.XNLI, *QA_FILES) if any(name in one for one in scores.values())]
    found = {model: median_of_means(trials) for model, trials in scores.items()}
    rows = [
        [model, *(xtreme.format_score(own.get(name)) for name in names)]
        + [xtreme.format_score(xtreme.mean_of_means([own.get(name) for name in (classification.XNLI, *QA_FILES)]))]
        for model, own in found.items()
    ]
    heads = [f"{name} ({'accuracy' if name == classification.XNLI else 'F1 / EM'})" for name in names]
    text = table(rows, ["model", *heads, "mean of 004's seven"])
    runs = "\n\nChosen on English; each number above is the median of the trials:\n\n"
    text += runs + choices_table(chosen, options.max_update)
    print(f"\n{text}")
    write_text(options.out / "medians.md", f"{text}\n")
    write_json(options.out / "medians.json", found)
