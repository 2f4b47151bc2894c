"""Show what a job does: a progress bar or sparse log lines, and Markdown tables."""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress

from tqdm import tqdm

MARKUP = re.compile(r"[\\`*|\[\]]")  # what Markdown would read as more than text
FORMULA, NUMBER = ("=", "+", "-", "@", "\t", "\r"), re.compile(r"[-+][\d.]+(e[-+]?\d+)?|-inf")
FIRST, EVERY = 10.0, 60.0  # seconds until long work says the first line, and between two lines
TICK = 1.0  # seconds between two looks of the thread that says what no step says itself

# Whatever is said is said under the lock, and a fork waits for it: no child begins in the middle of a line.
_lock = threading.Lock()
_under_way: list["Bar | LogProgress"] = []  # what is at work, each inside the one before it
_next = 0.0  # when the next line is due


def progress(
    iterable: Iterable | None = None,
    total: int | None = None,
    description: str = "",
    unit: str = "it",
    note: Callable[[], str] = str,
) -> "Bar | LogProgress":
    """Wrap an iterable, or count by `update(n)`; also a context manager.

    On a terminal it is a bar, in a log a line a minute; nothing is shown of what takes less than `FIRST` seconds.
    `total` is the number of items, if known; the unit "B" is printed in kB, MB, ...; `note` says more, such as
    what a child's log says.
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    if sys.stderr.isatty():
        scale = {"unit_scale": True} if unit == "B" or (total or 0) > 100_000 else {}
        how = {"total": total, "desc": description, "unit": unit, "miniters": 1, "delay": FIRST, **scale}
        return Bar(iterable, file=sys.stderr, **how).noting(note)
    return LogProgress(iterable, total, description, unit, note)


def doing(description: str, note: Callable[[], str] = str) -> "LogProgress":
    """Return a context of work that cannot be counted: while it lasts, a line a minute says so, on a terminal too."""
    return LogProgress(None, None, description, "", note)


def say(line: str) -> None:
    """Print a line to standard output, above the bar if there is one."""
    Bar.write(line)
    sys.stdout.flush()


def _begin(work: "Bar | LogProgress") -> None:
    """Add work to what is under way; the outermost starts the thread, which ends after it."""
    global _next
    _under_way.append(work)
    if len(_under_way) == 1:
        _next = time.monotonic() + FIRST
        threading.Thread(target=_watch, args=(work,), daemon=True).start()


def _end(work: "Bar | LogProgress") -> None:
    """Remove work from what is under way, and what an exception has left inside it."""
    with _lock:
        if work in _under_way:
            del _under_way[_under_way.index(work) :]


def _watch(outermost: "Bar | LogProgress") -> None:
    while outermost in _under_way:
        tick()
        time.sleep(TICK)


def tick() -> None:
    """Say what is under way, if a line is due; renew a bar."""
    global _next
    if time.monotonic() < _next:
        return
    with _lock, suppress(IndexError):
        if isinstance(work := _under_way[-1], Bar):
            work.set_postfix_str(work.note())
        elif (now := time.monotonic()) >= _next:
            _next = now + EVERY
            line = ": ".join([*(one.description for one in _under_way[:-1]), work.line(now)])
            Bar.write(line, sys.stderr)
            sys.stderr.flush()


def _forget() -> None:
    """Begin a forked child: what is under way is its parent's."""
    _under_way.clear()
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forget)


class Bar(tqdm):
    """tqdm's bar without its watching thread: workers are forked beside it."""

    monitor_interval = 0

    def noting(self, note: Callable[[], str]) -> "Bar":
        """Show what `note` says, too."""
        self.note, self.description = note, self.desc.removesuffix(": ")
        _begin(self)
        return self

    def close(self) -> None:
        """Take the bar away."""
        if hasattr(self, "note"):
            _end(self)
        super().close()


class LogProgress:
    """Counts, and leaves it to `tick` to say how far it is; without a unit, only how long it lasts."""

    def __init__(
        self, iterable: Iterable | None, total: int | None, description: str, unit: str, note: Callable[[], str]
    ) -> None:
        self.iterable, self.total, self.unit, self.note = iterable, total, unit, note
        self.description = description or "progress"
        self.n, self.start = 0, time.monotonic()
        _begin(self)

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
        tick()

    def close(self) -> None:
        """End the work."""
        _end(self)

    def line(self, now: float) -> str:
        """Say how far the work is, and what remains."""
        seconds = max(now - self.start, 1e-9)
        parts = [f"{self.description}: {duration(seconds)}"]
        if self.unit:
            of = f" of {self.amount(self.total)} ({self.n / self.total:.0%})" if self.total else ""
            parts = [f"{self.description}: {self.amount(self.n)}{of}, {duration(seconds)}"]
            parts += [f"{self.amount(self.n / seconds)}/s"] if self.n > seconds else []
            parts += [f"{duration(seconds * (self.total / self.n - 1))} left"] if self.total and self.n else []
        with suppress(OSError, ValueError):  # what is noted may be a file that is being written
            parts += filter(None, [self.note()])
        return ", ".join(parts)

    def amount(self, n: float) -> str:
        """Write a number with its unit."""
        return f"{n / 1e6:,.1f} MB" if self.unit == "B" else f"{n:,.0f} {self.unit.strip()}"


def duration(seconds: float) -> str:
    """Return a time in words: 40 s, 12 min, 3.5 h."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 100 * 60 else f"{seconds / 3600:.1f} h"


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
