"""Fine-tune pre-trained models by a published protocol, on GLUE or on English for XTREME, and write one table.

The options become a specification with a grid for each task, as a file of `relpos compare` may have it. Every function
that takes `given` takes the options of `relpos finetune glue` or `relpos finetune xtreme`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relpos_fairseq.evaluation import xtreme
from relpos_fairseq.evaluation.classification import Classifier
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import write_json, write_text
from relpos_fairseq.io.progress import table
from relpos_fairseq.lab.comparison.choices import CHOICE_HEADERS, choices_of, choices_table
from relpos_fairseq.lab.comparison.protocols import PROTOCOLS, Protocol, scores_table
from relpos_fairseq.lab.comparison.run import Run
from relpos_fairseq.lab.comparison.scheduling import Comparison
from relpos_fairseq.lab.comparison.spec import make_spec
from relpos_fairseq.lab.comparison.tasks.base import device
from relpos_fairseq.lab.comparison.tasks.glue import MODEL_FLAG, PRETRAINED, Pretrained, read_pretrained
from relpos_fairseq.preparation.glue_tasks import HIGHEST_SCORE, LOWEST_SCORE, TASKS, GlueTask, chosen_tasks

NAMED = re.compile(r"(?P<name>[\w+.-]+)=(?P<path>.+)")
# GLUE's server's names of test sets, where they are not their tasks'.
SUBMITTED = {("MNLI", "test"): "MNLI-m", ("MNLI", "test1"): "MNLI-mm", ("MNLI", "test2"): "AX"}
HEADERS = ("model", *CHOICE_HEADERS[1:-1])  # the scores stand in a table of their own


def finetune_glue(given: Any) -> int:
    """Make every run of a protocol that is not there; print and write the table.

    Returns:
        The exit status: 1 where a run failed.
    """
    tasks, protocol = tasks_of(given), PROTOCOLS[given.protocol]
    own = {"kind": "glue", "data": str(given.data), "protocol": protocol.name, "train": flags_of(given.train_flags)}
    grids = {task.name: own | {"name": task.name} for task in tasks}
    comparison = comparison_of(given, "glue", protocol, grids, given.keep_models or given.predictions)
    status = comparison.run()
    chosen = choices_of(comparison.spec, comparison.ended())
    scores = {key: one.values for key, one in chosen.items()}
    text = scores_table(tasks, given.data, scores, list(comparison.spec.schemes))
    numbers = {"/".join(key): one.numbers() for key, one in chosen.items()}
    print_and_write(given.out / protocol.name, f"{text}\n\n{choices_table(chosen, HEADERS)}", numbers)
    for (model, task), one in chosen.items() if given.keep_models or given.predictions else ():
        checkpoint = kept_model(comparison, one.run)
        print(f"{model} fine-tuned on {task}: {checkpoint}")
        if given.predictions:
            folder, submission = (given.out / kind / protocol.name / model for kind in ("predictions", "submission"))
            cpu = "--cpu" in device()
            write_predictions(checkpoint, given.data / task, TASKS[task], folder / task, submission, cpu)
            print(f"predictions of {model} on {task}: {folder / task}")
    return status


def finetune_xtreme(given: Any, answering: Any) -> int:
    """Make every run that is not there, evaluate the chosen ones in all languages; print and write the table.

    Args:
        given: the options; what is None is left out.
        answering: the options of `relpos evaluate qa`.

    Returns:
        The exit status: 1 where a run failed.
    """
    evaluated = {name: getattr(given, name) for name in xtreme.FLAGS.values()}
    check_xtreme(given, evaluated)
    protocol, train, grids = PROTOCOLS["xtreme"], flags_of(given.train_flags), {}
    if given.xnli:
        data = str(given.xnli.resolve().parent)
        grids["XNLI"] = {"kind": "glue", "name": "XNLI", "data": data, "protocol": protocol.name, "train": train}
    if given.squad:
        flags = train | flags_of(given.squad_flags)
        grids["SQuAD"] = {"kind": "questions", "data": str(given.squad), "train": flags}
    comparison = comparison_of(given, "xtreme", protocol, grids, keep=True)
    status = comparison.run()
    chosen = choices_of(comparison.spec, comparison.ended())
    scores = {}
    for model in comparison.spec.schemes:
        runs = {task: one.runs for (name, task), one in chosen.items() if name == model}
        trials = {task: [kept_model(comparison, run) for run in some] for task, some in runs.items()}
        if trials:
            print(f"\n{model}", flush=True)
            options = xtreme.Options(
                out=given.out / "evaluated" / model,
                answering=answering,
                xnli_model=trials.get("XNLI", ()),
                xnli=given.xnli if "XNLI" in trials else None,
                qa_model=trials.get("SQuAD", ()),
                qa_data=given.squad,
                qa_flags=given.qa_flags,
                cpu="--cpu" in device(),
                **(evaluated if "SQuAD" in trials else {}),
            )
            scores[model] = xtreme.medians(xtreme.evaluate(options))
    names = [name for name in xtreme.DATA_SETS if any(name in one for one in scores.values())]
    rows = [
        [
            model,
            *(xtreme.format_score(own.get(name)) for name in names),
            xtreme.format_score(xtreme.mean_of_means([own.get(name) for name in xtreme.DATA_SETS])),
        ]
        for model, own in scores.items()
    ]
    text = table(rows, ["model", *map(xtreme.column_title, names), xtreme.MEAN_TITLE])
    text += "\n\nChosen on English; each number above is the median of the trials:\n\n"
    print_and_write(given.out / "medians", text + choices_table(chosen, HEADERS), scores)
    return status


def check_xtreme(given: Any, evaluated: dict[str, Path | None]) -> None:
    """Raise an error for data sets without training data, and for a folder that is not XNLI's."""
    if bool(given.squad) != any(evaluated.values()):
        raise UserError("--squad belongs together with one of --xquad, --mlqa, --tydiqa at least")
    if not given.xnli and not given.squad:
        raise UserError("there is nothing to fine-tune on: give --xnli or --squad")
    if given.xnli and given.xnli.resolve().name != "XNLI":
        raise UserError(f"--xnli {given.xnli}: give the folder XNLI itself, as relpos prepare glue wrote it")


def comparison_of(given: Any, name: str, protocol: Protocol, grids: dict[str, dict], keep: bool) -> Comparison:
    """Return the comparison of a command's models; errors in models and data are found before hours of work.

    Args:
        given: the options, which may replace the protocol's.
        name: the comparison's.
        protocol: the learning rates, numbers of epochs, and seeds.
        grids: the tasks' entries in a specification by label, without learning rates and numbers of epochs.
        keep: whether the fine-tuned models stay.
    """
    models = models_of(given.models)
    PRETRAINED.update({model.path: model for model in models})  # under their names, in errors
    grid = {
        "lr": list(given.lr or protocol.learning_rates),
        "epochs": list(given.epochs or protocol.epochs),
        "max_update": given.max_update,
    }
    own = flags_of(given.model_flags)
    content = {
        "schemes": {model.name: {MODEL_FLAG: str(model.path), **own} for model in models},
        "seeds": list(given.seeds or protocol.seeds),
        "tasks": {label: entry | grid for label, entry in grids.items()},
    }
    comparison = Comparison(
        make_spec(name, content), given.out, given.out / "results", threads=given.threads, keep_models=keep
    )
    for run in comparison.runs:
        run.settings  # noqa: B018  this reads data and models
    return comparison


def models_of(names: Sequence[str]) -> list[Pretrained]:
    """Read the models of the command line, `CHECKPOINT` or `NAME=CHECKPOINT`.

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


def tasks_of(given: Any) -> list[GlueTask]:
    """Return the tasks of the command line, or those that are prepared.

    Raises:
        UserError: there are none.
    """
    if given.tasks:
        return chosen_tasks(given.tasks)
    tasks = [task for task in TASKS.values() if (given.data / task.name / "task.json").is_file()]
    if not tasks:
        raise UserError(f"{given.data} has no task: make it with relpos prepare glue")
    return tasks


def flags_of(text: str) -> dict[str, str | None]:
    """Return the flags of a command line with their values.

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


def kept_model(comparison: Comparison, run: Run) -> Path:
    """Return a run's checkpoint that counts; one that was not kept is an error."""
    folder = comparison.folder(run)
    path = folder / "checkpoints" / f"checkpoint_{run.task.checkpoint}.pt"
    if not path.is_file():
        raise UserError(
            f"--keep-models, --predictions: {folder} has no model, since its run was made without: delete its "
            f"result, {folder.name}.json, and run the same command again"
        )
    return path


def print_and_write(place: Path, text: str, numbers: dict) -> None:
    """Print a table, and write it as Markdown with its numbers as JSON beside it."""
    print(f"\n{text}")
    write_text(place.with_name(f"{place.name}.md"), f"{text}\n")
    write_json(place.with_name(f"{place.name}.json"), numbers)


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
        if task.regression:
            outputs, right = classifier.outputs(split)
            predicted = [f"{min(max(float(one), LOWEST_SCORE), HIGHEST_SCORE):.3f}" for one in outputs]
            right = right and [f"{one:.3f}" for one in right]
        else:
            predicted, right = classifier.predict(split)
        write_text(folder / f"{split}.tsv", _tsv([predicted] if right is None else [predicted, right]))
        if split.startswith("test"):
            written.append(submission / f"{SUBMITTED.get((task.name, split), task.name)}.tsv")
            write_text(written[-1], _tsv([predicted]))
    return written


def _tsv(columns: list[list[str]]) -> str:
    """Return numbered rows under a header: `index`, `prediction`, and `label` where there are labels."""
    rows = zip(range(len(columns[0])), *columns, strict=True)
    header = ("index", "prediction", "label")[: len(columns) + 1]
    return "".join("\t".join(map(str, row)) + "\n" for row in (header, *rows))
