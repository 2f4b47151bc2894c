"""Show what a job does: a progress bar or sparse log lines, and Markdown tables."""

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import suppress
from typing import TextIO

try:
    from tqdm import tqdm
except ModuleNotFoundError:  # `relpos benchmark attention` needs torch alone
    tqdm = None

MARKUP = re.compile(r"[\\`*|\[\]]")  # what Markdown would read as more than text
FORMULA, NUMBER = ("=", "+", "-", "@", "\t", "\r"), re.compile(r"[-+][\d.]+(e[-+]?\d+)?|-inf")
FIRST, EVERY = 10.0, 60.0  # seconds until long work is shown, or its bar renewed, and between two lines of a log
TICK = 1.0  # seconds between two looks of the thread that says what no step says itself

_lock = threading.RLock()  # of what follows, and of what is said: a fork waits, and begins in no line's middle
_under_way: list["Bar | LogProgress"] = []  # what is at work, each inside the one before it
_next = 0.0  # when the next line is due
_thread: threading.Thread | None = None  # says what lasts long in one step; there is none where nothing is at work


def progress(
    iterable: Iterable | None = None,
    total: int | None = None,
    description: str = "",
    unit: str = "it",
    note: Callable[[], str] = str,
) -> "Bar | LogProgress":
    """Wrap an iterable, or count by `update(n)`; also a context manager.

    On a terminal it is a bar, in a log a line a minute; nothing is shown of what takes less than `FIRST` seconds.
    `total` is the number of items, if known; the unit "B" is printed in kB, MB, ...; `note` says what
    else is known, such as what a child has logged and what remains.
    """
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    if tqdm and sys.stderr.isatty():
        scale = {"unit_scale": True} if unit == "B" or (total or 0) > 100_000 else {}
        how = {"total": total, "desc": description, "unit": unit, "miniters": 1, "delay": FIRST, **scale}
        bar = Bar(iterable, file=sys.stderr, **how)
        bar.description, bar.note = description, note
        return bar
    return LogProgress(iterable, total, description, unit, note)


def doing(description: str, note: Callable[[], str] = str) -> "LogProgress":
    """Return a context of work that cannot be counted: while it lasts, a line a minute says so, on a terminal too."""
    return LogProgress(None, None, description, "", note)


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line, to standard output if no file is given, above the bar if there is one."""
    file = file or sys.stdout
    (tqdm.write if tqdm and file.isatty() else print)(line, file=file)
    file.flush()


def hush() -> None:
    """Say no more of what is under way: it waits for a person who types."""
    _under_way.clear()


def tick() -> None:
    """Say what is under way, if a line is due; renew a bar."""
    global _next
    if (now := time.monotonic()) < _next:
        return
    with _lock, suppress(OSError, ValueError):  # nobody may read on
        if not _under_way or now < _next:
            return
        if isinstance(work := _under_way[-1], Bar):
            _next = now + FIRST
            work.renew()
        else:
            _next = now + EVERY
            say(": ".join([*(one.description for one in _under_way[:-1]), work.line(now)]), sys.stderr)


def _begin(work: "Bar | LogProgress") -> None:
    """Add work to what is under way; the outermost starts the thread."""
    global _next, _thread
    with _lock:
        if not _under_way:
            _next = time.monotonic() + FIRST
        _under_way.append(work)
        if _thread is None:
            _thread = threading.Thread(target=_watch, daemon=True)
            _thread.start()


def _end(work: "Bar | LogProgress") -> None:
    """Remove work from what is under way, and what an exception has left inside it."""
    with _lock:
        for place, one in enumerate(_under_way):
            if one is work:
                del _under_way[place:]
                return


def _watch() -> None:
    """Look again and again, in a thread, until nothing is under way."""
    global _thread
    while True:
        time.sleep(TICK)
        tick()
        with _lock:
            if not _under_way:
                _thread = None
                return


def _forget() -> None:
    """Begin a forked child: what is under way, and the thread, are its parent's."""
    global _thread
    _under_way.clear()
    _thread = None
    _lock.release()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_forget)


class Bar(tqdm or object):  # type: ignore[misc]
    """tqdm's bar without its watching thread: workers are forked beside it."""

    monitor_interval = 0
    description: str
    note: Callable[[], str]

    def __iter__(self) -> Iterator:
        with self:
            yield from super().__iter__()

    def __enter__(self) -> "Bar":
        _begin(self)
        return super().__enter__()

    def close(self) -> None:
        """Take the bar away."""
        _end(self)
        super().close()

    def renew(self) -> None:
        """Show the time and what is noted, though nothing was counted."""
        if time.time() >= self.start_t + self.delay:
            self.set_postfix_str(_noted(self))


class LogProgress:
    """Counts, and leaves it to `tick` to say how far it is; without a unit, only how long it lasts."""

    def __init__(
        self, iterable: Iterable | None, total: int | None, description: str, unit: str, note: Callable[[], str]
    ) -> None:
        self.iterable, self.total, self.unit, self.note = iterable, total, unit, note
        self.description = description or "progress"
        self.n, self.start = 0, time.monotonic()

    def __iter__(self) -> Iterator:
        with self:
            for item in self.iterable or ():
                yield item
                self.update()

    def __enter__(self) -> "LogProgress":
        _begin(self)
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
            far = (
                f"{self.amount(self.n, self.total)} ({self.n / self.total:.0%})" if self.total else self.amount(self.n)
            )
            parts = [f"{self.description}: {far}", duration(seconds)]
            parts += [f"{self.amount(self.n / seconds)}/s"] if self.n > seconds else []
        if note := _noted(self):
            parts += [note]
        elif self.total and self.n:
            parts += [f"{duration(seconds * (self.total / self.n - 1))} left"]
        return ", ".join(parts)

    def amount(self, *numbers: float) -> str:
        """Write numbers with their unit: `3 of 10 lines`."""
        scale, digits, unit = (1e6, 1, "MB") if self.unit == "B" else (1, 0, self.unit.strip())
        return f"{' of '.join([f'{n / scale:,.{digits}f}' for n in numbers])} {unit}"


def _noted(work: Bar | LogProgress) -> str:
    """Return what else is known of work; what it is read from may be absent, or be written just now."""
    with suppress(Exception):
        return work.note()
    return ""


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
