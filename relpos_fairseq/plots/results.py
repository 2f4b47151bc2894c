"""Draw learning curves out of logs of fairseq-train, and bars of models' scores."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from relpos_fairseq.plots.axes import Panel, Picture, write_picture
from relpos_fairseq.plots.stacks import PlotError
from relpos_fairseq.preparation.glue_tasks import TASKS

# ---- Learning curves out of what fairseq-train printed.


LOG_LINE = re.compile(r" \| (train_inner|valid) \| (.*)")
NUMBER = re.compile(r"(\w+)[= ](-?\d[\d.]*(?:e[+-]?\d+)?)(?=[,\s]|$)")  # --log-format simple
Points = dict[int, float]


def draw_curves(logs: list[Path], measure: str, out: Path) -> None:
    """Draw a measure of several trainings by update, training and validation side by side.

    Raises:
        PlotError: a log has no such measure.
    """
    names = [path.stem for path in logs]
    if len(set(names)) < len(names):
        names = [f"{path.parent.name}/{path.stem}" for path in logs]
    found = [read_curves(path, measure) for path in logs]
    panels = []
    for part in ("training", "validation"):
        updates = sorted({update for curves in found for update in curves[part]})
        if updates:
            rows = [[curves[part].get(update, np.nan) for update in updates] for curves in found]
            panels.append(Panel({"part": part}, names, updates, np.array(rows)))
    # Panels share the CSV's header: each is put on the updates of all.
    updates = sorted({update for panel in panels for update in panel.columns})
    panels = [Panel(p.key, p.rows, updates, spread(p, updates)) for p in panels]
    axes = ("update", "", measure)
    words = ("learning-curves", "learning curves", ", ".join(names))
    picture = Picture(*words, "lines", panels, "run", "update", axes, neutral=None)
    for path in write_picture(picture, out):
        print(f"wrote {path}")


def spread(panel: Panel, columns: list[int]) -> np.ndarray:
    """Return a panel's values by more columns than it has, NaN in between."""
    values = np.full((len(panel.rows), len(columns)), np.nan)
    values[:, np.searchsorted(columns, panel.columns)] = panel.values
    return values


def read_curves(path: Path, measure: str) -> dict[str, Points]:
    """Return a log's values by update; of an update trained again, after a resumption, the last.

    Raises:
        PlotError: there is none of them.
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
        raise PlotError(f"{path}: no {measure} in a log of fairseq-train: {has}")
    return curves


def log_numbers(text: str) -> dict[str, float]:
    if text.startswith("{"):
        pairs = json.loads(text).items()
    else:
        pairs = NUMBER.findall(text)
    found = {}
    for name, value in pairs:
        try:
            found[name] = float(value)
        except (TypeError, ValueError):  # not a number: a JSON line has words, too
            continue
    return found


# ---- Bars of models' scores on data sets, as 004's Figure 1: MNLI and XNLI by position encoding.


Scores = dict[str, dict[str, float]]  # data set to model to score


def draw_score_bars(files: list[Path], sets: list[str], out: Path) -> None:
    """Draw a bar a model, a panel a data set, of what the commands `relpos finetune` wrote.

    Raises:
        PlotError: a file is no such table, or none has a data set.
    """
    found: Scores = {}
    for path in files:
        for name, scores in read_scores(path).items():
            found.setdefault(name, {}).update(scores)
    missing = [name for name in sets if name not in found]
    if len(missing) == len(sets):
        raise PlotError(f"--on {','.join(sets)}: the tables have {', '.join(sorted(found)) or 'no scores'}")
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
    """Return a table's scores: of GLUE's tasks the deciding metric, of questions F1.

    Raises:
        PlotError: it is none.
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
        raise PlotError(f"{path} is no table of relpos finetune: give OUT/PROTOCOL.json or OUT/medians.json") from None
    return found
