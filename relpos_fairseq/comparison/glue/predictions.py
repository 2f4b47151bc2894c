"""What a fine-tuned model predicts on GLUE's sets, and the files that GLUE's server takes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import write_text
from relpos_fairseq.evaluation.xtreme.xnli import Classifier
from relpos_fairseq.preparation.glue.reading import HIGHEST_SCORE, LOWEST_SCORE
from relpos_fairseq.preparation.glue.tasks import Task

# The server's names, where a task's is not its own.
SUBMITTED = {("MNLI", "test"): "MNLI-m", ("MNLI", "test1"): "MNLI-mm", ("MNLI", "test2"): "AX"}


def write_predictions(
    checkpoint: Path, data: Path, task: Task, folder: Path, submission: Path, cpu: bool = False
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
        predicted, right = _scores(classifier, split) if task.regression else classifier.predict(split)
        columns = [predicted] if right is None else [predicted, right]
        write_text(folder / f"{split}.tsv", _table(columns))
        if split.startswith("test"):
            name = SUBMITTED.get((task.name, split), task.name)
            written.append(submission / f"{name}.tsv")
            write_text(written[-1], _table([predicted]))
    return written


def _scores(classifier: Classifier, split: str) -> tuple[list[str], list[str] | None]:
    outputs, right = classifier.outputs(split)
    scores = (min(max(float(one), LOWEST_SCORE), HIGHEST_SCORE) for one in outputs)
    return [f"{score:.3f}" for score in scores], right and [f"{one:.3f}" for one in right]


def _table(columns: list[list[str]]) -> str:
    header = ("index", "prediction", "label")[: len(columns) + 1]
    rows: Iterable[tuple] = zip(range(len(columns[0])), *columns, strict=True)
    return "".join("\t".join(map(str, row)) + "\n" for row in (header, *rows))


def kept_model(folder: Path, which: str) -> Path:
    """Return a run's model, `last` or `best`; one that was not kept is an error."""
    path = folder / "checkpoints" / f"checkpoint_{which}.pt"
    if not path.is_file():
        raise PreparationError(
            f"--predictions: {folder} has no model, since its run was made without: delete its "
            f"result, {folder.name}.json, and run the same command again"
        )
    return path
