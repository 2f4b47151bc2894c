"""Show what a job does: a progress bar or sparse log lines, and Markdown tables."""

import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import TextIO

from tqdm import tqdm

MARKUP = re.compile(r"[\\`*|\[\]]")  # what Markdown would read as more than text
FORMULA, NUMBER = ("=", "+", "-", "@", "\t", "\r"), re.compile(r"[-+][\d.]+(e[-+]?\d+)?|-inf")
SECONDS = 30.0  # the longest silence in a log
STEPS = 10  # lines of a log for work of known size
SOON = 2.0  # seconds between two lines, at least


class Bar(tqdm):
    """tqdm's bar without its watching thread: workers are forked beside it."""

    monitor_interval = 0


def progress(
    iterable: Iterable | None = None,
    total: int | None = None,
    description: str = "",
    unit: str = "it",
    file: TextIO | None = None,
) -> "Bar | LogProgress":
    """Wrap an iterable, or count by `update(n)`; also a context manager.

    `total` is the number of items, if known; the unit "B" is printed in kB, MB, ...;
    `file` is stderr by default.
    """
    file = file or sys.stderr
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    if file.isatty():
        scale = {"unit_scale": True} if unit == "B" or (total or 0) > 100_000 else {}
        return Bar(iterable, total=total, desc=description, unit=unit, file=file, miniters=1, **scale)
    return LogProgress(iterable, total, description, unit, file)


class LogProgress:
    """Prints a line for each tenth of the work, or each half minute; none for short work."""

    def __init__(self, iterable: Iterable | None, total: int | None, description: str, unit: str, file: TextIO) -> None:
        self.iterable, self.total, self.unit, self.file = iterable, total, unit, file
        self.description = description or "progress"
        self.n = self.printed = 0
        self.start = self.last = time.monotonic()

    def __iter__(self) -> Iterator:
        with self:
            for item in self.iterable or ():
                yield item
                self.update()

    def __enter__(self) -> "LogProgress":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def update(self, n: int = 1) -> None:
        """Count n more."""
        self.n += n
        now = time.monotonic()
        stepped = self.total and self.n - self.printed >= self.total / STEPS
        if now - self.last >= (SOON if stepped else SECONDS):
            self.print(now)

    def close(self) -> None:
        """Print where the work ended, if any line was printed before."""
        if self.printed and self.printed != self.n:
            self.print(time.monotonic())

    def print(self, now: float) -> None:
        seconds = now - self.start
        of = f" of {self.amount(self.total)} ({self.n / self.total:.0%})" if self.total else ""
        rate = self.amount(self.n / seconds) if seconds else "?"
        print(f"{self.description}: {self.amount(self.n)}{of}, {seconds:.0f} s, {rate}/s", file=self.file, flush=True)
        self.last, self.printed = now, self.n

    def amount(self, n: float) -> str:
        """Write a number with its unit."""
        return f"{n / 1e6:,.1f} MB" if self.unit == "B" else f"{n:,.0f} {self.unit}"


def table(rows: Iterable[Sequence], headers: Sequence[str], written: bool = False) -> str:
    """Return a Markdown table; integers get thousands separators, unless the cells are `written` already."""
    import tabulate

    formats = {"disable_numparse": True} if written else {"intfmt": ",", "floatfmt": ",.2f"}
    return tabulate.tabulate(list(rows), headers, tablefmt="github", **formats)


def visible(text: str) -> str:
    """Return a text with escapes for the characters that cannot be seen, such as a tab or a zero-width space."""
    return "".join([one if one.isprintable() else one.encode("unicode_escape").decode() for one in text])


def markdown_text(text: str) -> str:
    """Return text of others, such as a label, as one line of Markdown that shows it and does nothing else."""
    return MARKUP.sub(r"\\\g<0>", " ".join(text.split())).replace("&", "&amp;").replace("<", "&lt;")


def csv_cell(value: object) -> object:
    """Return a cell of CSV; text that a spreadsheet would run as a formula gets an apostrophe in front."""
    text = value if isinstance(value, str) else ""
    return f"'{text}" if text[:1] in FORMULA and not NUMBER.fullmatch(text) else value


def counted(number: int, what: str) -> str:
    """Return a number of things in words: `1 seed`, `2 seeds`."""
    return f"{number:,} {what}{'s' * (number != 1)}"
