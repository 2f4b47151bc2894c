"""Draw learning curves out of logs of fairseq-train, and bars of models' scores."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.plots.axes import Panel, Picture, write_picture
from relpos_fairseq.preparation.glue_tasks import TASKS

LOG_LINE = re.compile(r" \| (train_inner|valid) \| (.*)")
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
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not (match := LOG_LINE.search(line)):
            continue
        part, values = match[1], log_numbers(match[2])
        values = {name.removeprefix("valid_"): value for name, value in values.items()}  # JSON's
        known |= values.keys()
        if measure in values and "num_updates" in values:
            curve = curves["validation" if part == "valid" else "training"]
            curve[int(values["num_updates"])] = values[measure]
    if not any(curves.values()):
        has = f"it has {', '.join(sorted(known - {'epoch', 'num_updates'}))}" if known else "no line of one"
        raise UserError(f"{path}: no {measure} in a log of fairseq-train: {has}")
    return curves


def log_numbers(text: str) -> dict[str, float]:
    """Return the numbers of a line's part after its kind, as JSON or as `name value, name value`."""
    found = {}
    for name, value in json.loads(text).items() if text.startswith("{") else NUMBER.findall(text):
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
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        found: Scores = {}
        for row, values in known.items():
            model, _, task = row.rpartition("/")
            glue = "values" in values
            each = {task: values["values"][TASKS[task].metrics[0]]} if glue else values
            for name, value in each.items():
                if value is not None:
                    number = float(value[0] if isinstance(value, list) else value)
                    found.setdefault(name, {})[model if glue else row] = number
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        raise UserError(f"{path} is no table of relpos finetune: give OUT/PROTOCOL.json or OUT/medians.json") from None
    return found
