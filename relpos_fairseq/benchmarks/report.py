"""The machine in words, and results as markdown."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import torch

from relpos_fairseq.engine.files import write_text

HOW = "Median relative to {}'s (in brackets: minimum to minimum) ± half the quartile distance."


def machine(device: torch.device, threads: int) -> str:
    """Return the machine and the versions, in one line."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{_processor_name()}, {threads} threads"
    today = datetime.date.today().isoformat()
    return f"{name}; Python {platform.python_version()}, torch {torch.__version__}; {today}"


def _processor_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        return next(ln.split(":")[1].strip() for ln in text.splitlines() if "model name" in ln)
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions(names: Sequence[str]) -> str:
    """Return the versions of the packages that are installed."""
    found = []
    for name in dict.fromkeys(names):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a markdown table."""
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def time_cell(row: dict, baseline: str, digits: int = 1) -> str:
    """Return a row's time as a cell: milliseconds of the baseline, ratios of all others."""
    if row["name"] == baseline:
        least = f" ({row['least_ms']:.{digits}f})" if digits > 1 else ""
        return f"{row['ms']:.{digits}f}{least} ms ±{row['spread']:.0%}"
    return f"{row['ratio']:.2f} ({row['least_ratio']:.2f}) ±{row['spread']:.0%}"


def verdict(found: float, limit: float | None) -> str:
    """Return PASS or OVER with the ratio that should not be exceeded; "" where none is known."""
    if limit is None:
        return ""
    return f" {'PASS' if found <= limit else 'OVER'} {limit:.2f}"


def write_section(path: Path, key: str, text: str) -> None:
    """Put a text between a file's marks of this key, or append it with marks; whole or not."""
    begin, end = f"<!-- {key}: begin -->", f"<!-- {key}: end -->"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    section = f"{begin}\n{text.strip()}\n{end}"
    if begin in old and end in old:
        new = old[: old.index(begin)] + section + old[old.index(end) + len(end) :]
    else:
        new = f"{old.rstrip()}\n\n{section}\n".lstrip()
    write_text(path, new)


def progress(total: int, description: str) -> AbstractContextManager:
    """Return a context whose `update()` counts one more of `total`; shown where tqdm is."""
    try:
        from relpos_fairseq.engine.progress import progress as shown
    except ModuleNotFoundError:
        return nullcontext(SimpleNamespace(update=lambda: None))
    return shown(total=total, description=description, unit="sample")
