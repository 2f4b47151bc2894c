"""Evaluate models fine-tuned on English in every language of XTREME that is given."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from relpos_fairseq.data.squad import split_name
from relpos_fairseq.evaluation import classification, questions
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_folder, write_json, write_text
from relpos_fairseq.io.progress import table
from relpos_fairseq.io.stages import Stage, run_stages

# ---- Which question answering files of XTREME's there are, by data set and language.


COMPRESSED = r"\.json(\.gz)?"
# A question and its context are in one language, as in XTREME.
QA_FILES = {
    "XQuAD": re.compile(rf"xquad\.(?P<language>\w\w){COMPRESSED}"),
    "MLQA": re.compile(rf"(?P<split>dev|test)-context-(?P<language>\w\w)-question-(?P=language){COMPRESSED}"),
    "TyDiQA-GoldP": re.compile(rf"tydiqa([.-]goldp)?[.-](dev[.-])?(?P<language>[a-z]+)([.-]dev)?{COMPRESSED}"),
}
SPOKEN = {
    "arabic": "ar",
    "bengali": "bn",
    "english": "en",
    "finnish": "fi",
    "indonesian": "id",
    "korean": "ko",
    "russian": "ru",
    "swahili": "sw",
    "telugu": "te",
}
QA_METRICS = {"XQuAD": "squad", "MLQA": "mlqa", "TyDiQA-GoldP": "squad"}


def question_files(name: str, folder: Path) -> dict[str, Path]:
    """Language to file, of a folder and its subfolders; of MLQA the test set where there are both.

    Raises:
        UserError: there is none.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        match = QA_FILES[name].fullmatch(path.name)
        if match is None or not path.is_file():
            continue
        language = SPOKEN.get(match["language"], match["language"])
        if language in ("dev", "train"):
            continue  # all languages in one file: the files by language say the same
        if match.groupdict().get("split") != "dev" or language not in found:
            found[language] = path
    if not found:
        raise UserError(f"{folder} has no file of {name}'s, such as {example(name)}")
    return found


def example(name: str) -> str:
    return {"XQuAD": "xquad.de.json", "MLQA": "test-context-de-question-de.json", "TyDiQA-GoldP": "tydiqa.ar.dev.json"}[
        name
    ]


# ---- Models that were fine-tuned on English, evaluated in every language that is there (XTREME).


ENGLISH = "en"
FLAGS = {"XQuAD": "xquad", "MLQA": "mlqa", "TyDiQA-GoldP": "tydiqa"}
ABSENT, UNLABELLED = "-", "no labels"
TRIAL = "-trial"  # behind a data set's name, before the number


@dataclass(frozen=True)
class Options:
    """What is evaluated; what is None is left out.

    Attributes:
        out: folder of predictions and the table.
        xnli_model: checkpoints fine-tuned on XNLI's English training data, one a trial.
        xnli: its data, as `relpos prepare glue` wrote them.
        qa_model: checkpoints fine-tuned on English questions, one a trial.
        qa_data: its data folder; None: the one that it was trained on.
        qa_flags: further options of the answering, as they were given.
        answering: these options, read.
        xquad: folder of XQuAD's files; mlqa and tydiqa likewise.
        cpu: whether to use no GPU.
        force: whether to repeat what is done.
    """

    out: Path
    answering: questions.Options
    xnli_model: Sequence[Path] = ()
    classification: Path | None = None
    qa_model: Sequence[Path] = ()
    qa_data: Path | None = None
    qa_flags: str = ""
    xquad: Path | None = None
    mlqa: Path | None = None
    tydiqa: Path | None = None
    cpu: bool = False
    force: bool = False

    def check(self) -> None:
        """Refuse a model without data, data without a model, and paths that are not there.

        Raises:
            UserError: it says which.
        """
        if bool(self.xnli_model) != bool(self.xnli):
            raise UserError("--xnli-model and --xnli belong together: give both or neither")
        given = [flag for flag in FLAGS.values() if getattr(self, flag)]
        if bool(self.qa_model) != bool(given):
            raise UserError("--qa-model belongs together with one of --xquad, --mlqa, --tydiqa at least")
        if not self.xnli and not given:
            raise UserError("there is nothing to evaluate: give --xnli-model or --qa-model")
        for path in filter(None, (getattr(self, name) for name in ("xnli", *given))):
            if not path.is_dir():
                raise UserError(f"there is no folder {path}")
        for path in (*self.xnli_model, *self.qa_model):
            if not path.is_file():
                raise UserError(f"there is no checkpoint {path}")


def evaluate(options: Options) -> dict[str, list[dict]]:
    """Evaluate every model on every data set; print and write the table.

    Returns:
        The results of every trial by data set.

    Raises:
        ValueError: what is wrong with the options, a model or a file.
    """
    options.check()
    results = run_stages(stages_of(options), options.out, force=options.force)
    trials = trials_of(results)
    text = by_language(trials)
    print(f"\n{text}")
    write_text(options.out / "xtreme.md", f"{text}\n")
    write_json(options.out / "xtreme.json", results)
    return trials


def stages_of(options: Options) -> list[Stage]:
    """Return a stage for each data set and model; several models' have the trial in their names."""
    found = []
    if options.xnli:
        classification.xnli_splits(options.xnli)
        for name, path in named(classification.XNLI, options.xnli_model):
            found.append(
                Stage(
                    name,
                    lambda name=name, path=path: evaluate_xnli(options, path, name),
                    [path, options.xnli],
                    [options.out / name],
                )
            )
    for name, flag in FLAGS.items():
        folder = getattr(options, flag)
        if folder:
            files = question_files(name, folder)
            for trial, path in named(name, options.qa_model):
                asked = asking(options, name, files, path)
                found.append(
                    Stage(
                        trial,
                        lambda asked=asked, out=trial: evaluate_questions(asked, options.out / out),
                        [path, *files.values()],
                        [options.out / trial],
                        {"metric": QA_METRICS[name], "flags": options.qa_flags, "data": str(options.qa_data)},
                    )
                )
    return found


def named(data_set: str, models: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return each model with the name of its stage and folder."""
    if len(models) == 1:
        return [(data_set, models[0])]
    return [(f"{data_set}{TRIAL}{number}", path) for number, path in enumerate(models, 1)]


def trials_of(results: dict[str, dict]) -> dict[str, list[dict]]:
    """Return the results of every trial by data set."""
    found: dict[str, list[dict]] = {}
    for name, result in results.items():
        found.setdefault(name.partition(TRIAL)[0], []).append(result)
    return found


def evaluate_xnli(options: Options, path: Path, name: str) -> dict[str, float | None]:
    """Return accuracy by language, None without labels; predictions are written, a label a line.

    That is how XTREME takes them: test sets without labels are predicted for it.
    """
    model = classification.Classifier(path, options.xnli, options.cpu)
    results = {}
    with atomic_folder(options.out / name) as folder:
        for language, splits in classification.xnli_splits(options.xnli).items():
            results[language] = None
            for split in filter(None, (splits.scored, splits.unlabelled)):
                predicted, right = model.predict(split)
                stem = "test" if split.startswith("test") else "dev"
                labels = "".join(f"{label}\n" for label in predicted)
                write_text(folder / f"{stem}-{language}.tsv", labels)
                if split == splits.scored:
                    hits = sum(a == b for a, b in zip(predicted, right, strict=True))
                    results[language] = 100 * hits / len(right)
    return results


def asking(
    options: Options, name: str, files: dict[str, Path], path: Path
) -> tuple[questions.Options, dict[str, Path]]:
    """Return how a model answers a data set, and its files by language."""
    asked = replace(
        options.answering,
        files=list(files.values()),
        path=path,
        data=options.answering.data or options.qa_data,
        metric=options.answering.metric or QA_METRICS[name],
        cpu=options.cpu or options.answering.cpu,
    )
    return asked, files


def evaluate_questions(asked: tuple[questions.Options, dict[str, Path]], out: Path) -> dict[str, list[float]]:
    """Return F1 and exact match by language; what was answered is written."""
    how, files = asked
    with atomic_folder(out) as folder:
        numbers = questions.evaluate(replace(how, out=folder))
    found = {language: numbers[split_name(path)] for language, path in files.items()}
    return {language: [one["f1"], one["exact"]] for language, one in found.items()}


def by_language(results: dict[str, list[dict]]) -> str:
    """Return one row a language, English first; the last rows are means, the last column 004's.

    Of several trials each number is the median (004, section 4.2): the means are medians of means.

    Args:
        results: data set to trials, of language to accuracy (None: no labels), or to F1 and exact
            match.
    """
    names = [name for name in (classification.XNLI, *QA_FILES) if name in results]
    spoken = {language for name in names for found in results[name] for language in found}
    order = sorted(spoken, key=lambda language: (language != ENGLISH, language))
    columns = [results[name] for name in names]
    whole = len(names) == len(QA_FILES) + 1
    rows = [
        [
            language,
            *(
                format_score(median_of_trials([found.get(language) for found in trials]), language in trials[0])
                for trials in columns
            ),
        ]
        + [""] * whole
        for language in order
    ]
    for title, left_out in (("mean", ()), ("mean without English", (ENGLISH,))):
        means = [median_of_trials([mean_of_languages(found, left_out) for found in trials]) for trials in columns]
        rows.append([title, *map(format_score, means)] + [format_score(mean_of_means(means))] * whole)
    heads = [f"{name} ({'accuracy' if name == classification.XNLI else 'F1 / EM'})" for name in names]
    several = [f", median of {len(trials)}" if len(trials) > 1 else "" for trials in columns]
    heads = [f"{head[:-1]}{more})" for head, more in zip(heads, several, strict=True)]
    return table(rows, ["language", *heads] + ["mean of 004's seven"] * whole)


def median_of_trials(values: Sequence[float | list[float] | None]) -> float | list[float] | None:
    """Return the median of trials, of F1 and EM each its own; None where there is no number."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return np.median(known, axis=0).tolist()


def mean_of_means(means: Sequence[float | list[float] | None]) -> float | None:
    """Return the mean of XNLI's accuracy, three F1 and three EM (004 Tables 2, 5, 9, 11, 12)."""
    if None in means:
        return None
    return statistics.fmean(np.hstack(means).tolist())


def mean_of_languages(found: dict, left_out: Sequence[str]) -> float | list[float] | None:
    """Return the mean over languages; None where none is left."""
    kept = [value for language, value in found.items() if language not in left_out and value is not None]
    if not kept:
        return None
    if isinstance(kept[0], list):
        return [statistics.fmean(column) for column in zip(*kept, strict=True)]
    return statistics.fmean(kept)


def format_score(value: float | Sequence[float] | None, there: bool = False) -> str:
    """Return a number, or F1 / EM; without one it says whether the language is `there`."""
    if value is None:
        return UNLABELLED if there else ABSENT
    values = value if isinstance(value, (list, tuple)) else [value]
    return " / ".join(f"{number:.2f}" for number in values)
