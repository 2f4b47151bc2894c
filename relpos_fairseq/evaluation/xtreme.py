"""Evaluate models fine-tuned on English in every language of XTREME that is given: one table, English first."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from relpos_fairseq.data.squad import split_name
from relpos_fairseq.evaluation.classification import XNLI, Classifier, xnli_splits
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_folder, write_json, write_text
from relpos_fairseq.io.progress import table
from relpos_fairseq.io.stages import Stage, run_stages

ENGLISH = "en"
COMPRESSED = r"\.json(\.gz)?"
# Names of question answering files; a question and its context are in one language, as in XTREME.
QA_FILES = {
    "XQuAD": re.compile(rf"xquad\.(?P<language>\w\w){COMPRESSED}"),
    "MLQA": re.compile(rf"(?P<split>dev|test)-context-(?P<language>\w\w)-question-(?P=language){COMPRESSED}"),
    "TyDiQA-GoldP": re.compile(rf"tydiqa([.-]goldp)?[.-](dev[.-])?(?P<language>[a-z]+)([.-]dev)?{COMPRESSED}"),
}
EXAMPLES = {"XQuAD": "xquad.de.json", "MLQA": "test-context-de-question-de.json", "TyDiQA-GoldP": "tydiqa.ar.dev.json"}
FLAGS = {"XQuAD": "xquad", "MLQA": "mlqa", "TyDiQA-GoldP": "tydiqa"}
QA_METRICS = {"XQuAD": "squad", "MLQA": "mlqa", "TyDiQA-GoldP": "squad"}
# Languages that TyDiQA's files write out.
CODES = {
    **{"arabic": "ar", "bengali": "bn", "english": "en", "finnish": "fi", "indonesian": "id"},
    **{"korean": "ko", "russian": "ru", "swahili": "sw", "telugu": "te"},
}
DATA_SETS = (XNLI, *QA_FILES)
ABSENT, UNLABELLED = "-", "no labels"
TRIAL = "-trial"  # between a data set's name and the number of a trial
MEAN_TITLE = "mean of Chen2021's seven"
Score = float | list[float] | None  # accuracy, [F1, exact match], or None without labels
Languages = dict[str, Score]  # by language


@dataclass(frozen=True)
class Options:
    """What is evaluated; what is None is left out."""

    out: Path  # folder of predictions and the table
    answering: Any  # the options of `relpos evaluate qa`
    xnli_model: Sequence[Path] = ()  # checkpoints fine-tuned on XNLI's English training data, one a trial
    xnli: Path | None = None  # its data, which `relpos prepare glue` wrote
    qa_model: Sequence[Path] = ()  # checkpoints fine-tuned on English questions, one a trial
    qa_data: Path | None = None  # their data folder; None: the one that they were trained on
    qa_flags: str = ""  # the options of the answering as text
    xquad: Path | None = None  # folder of XQuAD's files
    mlqa: Path | None = None
    tydiqa: Path | None = None
    cpu: bool = False  # whether to use no GPU
    force: bool = False  # whether to repeat what is done

    def check(self) -> None:
        """Raise an error for a model without data, data without a model, and paths that are not there.

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


def evaluate(options: Options) -> dict[str, list[Languages]]:
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
    """Return a stage for each data set and model; the name of one of several trials has its number."""
    found = []
    if options.xnli:
        xnli_splits(options.xnli)
        for name, path in numbered(XNLI, options.xnli_model):
            work = partial(evaluate_xnli, options, path, options.out / name)
            found.append(Stage(name, work, [path, options.xnli], [options.out / name]))
    for data_set, flag in FLAGS.items():
        if folder := getattr(options, flag):
            files = question_files(data_set, folder)
            parameters = {"metric": QA_METRICS[data_set], "flags": options.qa_flags, "data": str(options.qa_data)}
            for name, path in numbered(data_set, options.qa_model):
                work = partial(evaluate_questions, options, data_set, files, path, options.out / name)
                found.append(Stage(name, work, [path, *files.values()], [options.out / name], parameters))
    return found


def numbered(data_set: str, models: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return each model with the name of its stage and folder."""
    if len(models) == 1:
        return [(data_set, models[0])]
    return [(f"{data_set}{TRIAL}{number}", path) for number, path in enumerate(models, 1)]


def trials_of(results: dict[str, Languages]) -> dict[str, list[Languages]]:
    """Return the results of every trial by data set, from results by stage."""
    found: dict[str, list[Languages]] = {}
    for name, result in results.items():
        found.setdefault(name.partition(TRIAL)[0], []).append(result)
    return found


def question_files(name: str, folder: Path) -> dict[str, Path]:
    """Return the files of a data set by language, from a folder and its subfolders; of MLQA the test set before dev.

    Raises:
        UserError: there is none, or what has such a name is no file.
    """
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        match = QA_FILES[name].fullmatch(path.name)
        if match is None:
            continue
        if not path.is_file():  # else its language would be missing from every mean
            raise UserError(f"{path} has the name of a file of {name}'s, and is none: put the file there or remove it")
        language = CODES.get(match["language"], match["language"])
        if language in ("dev", "train"):
            continue  # all languages in one file, which the files by language hold too
        if match.groupdict().get("split") != "dev" or language not in found:
            found[language] = path
    if not found:
        raise UserError(f"{folder} has no file of {name}'s, such as {EXAMPLES[name]}")
    return found


def evaluate_xnli(options: Options, checkpoint: Path, out: Path) -> Languages:
    """Return accuracy by language, None without labels; write the predictions, a label a line.

    XTREME takes such files: test sets without labels are predicted for it.
    """
    model = Classifier(checkpoint, options.xnli, options.cpu)
    results: Languages = {}
    with atomic_folder(out) as folder:
        for language, splits in xnli_splits(options.xnli).items():
            results[language] = None
            for split in filter(None, (splits.scored, splits.unlabelled)):
                predicted, right = model.predict(split)
                stem = "test" if split.startswith("test") else "dev"
                write_text(folder / f"{stem}-{language}.tsv", "".join(f"{label}\n" for label in predicted))
                if split == splits.scored:
                    results[language] = 100 * sum(a == b for a, b in zip(predicted, right, strict=True)) / len(right)
    return results


def evaluate_questions(
    options: Options, data_set: str, files: dict[str, Path], checkpoint: Path, out: Path
) -> Languages:
    """Return F1 and exact match by language; write what `relpos evaluate qa` writes."""
    from relpos_fairseq.evaluation import questions

    with atomic_folder(out) as folder:
        asked = replace(
            options.answering,
            files=list(files.values()),
            checkpoint=checkpoint,
            data=options.answering.data or options.qa_data,
            metric=options.answering.metric or QA_METRICS[data_set],
            cpu=options.cpu or options.answering.cpu,
            out=folder,
        )
        numbers = questions.evaluate(asked)
    found = {language: numbers[split_name(path)] for language, path in files.items()}
    return {language: [one["f1"], one["exact"]] for language, one in found.items()}


def by_language(results: dict[str, list[Languages]]) -> str:
    """Return a table of a row a language, English first; the last rows are means, the last column Chen2021's mean.

    Of several trials each number is the median (Chen2021, section 4.2): the means are medians of means.

    Args:
        results: trials by data set.
    """
    names = [name for name in DATA_SETS if name in results]
    spoken = {language for name in names for found in results[name] for language in found}
    columns = [results[name] for name in names]
    whole = len(names) == len(DATA_SETS)
    rows = []
    for language in sorted(spoken, key=lambda language: (language != ENGLISH, language)):
        medians = [median_of_trials([found.get(language) for found in trials]) for trials in columns]
        there = [language in trials[0] for trials in columns]
        rows.append([language, *map(format_score, medians, there)] + [""] * whole)
    for title, left_out in (("mean", ()), ("mean without English", (ENGLISH,))):
        means = [median_of_trials([mean_of_languages(found, left_out) for found in trials]) for trials in columns]
        rows.append([title, *map(format_score, means)] + [format_score(mean_of_means(means))] * whole)
    heads = [column_title(name, len(trials)) for name, trials in zip(names, columns, strict=True)]
    return table(rows, ["language", *heads] + [MEAN_TITLE] * whole)


def column_title(name: str, trials: int = 1) -> str:
    """Return a data set's name with its metric, and the number of trials where there are several."""
    several = f", median of {trials}" if trials > 1 else ""
    return f"{name} ({'accuracy' if name == XNLI else 'F1 / EM'}{several})"


def medians(trials: dict[str, list[Languages]]) -> dict[str, Score]:
    """Return the median over trials of the mean over all languages, by data set."""
    return {name: median_of_trials([mean_of_languages(found) for found in some]) for name, some in trials.items()}


def median_of_trials(values: Sequence[Score]) -> Score:
    """Return the median of trials, of F1 and EM separately; None where there is no number."""
    known = [value for value in values if value is not None]
    return np.median(known, axis=0).tolist() if known else None


def mean_of_means(means: Sequence[Score]) -> float | None:
    """Return the mean of XNLI's accuracy, three F1 and three EM (Chen2021, Tables 2, 5, 9, 11, 12)."""
    return None if None in means else statistics.fmean(np.hstack(means).tolist())


def mean_of_languages(found: Languages, left_out: Sequence[str] = ()) -> Score:
    """Return the mean over languages that have a score; None where none is left."""
    kept = [value for language, value in found.items() if language not in left_out and value is not None]
    if kept and isinstance(kept[0], list):
        return [statistics.fmean(column) for column in zip(*kept, strict=True)]
    return statistics.fmean(kept) if kept else None


def format_score(value: float | Sequence[float] | None, there: bool = False) -> str:
    """Return a number, or F1 / EM; None says whether the language has data, which is `there`, without labels."""
    if value is None:
        return UNLABELLED if there else ABSENT
    values = value if isinstance(value, list | tuple) else [value]
    return " / ".join(f"{number:.2f}" for number in values)
