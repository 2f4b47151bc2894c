"""Time candidates in turns, keep their rows in a CSV file, and show them as markdown and as a plot."""

from __future__ import annotations

import csv
import ctypes
import datetime
import gc
import importlib
import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.benchmark import timer

from relpos_fairseq.io import processor
from relpos_fairseq.io.files import atomic_path, write_text
from relpos_fairseq.io.manifests import version_of
from relpos_fairseq.io.processes import mebibytes
from relpos_fairseq.io.progress import progress
from relpos_fairseq.io.reading import reading
from relpos_fairseq.lab.benchmarks.workload import Options

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# ---------------------------------------------------------------------------------------------------------------------
# Time.  `torch.utils.benchmark.timer` waits for the GPU before it reads the clock.  Torch's `Timer` takes all samples
# of one candidate, then those of the next; here candidates take turns: a machine that slows down slows all of them.

SAMPLE = 0.02  # seconds that one sample lasts at least
WARM = 0.25  # runs that last longer than this fill the caches themselves
WAITING = 30.0  # seconds that a column waits for an idle machine in all


@dataclass
class Times:
    """Milliseconds of one candidate."""

    samples: list[float]  # each the mean of some runs
    noisy: int = 0  # how many of them were taken on a machine that was not idle

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def least(self) -> float:
        return min(self.samples)

    @property
    def spread(self) -> float:
        """Return half the distance between quartiles, relative to the median; 0 for one sample."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / 2 / self.median


def time_in_turns(
    runs: dict[str, Callable[[], object]], rounds: int, seconds: float, tick: Callable[[], object] = lambda: None
) -> tuple[dict[str, Times], int]:
    """Time every run once a round, for `rounds` rounds or until about `seconds` are over.

    Three rounds are made (or `rounds`, if fewer) whatever they last. `tick` is called after each run's sample, and
    after each run's first call.

    Returns:
        Times by name, and how many samples were taken on a machine that was not idle.
    """
    begun, waited = time.monotonic(), 0.0
    lasts = {}
    for name, run in runs.items():
        lasts[name] = _seconds(run)  # the first call may compile and allocate
        if lasts[name] <= 2:
            lasts[name] = _seconds(run)
        tick()
    times = {name: Times([]) for name in runs}
    for number in range(rounds):
        for name, run in runs.items():
            before = time.monotonic()
            times[name].noisy += not wait_until_idle(1.5 if waited < WAITING else 0.0)
            waited += time.monotonic() - before
            if lasts[name] < WARM:
                run()
            times[name].samples.append(1e3 * _seconds(run, max(1, min(200, int(SAMPLE / lasts[name])))))
            tick()
        if number >= 2 and time.monotonic() - begun > seconds:
            break
    return times, sum(found.noisy for found in times.values())


def _seconds(run: Callable[[], object], repeats: int = 1) -> float:
    """Return the seconds of a run, the mean of `repeats`."""
    start = timer()
    for _ in range(repeats):
        run()
    return (timer() - start) / repeats


def wait_until_idle(patience: float = 1.5, limit: float = 0.2) -> bool:
    """Wait for the machine to be idle; return False where it was not within `patience` seconds."""
    end = time.monotonic() + patience
    while True:
        if not busy_share() > limit:
            return True
        if time.monotonic() >= end:
            return False


def busy_share(seconds: float = 0.05) -> float:
    """Return the share of the machine's cores that anything used just now; nan where that is unknown."""
    try:
        before = _processor_time()
        time.sleep(seconds)
        after = _processor_time()
    except OSError:
        return math.nan
    return (after[0] - before[0]) / max(after[1] - before[1], 1)


def _processor_time() -> tuple[int, int]:
    """Return the ticks that all cores were busy, and all ticks."""
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(part) for part in file.readline().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


# ---------------------------------------------------------------------------------------------------------------------
# Memory.

MMAP_THRESHOLD = -3  # mallopt's M_MMAP_THRESHOLD: bytes from which storage is the system's own


def peak_mebibytes(run: Callable[[], object], device: torch.device) -> float:
    """Return the largest memory of a run beyond what was there before, in MiB; nan where that is unknown.

    On a CPU it is resident memory, of a thread that begins for it: what a backend keeps for a thread's next call counts
    as well.
    """
    run()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_resident_peak, run).result()


def _resident_peak(run: Callable[[], object]) -> float:
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = mebibytes("VmRSS")
    except OSError:  # not Linux
        return math.nan
    # What was freed into a thread's heap stays there, and would serve the run unseen.
    libc.mallopt(MMAP_THRESHOLD, 1 << 16)
    try:
        run()
        return mebibytes("VmHWM") - before
    finally:
        libc.mallopt(MMAP_THRESHOLD, 32 << 20)  # what it has become by then in any process


# ---------------------------------------------------------------------------------------------------------------------
# Rows of results.


class RowLog:
    """Rows of results, kept in a CSV file as they come, so that a run may be continued.

    Without a path rows are in memory only; a file that is there is continued or refused.
    """

    def __init__(self, path: Path | None, resume: bool = False) -> None:
        self.path, self.rows = path, []
        if path is None:
            return
        if not path.parent.is_dir():
            raise ValueError(f"--csv {path}: there is no folder {path.parent}")
        if path.exists() and not resume:
            raise ValueError(f"--csv {path} has an earlier run's rows: --resume continues it; or name another")
        if path.exists():
            self.rows = read_csv(path)

    def those(self, where: dict) -> list[dict]:
        """Return the rows whose columns have the values of `where`."""
        return [row for row in self.rows if _is_of(row, where)]

    def lacks(self, where: dict, names: Iterable[str]) -> bool:
        """Return whether any of these candidates has no row yet."""
        return not {row["name"] for row in self.those(where)}.issuperset(names)

    def add(self, where: dict, rows: Iterable[dict]) -> None:
        """Append rows of candidates that have none; the file has them when this returns."""
        had = {row["name"] for row in self.those(where)}
        self.rows += [{**where, **row} for row in rows if row["name"] not in had]
        if self.path is not None:
            write_csv(self.path, self.rows)

    def replace(self, where: dict, rows: Iterable[dict]) -> None:
        """Replace the rows of `where` by others."""
        self.rows = [row for row in self.rows if not _is_of(row, where)]
        self.add(where, rows)


def _is_of(row: dict, where: dict) -> bool:
    return all(str(row.get(name, "")) == str(value) for name, value in where.items())


def write_csv(path: Path, rows: list[dict]) -> None:
    """Write all rows to a CSV file, whole or not at all."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with atomic_path(path, renews=True) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path) -> list[dict]:
    """Return the rows of a CSV file; numbers are numbers, empty cells are left out."""
    with reading(path, "a CSV file"), path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file, strict=True))
        if any(None in (*row, *row.values()) for row in rows):
            raise ValueError("a row has more or fewer cells than the first")
    return [{name: _value(text) for name, text in row.items() if text} for row in rows]


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def add_times(
    log: RowLog,
    column: dict,
    baseline: str,
    others: Sequence[str],
    together: int,
    make: Callable[[str], Callable[[], object]],
    args: Options,
) -> None:
    """Time what a log lacks, `together` others at a time, and the baseline anew with each handful.

    A run is made by its name when its handful's turn comes, as models fill the memory.
    """
    for start in range(0, max(len(others), 1), together):
        names = [baseline, *others[start : start + together]]
        if log.lacks(column, names):
            runs = {name: make(name) for name in names}
            log.add(column, timed_rows(column["column"], baseline, runs, args.rounds, args.seconds))


def add_each(log: RowLog, column: dict, names: Iterable[str], make: Callable[[str], dict]) -> None:
    """Add to a log a row for each name that has none yet, with the columns that `make` returns of it."""
    for name in progress(list(names), description=column["column"]):
        if log.lacks(column, [name]):
            log.add(column, [{"name": name, **make(name)}])


def timed_rows(
    column: str, baseline: str, runs: dict[str, Callable[[], object]], rounds: int, seconds: float
) -> list[dict]:
    """Time candidates in turns; ratios are to the baseline's.

    Returns:
        A row each: name, ms, least_ms, spread, ratio of medians, least_ratio of minima, samples, noisy.
    """
    with progress(total=len(runs) * (rounds + 1), description=column, unit="samples") as bar:
        times, noisy = time_in_turns(runs, rounds, seconds, bar.update)
    base = times[baseline]
    samples = sum(len(found.samples) for found in times.values())
    print(
        f"{column}: {len(runs)} candidates, {len(base.samples)} rounds, {noisy} of {samples} "
        f"samples on a machine that was not idle",
        flush=True,
    )
    return [
        {
            "name": name,
            "ms": round(found.median, 4),
            "least_ms": round(found.least, 4),
            "spread": round(found.spread, 4),
            "ratio": round(found.median / base.median, 4),
            "least_ratio": round(found.least / base.least, 4),
            "samples": len(found.samples),
            "noisy": found.noisy,
        }
        for name, found in times.items()
    ]


# ---------------------------------------------------------------------------------------------------------------------
# The machine in words, and markdown.

HOW = "Median relative to {}'s (in brackets: minimum to minimum) ± half the quartile distance."


def machine(device: torch.device, threads: int) -> str:
    """Return the machine, the versions and the date, in one line."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{processor.name()}, {threads} threads"
    today = datetime.date.today().isoformat()
    return f"{name}; Python {platform.python_version()}, torch {torch.__version__}; {today}"


def versions(names: Sequence[str]) -> str:
    """Return the versions of the packages that are installed."""
    return ", ".join(f"{name} {found}" for name in names if (found := version_of(name)))


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


def write_section(path: Path, key: str, text: str) -> None:
    """Put a text between a file's marks of this key, or append it with marks; whole or not at all."""
    begin, end = f"<!-- {key}: begin -->", f"<!-- {key}: end -->"
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    section = f"{begin}\n{text.strip()}\n{end}"
    if begin in old and end in old:
        new = old[: old.index(begin)] + section + old[old.index(end) + len(end) :]
    else:
        new = f"{old.rstrip()}\n\n{section}\n".lstrip()
    write_text(path, new, renews=True)


# ---------------------------------------------------------------------------------------------------------------------
# Plots.

PLOT_KINDS = (".png", ".svg", ".pdf")
STYLES = {"": "-", "naive": "--", "FlexAttention": ":"}  # others: a backend by name
BACKEND_STYLE = "-."


def check_plot(path: Path | None) -> None:
    """Raise an error, before anything is measured, for a plot that could not be drawn afterwards."""
    if path is None:
        return
    if path.suffix not in PLOT_KINDS:
        raise ValueError(f"--plot must end in {', '.join(PLOT_KINDS)}, got {path}")
    importlib.import_module("matplotlib")


def draw_bars(path: Path, parts: dict[str, dict[str, float]], title: str) -> None:
    """Draw a panel for each measurement, a bar for each row with its ratio, and a line at 1."""
    from relpos_fairseq.plots.axes import COLOURS, panels

    height = 0.22 * max(map(len, parts.values())) + 1.4
    with panels(path, len(parts), 3.6 + 1.4 / len(parts), height, title) as axes:
        for axis, (heading, rows) in zip(axes, parts.items(), strict=True):
            colours = [COLOURS[" " in name or name == "fairseq"] for name in rows]
            bars = axis.barh(list(rows), list(rows.values()), color=colours)
            axis.bar_label(bars, fmt=" {:.2f}", fontsize=6)
            axis.axvline(1, color="black", linewidth=0.8)
            axis.invert_yaxis()
            axis.set_title(heading)
            axis.tick_params(labelsize=7)
            axis.margins(x=0.15)


def draw_lengths(path: Path, modes: dict[str, list[dict]], baseline: str, title: str) -> None:
    """Draw a panel for each mode, a colour for each scheme: median ratio over length, without the baseline."""
    from relpos_fairseq.plots.axes import panels

    names = list(dict.fromkeys(row["name"] for rows in modes.values() for row in rows if row["name"] != baseline))
    title += "\ndashed: the papers' formula; dotted: FlexAttention"
    with panels(path, len(modes), 5 + 3 / len(modes), 6.5, title) as axes:
        for axis, (heading, rows) in zip(axes, modes.items(), strict=True):
            _draw_mode(axis, rows, names)
            axis.set_title(heading)
        lines = [line for line in axes[0].lines if str(line.get_label()) in map(_scheme_of, names)]
        axes[0].figure.legend(handles=lines, loc="outside right upper")


def _scheme_of(name: str) -> str:
    return name.split(", ")[0]


def _draw_mode(axis: Axes, rows: list[dict], names: list[str]) -> None:
    from relpos_fairseq.plots.axes import COLOURS, MARKERS

    schemes = list(dict.fromkeys(map(_scheme_of, names)))
    for name in names:
        number, way = schemes.index(_scheme_of(name)), name.partition(", ")[2].split(", ")[0]
        found = [row for row in rows if row["name"] == name and "ratio" in row]
        found.sort(key=lambda row: row["length"])
        axis.plot(
            [row["length"] for row in found],
            [row["ratio"] for row in found],
            STYLES.get(way, BACKEND_STYLE),
            marker=MARKERS[number // len(COLOURS) % len(MARKERS)],
            color=COLOURS[number % len(COLOURS)],
            label=name,
        )
    lengths = sorted({row["length"] for row in rows})
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.set_xticks(lengths, [f"{length}" for length in lengths])
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_xlabel("length")
    axis.set_ylabel("ratio to attention without positions")
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.grid(alpha=0.3)
