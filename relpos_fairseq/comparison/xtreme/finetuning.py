"""All runs of pre-trained models on XNLI and SQuAD, every language after them, and one table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.comparison.commands import device
from relpos_fairseq.comparison.glue.finetuning import Search, flags_of, models_of
from relpos_fairseq.comparison.glue.predictions import kept_model
from relpos_fairseq.comparison.glue.protocols import PROTOCOLS, Result, Summary, summarise
from relpos_fairseq.comparison.glue.tables import choices
from relpos_fairseq.comparison.spec import Spec
from relpos_fairseq.comparison.tasks.base import Task
from relpos_fairseq.comparison.tasks.glue import Glue
from relpos_fairseq.comparison.xtreme.questions import Questions
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import write_json, write_text
from relpos_fairseq.engine.tables import table
from relpos_fairseq.evaluation.questions import Options as Answering
from relpos_fairseq.evaluation.xtreme import languages, xnli
from relpos_fairseq.evaluation.xtreme.files import NAMES

PROTOCOL = PROTOCOLS["xtreme"]
METRIC = {"XNLI": "accuracy", "SQuAD": "f1"}  # on English, by which a learning rate is chosen


@dataclass(frozen=True, kw_only=True)
class Options(Search):
    """What is fine-tuned and evaluated; what is None is left out."""

    answering: Answering  # how questions are answered
    xnli: Path | None = None  # XNLI, as `relpos prepare glue` wrote it
    squad: Path | None = None  # English questions, as `relpos prepare qa` wrote them
    xquad: Path | None = None  # folder of XQuAD's files; mlqa and tydiqa likewise
    mlqa: Path | None = None
    tydiqa: Path | None = None
    squad_flags: str = ""  # further flags of fairseq-train, for questions alone
    qa_flags: str = ""  # further options of the answering, as they were given

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.squad) != any(self.evaluated.values()):
            raise PreparationError("--squad belongs together with one of --xquad, --mlqa, --tydiqa at least")
        if not self.xnli and not self.squad:
            raise PreparationError("there is nothing to fine-tune on: give --xnli or --squad")
        for path in filter(None, (self.xnli, self.squad, *self.evaluated.values())):
            if not path.is_dir():
                raise PreparationError(f"there is no folder {path}")
        if self.xnli and self.xnli.resolve().name != "XNLI":
            raise PreparationError(f"--xnli {self.xnli}: give the folder XNLI itself, as relpos prepare glue wrote it")

    @property
    def evaluated(self) -> dict[str, Path | None]:
        """Folders of the questions in other languages, by their options."""
        return {"xquad": self.xquad, "mlqa": self.mlqa, "tydiqa": self.tydiqa}


def finetune(options: Options) -> int:
    """Make every run that is not there, evaluate the chosen ones; print and write the table.

    Returns:
        The exit status: 1 where a run failed.
    """
    spec = plan(options)
    status, found = options.run(spec, keep=True)
    chosen = {key: summarise(some, METRIC[key[1]], "last") for key, some in found.items()}
    scores = {}
    for model in spec.schemes:
        trials = {
            name: trials_of(found[model, name], chosen[model, name]) for name in METRIC if (model, name) in chosen
        }
        if trials:
            print(f"\n{model}", flush=True)
            scores[model] = evaluate(options, model, trials)
    report(options, scores, chosen)
    return status


def plan(options: Options) -> Spec:
    """Return all runs as a comparison: a task for each data set and learning rate."""
    models, train = models_of(options.models), flags_of(options.train_flags)
    made: dict[str, Task] = {}
    for name, setting in options.settings(PROTOCOL).items():
        if options.xnli:
            label, data = f"XNLI-{name}", options.xnli.resolve().parent
            made[label] = Glue(label=label, train=train, data=data, name="XNLI", protocol=PROTOCOL.name, **setting)
        if options.squad:
            label, flags = f"SQuAD-{name}", train | flags_of(options.squad_flags)
            made[label] = Questions(label=label, train=flags, data=options.squad, **setting)
    return options.spec("xtreme", "XTREME", PROTOCOL, models, made)


def trials_of(results: list[Result], chosen: Summary) -> list[Path]:
    """Return the checkpoints of the chosen learning rate and number of epochs, by seed."""
    settings = (chosen.learning_rate, chosen.epochs)
    runs = [one for one in results if (one.learning_rate, one.epochs) == settings]
    return [kept_model(one.folder, "last") for one in sorted(runs, key=lambda one: one.seed)]


def evaluate(options: Options, model: str, trials: dict[str, list[Path]]) -> dict[str, list[dict]]:
    """Evaluate a model's trials in every language; returns them by data set."""
    asked = options.evaluated if "SQuAD" in trials else {}
    return languages.evaluate(
        languages.Options(
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


def means(trials: dict[str, list[dict]]) -> dict[str, float | list[float] | None]:
    """Return the median over trials of the mean over all languages, by data set."""
    return {name: languages.median([languages.mean(found, ()) for found in some]) for name, some in trials.items()}


def report(options: Options, scores: dict[str, dict[str, list[dict]]], chosen: dict[tuple[str, str], Summary]) -> None:
    """Print and write a table as 004's Table 5, what was chosen, and the numbers."""
    names = [name for name in (xnli.NAME, *NAMES) if any(name in one for one in scores.values())]
    found = {model: means(trials) for model, trials in scores.items()}
    rows = [
        [model, *(languages.cell(own.get(name)) for name in names)]
        + [languages.cell(languages.average([own.get(name) for name in (xnli.NAME, *NAMES)]))]
        for model, own in found.items()
    ]
    heads = [f"{name} ({'accuracy' if name == xnli.NAME else 'F1 / EM'})" for name in names]
    text = table(rows, ["model", *heads, "mean of 004's seven"])
    runs = "\n\nChosen on English; each number above is the median of the trials:\n\n"
    text += runs + choices(chosen, options.max_update)
    print(f"\n{text}")
    write_text(options.out / "medians.md", f"{text}\n")
    write_json(options.out / "medians.json", found)
