"""Panels of a picture side by side, written as a whole file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from relpos_fairseq.engine.files import atomic_path


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
