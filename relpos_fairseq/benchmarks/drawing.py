"""Pictures of ratios: bars of whole models, lines over length of attention."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from relpos_fairseq.engine.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = (".png", ".svg", ".pdf")
BLUE, ORANGE = "#0072B2", "#D55E00"
STYLES = {"": "-", "naive": "--", "FlexAttention": ":"}  # others: a backend by name
BACKEND_STYLE = "-."
MARKERS = "os^vDxPh"


def check_plot(path: Path | None) -> None:
    """Refuse before anything is measured what could not be drawn after."""
    if path is None:
        return
    if path.suffix not in KINDS:
        raise ValueError(f"--plot must end in {', '.join(KINDS)}, got {path}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from error


def draw_bars(path: Path, panels: dict[str, dict[str, float]], title: str) -> None:
    """Draw a panel a measurement, a bar a row with its ratio, and a line at 1."""
    from matplotlib.figure import Figure

    tallest = max(len(rows) for rows in panels.values())
    figure = Figure((3.6 * len(panels) + 1.4, 0.22 * tallest + 1.4), layout="tight")
    grid = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (heading, rows) in zip(grid, panels.items(), strict=True):
        names, values = list(rows), list(rows.values())
        colours = [BLUE if " " not in name and name != "fairseq" else ORANGE for name in names]
        axis.barh(names, values, color=colours)
        axis.axvline(1, color="black", linewidth=0.8)
        axis.invert_yaxis()
        axis.set_title(heading, fontsize=9)
        axis.tick_params(labelsize=7)
        for name, value in rows.items():
            axis.text(value, name, f" {value:.2f}", va="center", fontsize=6)
        axis.margins(x=0.15)
    figure.suptitle(title, fontsize=9)
    _save(figure, path)


def draw_lengths(path: Path, modes: dict[str, list[dict]], baseline: str, title: str) -> None:
    """Draw a panel a mode, a colour a scheme: median ratio over length, without the baseline."""
    from matplotlib.figure import Figure

    figure = Figure((3 + 5 * len(modes), 6.5), layout="constrained")
    grid = figure.subplots(1, len(modes), squeeze=False)[0]
    found = [row for rows in modes.values() for row in rows if row["name"] != baseline]
    names = list(dict.fromkeys(row["name"] for row in found))
    for axes, (heading, rows) in zip(grid, modes.items(), strict=True):
        _draw_mode(axes, rows, names)
        axes.set_title(heading)
    lines = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
    shown = [scheme for scheme in _schemes(names) if scheme in lines]
    figure.legend([lines[n] for n in shown], shown, loc="outside right upper", fontsize="small")
    figure.suptitle(f"{title}\ndashed: the papers' formula; dotted: FlexAttention", fontsize="small")
    _save(figure, path)


def _schemes(names: list[str]) -> list[str]:
    return list(dict.fromkeys(name.split(", ")[0] for name in names))


def _draw_mode(axes: Axes, rows: list[dict], names: list[str]) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import FuncFormatter

    schemes = _schemes(names)
    for name in names:
        scheme, *way = name.split(", ")
        number = schemes.index(scheme)
        found = [row for row in rows if row["name"] == name and "ratio" in row]
        found.sort(key=lambda row: row["length"])
        axes.plot(
            [row["length"] for row in found],
            [row["ratio"] for row in found],
            STYLES.get(way[0] if way else "", BACKEND_STYLE),
            marker=MARKERS[number % len(MARKERS)],
            color=colormaps["tab20"](number % 20),
            label=name,
        )
    lengths = sorted({row["length"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [f"{length}" for length in lengths])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("length")
    axes.set_ylabel("ratio to attention without positions")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.grid(alpha=0.3)


def _save(figure: Figure, path: Path) -> None:
    with atomic_path(path) as partial:
        figure.savefig(partial, dpi=150)
