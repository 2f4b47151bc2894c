"""The machine in words, and results as files."""

from __future__ import annotations

import csv
import datetime
import platform
from collections.abc import Iterable
from pathlib import Path

import torch

INTERRUPTED = "interrupted; rows are kept by --csv FILE: add --resume to continue, or they are lost"


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


class Log:
    """Rows of results, kept in a CSV file as they come, so that a run may be continued.

    Args:
        path: the file, or None: rows are in memory only.
        resume: keep the rows that the file has.
    """

    def __init__(self, path: Path | None, resume: bool = False) -> None:
        """Read the file, where it is to be continued.

        Raises:
            ValueError: the file is there and not to be continued, or has no folder.
        """
        self.path, self.rows = path, []
        if path is None:
            return
        if not path.parent.is_dir():
            raise ValueError(f"--csv {path}: there is no folder {path.parent}")
        if path.exists() and not resume:
            raise ValueError(
                f"--csv {path} has an earlier run's rows: --resume continues it; or name another"
            )
        if path.exists():
            self.rows = read_csv(path)

    def add(self, rows: Iterable[dict]) -> None:
        """Append rows; the file has them when this returns."""
        self.rows += rows
        if self.path is not None:
            write_csv(self.path, self.rows)

    def those(self, setting: dict) -> list[dict]:
        """The rows whose columns say the same as `setting`."""
        wanted = {name: str(value) for name, value in setting.items()}
        return [
            row
            for row in self.rows
            if all(str(row.get(name, "")) == value for name, value in wanted.items())
        ]


def read_csv(path: Path) -> list[dict]:
    """Rows of a CSV file; numbers are numbers, empty cells are left out."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return [{name: _value(text) for name, text in row.items() if text} for row in rows]


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


class _Silent:
    """Progress where tqdm is not installed: nothing is shown."""

    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self) -> None:
        """Nothing is counted."""


def progress(total: int, description: str):
    """A context manager whose `update()` counts one more of `total`; needs tqdm to be seen."""
    try:
        from relpos_fairseq.engine.progress import progress as shown
    except ModuleNotFoundError:
        return _Silent()
    return shown(total=total, description=description, unit="sample")
