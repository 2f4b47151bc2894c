"""Timing in turns on an idle machine, and peak memory."""

from __future__ import annotations

import ctypes
import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


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
    while time.monotonic() < end:
        if not busy_share() > limit:
            return True
    return False


def synchronise(device: torch.device) -> None:
    """Wait for the GPU's queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Times:
    """Milliseconds of one candidate."""

    samples: list[float]

    @property
    def median(self) -> float:
        """The median."""
        return statistics.median(self.samples)

    @property
    def least(self) -> float:
        """The minimum."""
        return min(self.samples)

    @property
    def spread(self) -> float:
        """Half the distance between quartiles, relative to the median; 0 for one sample."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4)
        return (high - low) / 2 / self.median


def time_in_turns(
    runs: dict[str, Callable[[], object]], device: torch.device, rounds: int, seconds: float
) -> tuple[dict[str, Times], int]:
    """Time every run once a round, for `rounds` rounds or until `seconds` are over.

    Returns:
        Times by name, and how many samples were taken on a machine that was not idle.
    """
    repeats, noisy, begun = {}, 0, time.monotonic()
    for name, run in runs.items():
        run()
        synchronise(device)
        start = time.perf_counter()
        run()
        synchronise(device)
        repeats[name] = max(1, min(200, int(0.02 / (time.perf_counter() - start))))
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name, run in runs.items():
            noisy += not wait_until_idle()
            run()  # warms the cache again
            synchronise(device)
            start = time.perf_counter()
            for _ in range(repeats[name]):
                run()
            synchronise(device)
            samples[name].append((time.perf_counter() - start) * 1e3 / repeats[name])
        if number >= 2 and time.monotonic() - begun > seconds:
            break
    return {name: Times(values) for name, values in samples.items()}, noisy


def peak_mebibytes(run: Callable[[], object], device: torch.device) -> float:
    """Largest memory beyond what was there before a run, in MiB."""
    run()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        synchronise(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _status("VmRSS")
        run()
        return (_status("VmHWM") - before) / 1024
    except OSError:
        return math.nan


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(key):
            return int(line.split()[1])
    raise OSError(f"/proc/self/status has no {key}")
