"""Learning curves out of what fairseq-train printed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from relpos_fairseq.pictures.drawing import Panel, Picture, write
from relpos_fairseq.pictures.model import PlotError

LINE = re.compile(r" \| (train_inner|valid) \| (.*)")
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
    found = [read(path, measure) for path in logs]
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
    for path in write(picture, out):
        print(f"wrote {path}")


def spread(panel: Panel, columns: list[int]) -> np.ndarray:
    """Return a panel's values by more columns than it has, NaN in between."""
    values = np.full((len(panel.rows), len(columns)), np.nan)
    values[:, np.searchsorted(columns, panel.columns)] = panel.values
    return values


def read(path: Path, measure: str) -> dict[str, Points]:
    """Return a log's values by update; of an update trained again, after a resumption, the last.

    Raises:
        PlotError: there is none of them.
    """
    curves: dict[str, Points] = {"training": {}, "validation": {}}
    known: set[str] = set()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not (match := LINE.search(line)):
            continue
        part, values = match[1], numbers(match[2])
        values = {name.removeprefix("valid_"): value for name, value in values.items()}  # JSON's
        known |= values.keys()
        if measure in values and "num_updates" in values:
            curve = curves["validation" if part == "valid" else "training"]
            curve[int(values["num_updates"])] = values[measure]
    if not any(curves.values()):
        has = f"it has {', '.join(sorted(known - {'epoch', 'num_updates'}))}" if known else "no line of one"
        raise PlotError(f"{path}: no {measure} in a log of fairseq-train: {has}")
    return curves


def numbers(text: str) -> dict[str, float]:
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
