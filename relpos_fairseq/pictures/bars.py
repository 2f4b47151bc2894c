"""Bars of models' scores on data sets, as 004's Figure 1: MNLI and XNLI by position encoding."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from relpos_fairseq.pictures.drawing import Panel, Picture, write
from relpos_fairseq.pictures.model import PlotError
from relpos_fairseq.preparation.glue.tasks import TASKS

Scores = dict[str, dict[str, float]]  # data set to model to score


def draw_bars(files: list[Path], sets: list[str], out: Path) -> None:
    """Draw a bar a model, a panel a data set, of what the commands `relpos finetune` wrote.

    Raises:
        PlotError: a file is no such table, or none has a data set.
    """
    found: Scores = {}
    for path in files:
        for name, scores in read(path).items():
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
    for path in write(picture, out):
        print(f"wrote {path}")


def read(path: Path) -> Scores:
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
