"""Bars of ratios."""

from __future__ import annotations

from pathlib import Path

BLUE, ORANGE = "#0072B2", "#D55E00"


def draw_ratios(path: Path, panels: dict[str, dict[str, float]], title: str) -> None:
    """A panel a measurement, a bar a row, a line at 1; written whole or not at all.

    Args:
        path: a .png, .pdf or .svg file.
        panels: by title, ratios by row.
        title: of the picture.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tallest = max(len(rows) for rows in panels.values())
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3.6 * len(panels) + 1.4, 0.22 * tallest + 1.4), squeeze=False
    )
    for axis, (heading, rows) in zip(axes[0], panels.items(), strict=True):
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
    figure.tight_layout()
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    figure.savefig(partial, dpi=150)
    plt.close(figure)
    partial.replace(path)
