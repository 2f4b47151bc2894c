"""Draw with matplotlib: a `Picture` is a grid of panels with a CSV of the same numbers; `panels` gives bare axes.

Signed values have a diverging colour map that is white at the neutral value and safe for colour-blind readers;
probabilities a sequential one. Entries that do not exist (a decoder's future) are grey in the PNG and empty in the CSV.
Whoever works without matplotlib imports this file in the functions that draw.
"""

from __future__ import annotations

import csv
import functools
import io
import logging
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from relpos_fairseq.io.files import atomic_path
from relpos_fairseq.io.progress import csv_cell

matplotlib.use("Agg")
logger = logging.getLogger(__name__)

# Okabe and Ito's palette, without its yellow, which is too light for a line on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
GRAPHS = ("lines", "dots", "bars")  # the other kinds of picture are images
MARKERS = ("o", "s", "^", "D")
DASHES = ("-", "--", "-.", ":")  # of curves beyond the colours
MARKED = 8  # places of a curve that have its marker
LEAST = 0.01  # of the largest value: what an axis of curves covers at least, so that noise is no cliff
NAMELESS = ("part", "data")  # keys whose values say by themselves what they are
ABSENT = "#e6e6e6"  # the colour of entries that do not exist
MOST_TOKENS = 40  # tokens that are written on the axes of an image; where there are more, none is
MOST_TICKS = 8  # of tokens on an axis
LONGEST = 14  # characters of a token on an axis; longer ones would run into the title
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "figure.titlesize": 11,
    "legend.fontsize": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 150,
    "text.parse_math": False,
}


class Absent(Exception):
    """A checkpoint has nothing of a kind to draw; the message says what and why."""


def head_names(count: int) -> list[str]:
    """Return the names of so many heads, 1 to H, or `all` for a single one that all heads share."""
    return ["all"] if count == 1 else [str(head) for head in range(1, count + 1)]


@dataclass(frozen=True)
class Panel:
    """One panel: a matrix, with the names of its rows and columns."""

    key: dict[str, str]  # what the panel shows, as {"layer": "1", "head": "2"}; `all` where it is shared
    rows: list  # names of the lines, or coordinates down an image
    columns: Sequence[float]  # coordinates from left to right; of an image consecutive integers
    values: np.ndarray  # (rows, columns), NaN for entries that do not exist
    tokens: list[str] | None = None  # names for the coordinates of a square image

    @property
    def title(self) -> str:
        """The key in words, and that all values are zero, which an empty panel does not say."""
        words = [
            f"all {name}s" if value == "all" else value if name in NAMELESS else f"{name} {value}"
            for name, value in self.key.items()
        ]
        known = self.values[~np.isnan(self.values)]
        return ", ".join([*words, "all zero"] if known.size and not known.any() else words)


@dataclass(frozen=True)
class Picture:
    """A grid of panels that share axes and colours."""

    name: str  # of the files, without suffix
    title: str
    detail: str  # stack and scheme, below the title
    kind: str  # `lines`, `dots`, `bars`, `signed` or `positive` (images)
    panels: list[Panel]  # in reading order
    row: str  # what rows are, in one word (a CSV column)
    column: str  # what columns are, in one word (a CSV column's prefix)
    axes: tuple[str, str, str]  # labels of the horizontal axis, of an image's vertical axis, and of the values
    across: int | None = None  # panels in a row of the grid; None: as square as possible
    neutral: float | None = 0.0  # the value that has no effect, or None


@contextmanager
def panels(path: Path, count: int, width: float, height: float, title: str = "") -> Iterator[list[Axes]]:
    """Give `count` axes side by side, each so many inches large, and write the figure when the block ends."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, count, figsize=(width * count, height), squeeze=False, layout="constrained")
        figure.suptitle(title, fontsize=9)
        try:
            yield list(axes[0])
            for ax in axes[0]:
                curves = [line for line in ax.lines if line.get_transform() == ax.transData]  # and no marks of a place
                if ax.get_yscale() == "linear" and curves:
                    ax.ticklabel_format(axis="y", useOffset=False)
                    widen(ax, np.concatenate([np.asarray(line.get_ydata(), float) for line in curves]))
            save_figure(figure, path)
        finally:
            plt.close(figure)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure, whole or not at all, in the format of the path's suffix."""
    with atomic_path(path) as partial, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # `fonts_for` has told
        figure.savefig(partial, format=path.suffix[1:])


def fonts_for(text: str) -> list[str]:
    """Return the names of matplotlib's own font and of fonts of this system that have the characters it lacks.

    A warning names the characters that no font here has: they are drawn as boxes.
    """
    usual = str(plt.rcParamsDefault["font.sans-serif"][0])
    missing = set(map(ord, text)) - _characters_of(font_manager.findfont(usual))
    missing = {one for one in missing if chr(one).isprintable() and not chr(one).isspace()}
    names = [usual]
    for font in font_manager.fontManager.ttflist if missing else ():
        if font.name not in names and missing & _characters_of(font.fname):
            missing -= _characters_of(font.fname)
            names.append(font.name)
        if not missing:
            break
    if missing:
        shown = "".join(map(chr, sorted(missing)[:10]))
        logger.warning("no font of this system has %s: they are drawn as boxes (install one, such as Noto)", shown)
    return names


@functools.cache
def _characters_of(path: str) -> set[int]:
    with suppress(Exception):  # a broken font is none
        return set(font_manager.get_font(path).get_charmap())
    return set()


def show_tokens(axis: Axes, kind: str) -> None:
    """Make the horizontal axis one of numbers of tokens: the curves' own, or powers of two where these are many."""
    axis.set_xlabel(f"{kind} (tokens)")
    axis.set_xscale("symlog", base=2, linthresh=1)
    curves = [line.get_xdata() for line in axis.lines if line.get_transform() == axis.transData]
    places = sorted({float(place) for curve in curves for place in curve})
    if not places:
        return
    least, most = places[0], places[-1]
    if len(places) > MOST_TICKS or any(place % 1 for place in places):
        powers = [float(1 << n) for n in range(64) if least <= 1 << n <= most]
        places = [0.0] * (least == 0) + powers[:: -(-len(powers) // MOST_TICKS) or 1]
    axis.set_xticks(places, [f"{place:.0f}" for place in places])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlim(least / 1.1, most * 1.1 or 1)


def write_picture(picture: Picture, folder: Path) -> list[Path]:
    """Write a picture as PNG and CSV; return their paths."""
    paths = [folder / f"{picture.name}.png", folder / f"{picture.name}.csv"]
    words = [picture.detail, *(str(one) for panel in picture.panels for one in (*panel.rows, *(panel.tokens or ())))]
    with plt.rc_context(STYLE | {"font.family": fonts_for("".join(words))}):
        figure = draw_picture(picture)
        try:
            save_figure(figure, paths[0])
        finally:
            plt.close(figure)
    with atomic_path(paths[1]) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(csv_rows(picture))
    return paths


def svg_text(picture: Picture) -> str:
    """Return a picture as SVG for the inside of an HTML page: words are text, and what is black has the page's colour.

    Equal pictures give equal texts.
    """
    file, nothing = io.StringIO(), dict.fromkeys(("Creator", "Date", "Format", "Type"))
    salt = f"{picture.title} {[panel.values.tolist() for panel in picture.panels]}"  # ids of two pictures differ
    svg = {"svg.fonttype": "none", "svg.hashsalt": salt, "font.sans-serif": "DejaVu Sans"}
    with plt.rc_context(STYLE | svg), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # the reader's browser has it
        figure = draw_picture(picture)
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
        plt.close(figure)
    text = "<svg" + file.getvalue().partition("<svg")[2]
    for words, shorter in (
        (r' xmlns(:xlink)?="http[^"]*"', ""),
        (r'<g id="[\w.]+">', "<g>"),  # several pictures of a page would have the same
        ("(fill|stroke): #000000", r"\1: currentColor"),
    ):
        text = re.sub(words, shorter, text)
    return text


def csv_rows(picture: Picture) -> Iterator[list]:
    """Yield the rows of a picture's CSV: a header, then one for every row of every panel."""
    first = picture.panels[0]
    token = ["token"] if first.tokens else []
    longest = max((panel.columns for panel in picture.panels), key=len)
    columns = [f"{picture.column}_{column}" for column in longest]
    yield [*first.key, picture.row, *token, *columns]
    for panel in picture.panels:
        for index, (name, values) in enumerate(zip(panel.rows, panel.values, strict=True)):
            word = [panel.tokens[index]] if panel.tokens else []
            numbers = ["" if np.isnan(value) else f"{value:.9g}" for value in values]
            yield [*map(csv_cell, (*panel.key.values(), name, *word)), *numbers]


def draw_picture(picture: Picture) -> Figure:
    """Draw a picture as a figure of matplotlib's."""
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
    draw = {"bars": draw_bar_panels, "lines": draw_lines, "dots": draw_lines}.get(picture.kind, draw_images)
    draw(figure, used, picture)
    lines = [picture.title, *textwrap.wrap(picture.detail, int(size[0] * 12))]
    figure.suptitle("\n".join(lines))
    for index, ax in enumerate(used):
        ax.tick_params(labelbottom=index + across >= count, labelleft=picture.kind == "bars" or index % across == 0)
        if picture.kind in GRAPHS and index + across >= count:
            ax.set_xlabel(picture.axes[0])
    if picture.kind not in GRAPHS:
        figure.supxlabel(picture.axes[0], fontsize=9)
    return figure


def panel_size(picture: Picture, across: int) -> tuple[float, float]:
    """Return the width and height of a panel in inches."""
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
    """Draw a bar with its number for every row of a panel, on an axis that begins at zero."""
    for ax, panel in zip(axes, picture.panels, strict=True):
        scores = panel.values[:, 0]
        places = np.arange(len(scores))
        bars = ax.bar(places, np.nan_to_num(scores), color=COLOURS[0], width=0.7)
        ax.bar_label(bars, ["" if np.isnan(s) else f"{s:.1f}" for s in scores], fontsize=7)
        ax.set_ylim(min(0.0, 1.1 * np.nanmin(scores)), 1.1 * max(np.nanmax(scores), 0.0) or 1.0)
        ax.set_xticks(places, panel.rows, rotation=45, ha="right", fontsize=7)
        ax.set_title(panel.title)
    figure.supylabel(picture.axes[2], fontsize=9)


def draw_lines(figure: Figure, axes: list[Axes], picture: Picture) -> None:
    """Draw a line, or dots, for every row of a panel; several are told apart by colour, marker and dash."""
    most = max(len(panel.rows) for panel in picture.panels)
    curves: list[list[Line2D]] = []  # of each panel
    for ax, panel in zip(axes, picture.panels, strict=True):
        curves.append([])
        if picture.kind == "lines" and picture.neutral is not None:
            ax.axhline(picture.neutral, color="#bbbbbb", linewidth=0.8, zorder=0)
        for index, (name, values) in enumerate(zip(panel.rows, panel.values, strict=True)):
            label = f"head {name}" if picture.row == "head" else str(name)
            style = {"color": COLOURS[index % len(COLOURS)], "label": label, "linewidth": 1.4, "markersize": 3.5}
            known = ~np.isnan(values)  # each curve has its own points
            points = np.array(panel.columns)[known], values[known]
            if picture.kind == "dots":
                style |= {"linestyle": ":", "marker": MARKERS[index % 4], "linewidth": 0.8}
                style |= {"markersize": 7 - 1.5 * (index % 4), "markerfacecolor": "none"}
            else:
                style["linestyle"] = DASHES[index // len(COLOURS) % len(DASHES)]
                if most > 1 or len(points[0]) == 1:  # one point is no line
                    every = -(-len(points[0]) // MARKED) or 1
                    style |= {"marker": MARKERS[index % len(MARKERS)], "markevery": (index % every, every)}
            curves[-1] += ax.plot(*points, **style)
        ax.set_title(panel.title + (", all heads" if panel.rows == ["all"] else ""))
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        ax.ticklabel_format(axis="y", useOffset=False)
    if picture.kind == "lines":
        widen(axes[0], np.concatenate([panel.values.ravel() for panel in picture.panels]))
    if picture.kind == "dots":
        axes[0].set_ylim(0, 1.1 * max(panel.values.max() for panel in picture.panels))
        axes[0].yaxis.set_major_locator(MaxNLocator(5, integer=True))
    figure.supylabel(picture.axes[2], fontsize=9)
    if most > 1:
        handles = max(curves, key=len)
        labels = [str(curve.get_label()) for curve in handles]  # also those that begin with _
        each = 0.65 + 0.06 * max(map(len, labels))  # inches
        columns = max(1, min(len(labels), int(figure.get_figwidth() / each)))
        figure.set_figheight(figure.get_figheight() + 0.17 * max(-(-len(labels) // columns) - 2, 0))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def widen(ax: Axes, values: np.ndarray) -> None:
    """Let a vertical axis cover `LEAST` of the largest of the values on it, where these hardly differ."""
    known = values[np.isfinite(values)]
    if known.size and np.ptp(known) < (least := LEAST * np.abs(known).max()):
        middle = (known.max() + known.min()) / 2
        ax.set_ylim(middle - least / 2, middle + least / 2)


def draw_images(figure: Figure, axes: list[Axes], picture: Picture) -> None:
    """Draw every panel's matrix as an image; all share one scale of colours."""
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
    """Return how far colours reach from the neutral value, and at which ends the colour bar has an arrow.

    A few outliers (a decoder's first row, a reset row) are clipped, so that all other values keep their colours.
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
    """Write the tokens on both axes of an image if there are few enough, else a few round numbers."""
    if panel.tokens is None or len(panel.tokens) > MOST_TOKENS:
        ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(5, integer=True))
        return
    small = {"fontsize": 7}
    tokens = [word if len(word) <= LONGEST else f"{word[: LONGEST - 1]}…" for word in panel.tokens]
    ax.set_xticks(panel.columns, tokens, rotation=90, **small)
    ax.set_yticks(panel.rows, tokens, **small)
    ax.tick_params(length=0)
