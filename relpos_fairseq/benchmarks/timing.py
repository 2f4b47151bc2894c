"""Timing in turns on an idle machine, and peak memory."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

SAMPLE = 0.02  # seconds that one sample lasts at least
WARM = 0.25  # runs that last longer than this fill the caches themselves
MAPPED = -3  # mallopt's M_MMAP_THRESHOLD: bytes from which storage is the system's own
WAITING = 30.0  # seconds that a column waits for an idle machine in all


def busy_share(seconds: float = 0.05) -> float:
    """Share of the machine's cores that anything used just now; nan where that is unknown."""
    try:
        before = _processor_time()
        time.sleep(seconds)
        after = _processor_time()
    except OSError:
        return math.nan
    return (after[0] - before[0]) / max(after[1] - before[1], 1)


def _processor_time() -> tuple[int, int]:
    with open("/proc/stat", encoding="ascii") as file:
        ticks = [int(part) for part in file.readline().split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def wait_until_idle(patience: float = 1.5, limit: float = 0.2) -> bool:
    """Wait for the machine to be idle; False where it was not within `patience` seconds."""
    end = time.monotonic() + patience
    while True:
        if not busy_share() > limit:
            return True
        if time.monotonic() >= end:
            return False


def synchronise(device: torch.device) -> None:
    """Wait for the GPU's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
        """Half the distance between quartiles, relative to the median; 0 for one sample."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / 2 / self.median


def time_in_turns(
    runs: dict[str, Callable[[], object]],
    device: torch.device,
    rounds: int,
    seconds: float,
    tick: Callable[[], object] = lambda: None,
) -> tuple[dict[str, Times], int]:
    """Time every run once a round, for `rounds` rounds or until about `seconds` are over.

    Three rounds are made (or `rounds`, if fewer) whatever they last. `tick` is called after each
    run's sample, and after each run's first call.

    Returns:
        Times by name, and how many samples were taken on a machine that was not idle.
    """
    begun, waited = time.monotonic(), 0.0
    lasts = {}
    for name, run in runs.items():
        lasts[name] = _first(run, device)
        tick()
    times = {name: Times([]) for name in runs}
    for number in range(rounds):
        for name, run in runs.items():
            before = time.monotonic()
            times[name].noisy += not wait_until_idle(1.5 if waited < WAITING else 0.0)
            waited += time.monotonic() - before
            repeats = max(1, min(200, int(SAMPLE / lasts[name])))
            if lasts[name] < WARM:
                _seconds(run, device)
            times[name].samples.append(_seconds(run, device, repeats) * 1e3)
            tick()
        if number >= 2 and time.monotonic() - begun > seconds:
            break
    return times, sum(found.noisy for found in times.values())


def _first(run: Callable[[], object], device: torch.device) -> float:
    """About how long a run lasts; its first call may compile and allocate."""
    lasted = _seconds(run, device)
    return lasted if lasted > 2 else _seconds(run, device)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Seconds a run, the mean of `repeats`."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    synchronise(device)
    return (time.perf_counter() - start) / repeats


def peak_mebibytes(run: Callable[[], object], device: torch.device) -> float:
    """Largest memory beyond what was there before a run, in MiB; nan where that is unknown.

    On a CPU it is resident memory, of a thread that begins for it: what a backend keeps for a
    thread's next call counts as well.
    """
    run()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        synchronise(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    found: list[float | Exception] = []
    thread = threading.Thread(target=_resident_peak, args=(run, found))
    thread.start()
    thread.join()
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


def _resident_peak(run: Callable[[], object], found: list[float | Exception]) -> None:
    try:
        libc = ctypes.CDLL("libc.so.6")
        libc.malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _status("VmRSS")
    except OSError:  # not Linux
        found.append(math.nan)
        return
    # What was freed into a thread's heap stays there, and would serve the run unseen.
    libc.mallopt(MAPPED, 1 << 16)
    try:
        run()
        found.append((_status("VmHWM") - before) / 1024)
    except Exception as error:  # for the thread that waits
        found.append(error)
    finally:
        libc.mallopt(MAPPED, 32 << 20)  # what it has become by then in any process


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {key}")
