"""Draw learning curves out of logs of fairseq-train, and bars of models' scores."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.reading import of_type, parse_json, reading
from relpos_fairseq.plots.axes import Panel, Picture, write_picture
from relpos_fairseq.preparation.glue_tasks import TASKS

# Of fairseq-train, and of fairseq-hydra-train.
LOG_LINE = re.compile(r"(?: \| |\]\[)(train_inner|valid)(?: \| |\]\[INFO\] - )(.*)")
NUMBER = re.compile(r"(\w+)[= ](-?\d[\d.]*(?:e[+-]?\d+)?)(?=[,\s]|$)")  # --log-format simple
Points = dict[int, float]  # value by update
Scores = dict[str, dict[str, float]]  # score by data set and model


def draw_curves(logs: list[Path], measure: str, out: Path) -> None:
    """Draw a measure of several trainings by update, training and validation side by side.

    Args:
        logs: what fairseq-train printed (--log-format json or simple).
        measure: its name in the logs.
        out: folder of the PNG and the CSV.

    Raises:
        UserError: a log has no such measure.
    """
    names = [path.stem for path in logs]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.stem}" for path in logs]
    found = [read_curves(path, measure) for path in logs]
    updates = sorted({update for curves in found for curve in curves.values() for update in curve})
    panels = []
    for part in ("training", "validation"):
        rows = np.array([[curves[part].get(update, np.nan) for update in updates] for curves in found])
        if not np.isnan(rows).all():
            panels.append(Panel({"part": part}, names, updates, rows))
    axes = ("update", "", measure)
    words = ("learning-curves", "learning curves", ", ".join(names))
    picture = Picture(*words, "lines", panels, "run", "update", axes, neutral=None)
    for path in write_picture(picture, out):
        print(f"wrote {path}")


def read_curves(path: Path, measure: str) -> dict[str, Points]:
    """Return a log's values of a measure by update; of an update that was trained again, the last.

    Raises:
        UserError: the log has no such measure.
    """
    curves: dict[str, Points] = {"training": {}, "validation": {}}
    known: set[str] = set()
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not (match := LOG_LINE.search(line)):
            continue
        with reading(path, "a log of fairseq-train"):
            part, values = match[1], log_numbers(match[2], number)
        values = {name.removeprefix("valid_"): value for name, value in values.items()}  # JSON's
        known |= values.keys()
        if measure in values and "num_updates" in values:
            curve = curves["validation" if part == "valid" else "training"]
            curve[int(values["num_updates"])] = values[measure]
    if any(curves.values()) and not np.isfinite([value for curve in curves.values() for value in curve.values()]).any():
        raise UserError(f"{path}: every {measure} is nan or infinite: the training diverged, and there is no curve")
    if not any(curves.values()):
        has = f"it has {', '.join(sorted(known - {'epoch', 'num_updates'}))}" if known else "no line of one"
        raise UserError(f"{path}: no {measure} in a log of fairseq-train: {has}")
    return curves


def log_numbers(text: str, line: int) -> dict[str, float]:
    """Return the numbers of a line's part after its kind, as JSON or as `name value, name value`."""
    found: dict[str, float] = {}
    if text.startswith("{"):
        if not text.endswith("}"):  # a kill cut it off
            return found
        try:
            pairs = parse_json(text, dict[str, object]).items()
        except ValueError as error:
            raise ValueError(f"line {line}: {error}") from None
    else:
        pairs = NUMBER.findall(text)
    for name, value in pairs:
        try:
            found[name] = float(value)
        except (TypeError, ValueError):  # a word, which JSON lines have, too
            continue
    return found


def draw_score_bars(files: list[Path], sets: list[str], out: Path) -> None:
    """Draw a bar for every model and a panel for every data set, as Chen2021's Figure 1.

    Args:
        files: the JSON tables of `relpos finetune`.
        sets: names of data sets.
        out: folder of the PNG and the CSV.

    Raises:
        UserError: a file is no such table, or none has one of the data sets.
    """
    found: Scores = {}
    for path in files:
        for name, scores in read_scores(path).items():
            found.setdefault(name, {}).update(scores)
    missing = [name for name in sets if name not in found]
    if len(missing) == len(sets):
        raise UserError(f"--on {','.join(sets)}: the tables have {', '.join(sorted(found)) or 'no scores'}")
    if missing:
        print(f"left out: {', '.join(missing)}, which no table has")
    models = list(dict.fromkeys(model for name in sets for model in found.get(name, {})))
    panels = [
        Panel({"data": name}, models, [0], np.array([[found[name].get(model, np.nan)] for model in models]))
        for name in sets
        if name in found
    ]
    words = ("scores", "scores by position encoding", ", ".join(path.name for path in files))
    picture = Picture(*words, "bars", panels, "model", "score", ("", "", "score (%)"), len(panels))
    for path in write_picture(picture, out):
        print(f"wrote {path}")


def read_scores(path: Path) -> Scores:
    """Return the scores of a table of `relpos finetune`: of GLUE's tasks the deciding metric, of questions F1.

    Raises:
        UserError: the file is no such table.
    """
    found: Scores = {}
    with reading(path, "a table of relpos finetune", "give OUT/PROTOCOL.json or OUT/medians.json"):
        for row, values in parse_json(path.read_bytes(), dict[str, dict[str, object]]).items():
            model, _, task = row.rpartition("/")
            glue = "values" in values
            each = {task: values["values"][TASKS[task].metrics[0]]} if glue else values
            for name, value in of_type(each, dict[str, float | list[float] | None], row).items():
                if value is not None:
                    found.setdefault(name, {})[model if glue else row] = value[0] if isinstance(value, list) else value
    return found
