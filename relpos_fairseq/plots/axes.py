"""Draw a picture as a grid of panels, and write it with a CSV of the same numbers."""

from __future__ import annotations

import csv
import textwrap
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from relpos_fairseq.io.files import atomic_path

# ---- How a picture is drawn: it is a grid of panels, and its CSV holds the same numbers.
# Signed values have a diverging map that is white at the neutral value and safe for colour-blind
# readers; probabilities a sequential one.  Entries that do not exist (a decoder's future) are grey in
# the PNG and empty in the CSV.


matplotlib.use("Agg")


# Okabe and Ito's palette, without its yellow, which is too light for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
GRAPHS = ("lines", "dots", "bars")  # the other kinds are images
MARKERS = ("o", "s", "^", "D")
ABSENT = "#e6e6e6"
MOST_TOKENS = 40  # more are not named on the axes
LONGEST = 14  # characters of a token beside a picture; longer ones would run into the title
STYLE = {
    "font.size": 9,
    "axes.titlesize": 9,
    "figure.titlesize": 11,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 150,
}


class Absent(Exception):
    """There is nothing of a kind to draw; the message says what and why."""


def head_names(count: int) -> list[str]:
    """1..H, or `all` where heads share what is drawn."""
    return ["all"] if count == 1 else [str(head) for head in range(1, count + 1)]


@dataclass(frozen=True)
class Panel:
    """One panel: a matrix with what its rows and columns are.

    Args:
        key: what the panel is of, as {"layer": "1", "head": "2"}; `all` where it is shared.
        rows: names of the lines, or coordinates down an image.
        columns: coordinates from left to right, consecutive integers.
        values: (rows, columns), NaN where there is nothing.
        tokens: names for the coordinates of a square image, or None.
    """

    key: dict[str, str]
    rows: list
    columns: list[int]
    values: np.ndarray
    tokens: list[str] | None = None

    @property
    def title(self) -> str:
        return ", ".join(f"all {name}s" if value == "all" else f"{name} {value}" for name, value in self.key.items())


@dataclass(frozen=True)
class Picture:
    """A grid of panels that share axes and colours.

    Args:
        name: file name without its suffix.
        title: what is drawn.
        detail: of which stack and scheme, and how, below the title.
        kind: `lines`, `dots`, `bars`, `signed` or `positive` (images).
        panels: in reading order.
        row: what rows are, in one word (a CSV column).
        column: what columns are, in one word (a CSV column's prefix).
        axes: labels of the horizontal axis, of an image's vertical axis, and of the values.
        across: panels in a row of the grid, or None for as square as it goes.
        neutral: the value that does nothing, or None.
    """

    name: str
    title: str
    detail: str
    kind: str
    panels: list[Panel]
    row: str
    column: str
    axes: tuple[str, str, str]
    across: int | None = None
    neutral: float | None = 0.0


def write_picture(picture: Picture, folder: Path) -> list[Path]:
    paths = [folder / f"{picture.name}.png", folder / f"{picture.name}.csv"]
    with plt.rc_context(STYLE), warnings.catch_warnings(), atomic_path(paths[0]) as partial:
        # A token in a script that the font lacks is drawn as a box, which is no news to the user.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure = draw_picture(picture)
        try:
            figure.savefig(partial, format="png")
        finally:
            plt.close(figure)
    with atomic_path(paths[1]) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(csv_rows(picture))
    return paths


def csv_rows(picture: Picture) -> Iterator[list]:
    """The picture's CSV: a header, then one line for every row of every panel."""
    first = picture.panels[0]
    token = ["token"] if first.tokens else []
    longest = max((panel.columns for panel in picture.panels), key=len)
    columns = [f"{picture.column}_{column}" for column in longest]
    yield [*first.key, picture.row, *token, *columns]
    for panel in picture.panels:
        for index, (name, values) in enumerate(zip(panel.rows, panel.values, strict=True)):
            word = [panel.tokens[index]] if panel.tokens else []
            numbers = ["" if np.isnan(value) else f"{value:.9g}" for value in values]
            yield [*panel.key.values(), name, *word, *numbers]


def draw_picture(picture: Picture) -> Figure:
    count = len(picture.panels)
    across = min(picture.across or int(np.ceil(np.sqrt(count))), count)
    down = -(-count // across)
    width, height = panel_size(picture, across)
    size = (max(width * across, 3.0) + 1.2, height * down + 1.1)
    figure, axes = plt.subplots(
        down, across, figsize=size, squeeze=False, layout="constrained", sharex=True, sharey=picture.kind != "bars"
    )
    for ax in axes.flat[count:]:
        ax.set_visible(False)
    used = list(axes.flat[:count])
    if picture.kind == "bars":
        draw_bar_panels(figure, used, picture)
    elif picture.kind in GRAPHS:
        draw_lines(figure, used, picture)
    else:
        draw_images(figure, used, picture)
    lines = [picture.title, *textwrap.wrap(picture.detail, int(size[0] * 12))]
    figure.suptitle("\n".join(lines), parse_math=False)
    for index, ax in enumerate(used):
        ax.tick_params(labelbottom=index + across >= count, labelleft=picture.kind == "bars" or index % across == 0)
        if picture.kind in GRAPHS and index + across >= count:
            ax.set_xlabel(picture.axes[0])
    if picture.kind not in GRAPHS:
        figure.supxlabel(picture.axes[0], fontsize=9)
    return figure


def panel_size(picture: Picture, across: int) -> tuple[float, float]:
    """Width and height of a panel in inches."""
    if picture.kind in GRAPHS:
        return (3.4, 2.3) if across <= 3 else (2.6, 1.9)
    panel = picture.panels[0]
    if panel.tokens and len(panel.tokens) <= MOST_TOKENS:
        side = 1.1 + 0.13 * len(panel.tokens)
        return side, side
    if picture.row == "channel":
        return (3.2, 2.4) if across <= 2 else (1.9, 1.5)
    side = 2.4 if across <= 2 else 1.9 if across <= 6 else 1.3
    return side, side


def draw_bar_panels(figure: Figure, axes: list[Axes], picture: Picture) -> None:
    """A bar with its number for every row; the axis begins a little below the lowest."""
    for ax, panel in zip(axes, picture.panels, strict=True):
        scores = panel.values[:, 0]
        places = np.arange(len(scores))
        bars = ax.bar(places, np.nan_to_num(scores), color=COLOURS[0], width=0.7)
        ax.bar_label(bars, ["" if np.isnan(s) else f"{s:.1f}" for s in scores], fontsize=7)
        low, high = np.nanmin(scores), np.nanmax(scores)
        ax.set_ylim(max(0.0, low - (high - low) - 1), high + 0.15 * (high - low) + 1)
        ax.set_xticks(places, panel.rows, rotation=45, ha="right", fontsize=7, parse_math=False)
        ax.set_title(panel.title)
    figure.supylabel(picture.axes[2], fontsize=9)


def draw_lines(figure: Figure, axes: list[Axes], picture: Picture) -> None:
    """A line, or dots, for every row of a panel."""
    most = max(len(panel.rows) for panel in picture.panels)
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.9, most))
    for ax, panel in zip(axes, picture.panels, strict=True):
        if picture.kind == "lines" and picture.neutral is not None:
            ax.axhline(picture.neutral, color="#bbbbbb", linewidth=0.8, zorder=0)
        for index, (name, values) in enumerate(zip(panel.rows, panel.values, strict=True)):
            colour = COLOURS[index] if most <= len(COLOURS) else shades[index]
            label = f"head {name}" if picture.row == "head" else str(name)
            style = {"color": colour, "label": label}
            if picture.kind == "dots":
                style |= {"linestyle": ":", "marker": MARKERS[index % 4], "linewidth": 0.8}
                style |= {"markersize": 7 - 1.5 * (index % 4), "markerfacecolor": "none"}
            known = ~np.isnan(values)  # curves have points of their own
            points = np.array(panel.columns)[known], values[known]
            ax.plot(*points, **({"linewidth": 1.4} | style))
        ax.set_title(panel.title + (", all heads" if panel.rows == ["all"] else ""))
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if picture.kind == "dots":
        axes[0].set_ylim(0, 1.1 * max(panel.values.max() for panel in picture.panels))
        axes[0].yaxis.set_major_locator(MaxNLocator(5, integer=True))
    figure.supylabel(picture.axes[2], fontsize=9)
    if 1 < most <= len(COLOURS):
        widest = max(range(len(axes)), key=lambda i: len(picture.panels[i].rows))
        handles, labels = axes[widest].get_legend_handles_labels()
        each = 0.65 + 0.06 * max(map(len, labels))  # inches
        columns = max(1, min(len(labels), int(figure.get_figwidth() / each)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def draw_images(figure: Figure, axes: list[Axes], picture: Picture) -> None:
    """A panel's matrix as an image; all share one scale of colours."""
    everything = np.concatenate([panel.values.ravel() for panel in picture.panels])
    reach, extend = colour_reach(everything, picture)
    low = picture.neutral - reach if picture.kind == "signed" else 0.0
    norm = Normalize(low, picture.neutral + reach)
    colours = plt.get_cmap("RdBu_r" if picture.kind == "signed" else "Blues")
    colours = colours.with_extremes(bad=ABSENT)
    image = None
    for ax, panel in zip(axes, picture.panels, strict=True):
        left, right = panel.columns[0] - 0.5, panel.columns[-1] + 0.5
        top, bottom = panel.rows[0] - 0.5, panel.rows[-1] + 0.5
        image = ax.imshow(
            panel.values,
            norm=norm,
            cmap=colours,
            extent=(left, right, bottom, top),
            aspect="auto" if picture.row == "channel" else "equal",
            interpolation="nearest",
        )
        ax.set_title(panel.title)
        ax.spines[:].set_visible(False)
        name_ticks(ax, panel)
    figure.supylabel(picture.axes[1], fontsize=9)
    bar = figure.colorbar(image, ax=axes, extend=extend, aspect=30, pad=0.02)
    bar.set_label(picture.axes[2])
    bar.outline.set_visible(False)


def colour_reach(values: np.ndarray, picture: Picture) -> tuple[float, str]:
    """How far colours reach from the neutral value, and where the bar has an arrow.

    A few outliers (a decoder's first row, a reset row) do not take the colours from all the rest.
    """
    away = np.abs(values[~np.isnan(values)] - picture.neutral)
    most = float(away.max(initial=0))
    share = 0.98 if picture.kind == "signed" else 0.95
    usual = float(np.quantile(away, share)) if away.size else 0.0
    both = "both" if picture.kind == "signed" else "max"
    if usual and most > 2 * usual:
        return usual, both
    return most or 1.0, "neither"


def name_ticks(ax: Axes, panel: Panel) -> None:
    """Tokens where they are known and not too many, else a few round numbers."""
    if panel.tokens is None or len(panel.tokens) > MOST_TOKENS:
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        return
    small = {"fontsize": 7, "parse_math": False}
    tokens = [word if len(word) <= LONGEST else f"{word[: LONGEST - 1]}…" for word in panel.tokens]
    ax.set_xticks(panel.columns, tokens, rotation=90, **small)
    ax.set_yticks(panel.rows, tokens, **small)
    ax.tick_params(length=0)


# ---- Panels of a picture side by side, written as a whole file.


@contextmanager
def panels(path: Path, count: int, width: float, height: float) -> Iterator[Any]:
    """Give `count` axes, each so many inches large; what is drawn on them becomes a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, count, figsize=(width * count, height), squeeze=False)
    yield axes[0]
    figure.tight_layout()
    with atomic_path(path) as partial:
        figure.savefig(partial, format="png", dpi=120)
    pyplot.close(figure)


def of_tokens(axis: Any, kind: str) -> None:
    """Make the horizontal axis one of numbers of tokens, none and powers of two."""
    axis.set_xlabel(f"{kind} (tokens)")
    axis.set_xscale("symlog", base=2, linthresh=1)
    axis.set_xlim(left=0)
