"""Run one training of fairseq to its end, however often it is interrupted, and read what it logged."""

from __future__ import annotations

import re
import resource
import statistics
import time
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, TypedDict

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import remove
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.reading import Amount, Count, Number, parse_json, reading
from relpos_fairseq.lab.comparison.tasks.base import Workspace

LOG_LINE = re.compile(r"\bINFO \| (train_inner|train|valid\d*) \| (\{.*\})\s*$")
LAST = "checkpoint_last.pt"
WARNING = re.compile(r"\bWARNING \| relpos_fairseq\S* \| (.*)")
PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+)")
BEGUN = "begun"  # the time at which a process began, before what it took: a kill leaves that out


class _Updates(TypedDict):
    updates: Count


class Training(TypedDict):
    """What `train` returns."""

    parameters: Count
    validations: list[Annotated[dict[str, Number], _Updates]]
    tokens_per_second: Amount
    seconds: Amount
    processor_seconds: Amount | None  # None: not known, since a process of it was killed
    megabytes: Amount | None


def train(workspace: Workspace, flags: dict) -> Training:
    """Train to the end, from the last checkpoint of an interrupted training; return what the log and clock say.

    Args:
        workspace: its task says what is kept of each validation.
        flags: all of fairseq-train's but those that name folders.
    """
    checkpoints = workspace.checkpoints
    log, seconds = workspace.folder / "train.log", workspace.folder / "train.seconds"
    if not (resumable(checkpoints) and log.is_file()):
        for path in (checkpoints, log, seconds):
            remove(path)
    if seconds.is_file() and (begun := Costs.of(seconds).begun):
        _note(seconds, f"{max(log.stat().st_mtime - begun, 0):.1f}")  # what a kill cut off: to its last word
    most = int(flags.get("max-update") or 0)
    # fairseq makes one more update of a training that has ended: a kill may have come before its end was noted.
    if not (most and checkpoints.is_dir() and updates_of(checkpoints / LAST) >= most):
        start = elapsed_and_processor()
        megabytes = 0.0
        workspace.folder.mkdir(parents=True, exist_ok=True)
        _note(seconds, f"{BEGUN} {time.time():.1f}")
        try:
            megabytes = workspace.call("train", log.name, flags={**flags, "save-dir": checkpoints}).megabytes
        finally:
            now = elapsed_and_processor()
            _note(seconds, f"{now[0] - start[0]:.1f} {now[1] - start[1]:.1f} {megabytes:.0f}")
    known, costs = TrainingLog.of(log), Costs.of(seconds)
    if not known.valid:
        raise UserError(f"fairseq-train ended without a validation; see {log}")
    for other in checkpoints.glob("*.pt"):
        if other != workspace.model:
            other.unlink()
    validations = []
    for updates, found in sorted(known.valid.items()):
        if missing := set(workspace.task.logged) - set(found):
            raise UserError(f"{log} has no {', '.join(sorted(missing))}: {sorted(found)}")
        validations.append({"updates": updates} | {name: found[name] for name in workspace.task.logged})
    return {
        "parameters": known.parameters,
        "validations": validations,
        "tokens_per_second": known.speed,
        "seconds": costs.seconds,
        "processor_seconds": costs.processor,
        "megabytes": costs.megabytes,
    }


def _note(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(f"{line}\n")


def resumable(checkpoints: Path) -> bool:
    """Return whether a training can go on: the last checkpoint is there, and all are whole.

    A kill or a full disk may cut a checkpoint while fairseq copies it: its end, a zip file's directory, is missing.
    """
    found = list(checkpoints.glob("*.pt"))
    whole = all(zipfile.is_zipfile(path) for path in found)
    return whole and checkpoints / LAST in found


def updates_of(checkpoint: Path) -> int:
    """Return the number of updates after which a checkpoint was written."""
    from relpos_fairseq.saved.model import SavedModel

    return SavedModel.read(checkpoint, mapped=True).updates


def elapsed_and_processor() -> tuple[float, float]:
    """Return the time, and what children of this process have used of processors, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic(), usage.ru_utime + usage.ru_stime


@dataclass(frozen=True)
class Costs:
    """What a training took, of all the processes that have made it."""

    seconds: float
    processor: float | None  # seconds; None where a process was killed, and nothing knows what it took
    megabytes: int | None  # of the largest that is known; None where none is
    begun: float = 0.0  # when the last process began, if it has not noted what it took

    @classmethod
    def of(cls, path: Path) -> Costs:
        """Read the lines that the processes left: when each began; seconds, processor seconds, megabytes."""
        rows, begun = [], 0.0
        with reading(path, "a note of what a training took", "delete it"):
            for first, *more in (line.split() for line in read_lines(path) if line):
                begun, ended = (float(*more), None) if first == BEGUN else (0.0, [*map(float, (first, *more))])
                rows += [] if ended is None else [ended]
        sizes = [round(row[2]) for row in rows if len(row) > 2 and row[2]]
        processor = None if not rows or any(len(row) == 1 for row in rows) else round(sum(row[1] for row in rows), 1)
        return cls(round(sum(row[0] for row in rows), 1), processor, max(sizes, default=None), begun)


@dataclass
class TrainingLog:
    """The numbers that fairseq-train logs (--log-format json); after a resumption later lines replace earlier ones."""

    parameters: int = 0  # of the model
    speeds: list[float] = field(default_factory=list)  # tokens a second, of every line of training
    epochs: list[float] = field(default_factory=list)  # tokens a second, of every epoch
    # all that a validation logged, by the number of updates
    valid: dict[int, dict[str, float]] = field(default_factory=dict)
    updates: int = 0  # so far
    wall: float = 0.0  # seconds of training so far
    loss: str = ""  # the newest of training
    warnings: dict[str, None] = field(default_factory=dict)  # of this package, in their order

    @classmethod
    def of(cls, path: Path) -> TrainingLog:
        """Read a log; one that does not exist is empty."""
        log = cls()
        with reading(path, "a log of fairseq-train", "delete it"):
            for line in read_lines(path, "drop") if path.exists() else ():
                log.read(line)
        return log

    def read(self, line: str) -> None:
        """Add the numbers in one line of the log, if there are any."""
        if match := PARAMETERS.search(line):
            self.parameters = int(match[1].replace(",", ""))
        if match := WARNING.search(line):
            self.warnings[match[1]] = None
        if (match := LOG_LINE.search(line)) is None:
            return
        part, values = match[1], parse_json(match[2], dict[str, float | str | None])
        if part == "train_inner":
            self.speeds.append(float(values["wps"]))
            self.updates, self.wall = int(values["num_updates"]), float(values.get("wall", 0.0))
            self.loss = str(values["loss"])
        elif part == "train":  # an epoch's end
            self.epochs.append(float(values["train_wps"]))
        else:
            updates = int(values[f"{part}_num_updates"])
            found = {name: float(value) for name, value in values.items() if name != "epoch"}
            self.valid.setdefault(updates, {}).update(found)

    @property
    def speed(self) -> int:
        """Tokens a second in the median."""
        return round(statistics.median(self.speeds or self.epochs or [0.0]))
