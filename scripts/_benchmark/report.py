"""The machine in words, and results as files."""

from __future__ import annotations

import csv
import datetime
import platform
from pathlib import Path

import torch


def machine(device: torch.device, threads: int) -> str:
    """The machine and the versions, in one line."""
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


def write_section(path: Path, key: str, text: str) -> None:
    """Put a text between a file's marks of this key, or append it with marks; whole or not."""
    begin, end = f"<!-- {key}: begin -->", f"<!-- {key}: end -->"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    section = f"{begin}\n{text.strip()}\n{end}"
    if begin in old and end in old:
        new = old[: old.index(begin)] + section + old[old.index(end) + len(end) :]
    else:
        new = f"{old.rstrip()}\n\n{section}\n".lstrip()
    partial = path.with_name(path.name + ".partial")
    partial.write_text(new, encoding="utf-8")
    partial.replace(path)


def write_csv(path: Path, rows: list[dict]) -> None:
    """All rows; whole or not at all."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)
