"""Ratios over length as a picture."""

from __future__ import annotations

from pathlib import Path

from relpos_fairseq.benchmarks.candidates import BASELINE
from relpos_fairseq.benchmarks.tables import TITLES

KINDS = (".png", ".svg", ".pdf")
STYLES = {"": "-", "naive": "--", "FlexAttention": ":"}  # others: a backend by name
BACKEND_STYLE = "-."
MARKERS = "os^vDxPh"


def check_plot(path: Path) -> None:
    """Refuse before anything is measured what could not be drawn after.

    Raises:
        ValueError: matplotlib is not installed, or the file's kind is unknown.
    """
    if path.suffix not in KINDS:
        raise ValueError(f"--plot must end in {', '.join(KINDS)}, got {path}")
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError as error:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from error


def plot_ratios(path: Path, rows: list[dict], title: str) -> None:
    """A panel a mode, a colour a scheme: median ratio to attention without positions.

    Args:
        path: the picture; whole or not at all.
        rows: of results.
        title: what was measured.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    modes = [mode for mode in TITLES if any(row["mode"] == mode for row in rows)]
    names = [n for n in dict.fromkeys(row["name"] for row in rows) if n != BASELINE]
    schemes = list(dict.fromkeys(name.split(", ")[0] for name in names))
    figure = Figure(figsize=(3 + 5 * len(modes), 6.5), layout="constrained")
    for axes, mode in zip(figure.subplots(1, len(modes), squeeze=False)[0], modes, strict=True):
        for name in names:
            scheme, *way = name.split(", ")
            number = schemes.index(scheme)
            found = [r for r in rows if (r["name"], r["mode"]) == (name, mode) and "ratio" in r]
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
        axes.set_title(TITLES[mode])
        axes.grid(alpha=0.3)
    lines = dict(zip(*reversed(figure.axes[0].get_legend_handles_labels()), strict=True))
    shown = [scheme for scheme in schemes if scheme in lines]
    figure.legend([lines[n] for n in shown], shown, loc="outside right upper", fontsize="small")
    figure.suptitle(
        f"{title}\ndashed: the papers' formula; dotted: FlexAttention", fontsize="small"
    )
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    figure.savefig(partial, dpi=120)
    partial.replace(path)
