"""Make one run of a comparison: train a scheme on a task with a seed, score every example, keep the result."""

from __future__ import annotations

import re
import resource
import statistics
import time
import zipfile
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from relpos_fairseq.comparison.results import ResultStore
from relpos_fairseq.comparison.scores import METRICS, pack
from relpos_fairseq.comparison.spec import Spec
from relpos_fairseq.comparison.tasks.base import Scored, Task, Workspace
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import Hashes, remove, write_json
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.manifests import versions
from relpos_fairseq.io.processes import USER_DIR, key_of
from relpos_fairseq.io.reading import parse_json, reading
from relpos_fairseq.io.stages import Stage, as_json, run_stages

# Folders of the package whose code no trained number depends on.
NOT_TRAINING = "benchmarks cli comparison conversion examples export inference io plots preparation".split()
CHECKPOINT_HASHES = Hashes()  # of the checkpoints that schemes begin with
LOG_LINE = re.compile(r"\bINFO \| (train_inner|train|valid\d*) \| (\{.*\})\s*$")
PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+)")


def code_version() -> str:
    """Return a hash of the sources that a result depends on, and of the packages' versions."""
    files = [path for path in USER_DIR.rglob("*") if path.suffix in (".py", ".c", ".h")]
    trained = [path for path in files if path.relative_to(USER_DIR).parts[0] not in NOT_TRAINING]
    return key_of({name: v for name, v in versions().items() if name != "python"}, sorted(trained))


@dataclass(frozen=True)
class Run:
    """A scheme on a task with a seed."""

    scheme: str
    scheme_flags: dict  # the scheme's flags of fairseq-train
    task: Task
    seed: int

    @property
    def title(self) -> str:
        """The run in messages."""
        return f"{self.task.label} / {self.scheme} / seed {self.seed}"

    @cached_property
    def flags(self) -> dict:
        """All flags of fairseq-train but those that name folders."""
        return self.task.flags(self.scheme_flags, self.seed)

    @cached_property
    def settings(self) -> dict:
        """All that was chosen, as JSON; a checkpoint is represented by the hash of its content."""
        flags = {
            name: CHECKPOINT_HASHES.of(value) if name.endswith("from-model") else str(value)
            for name, value in self.flags.items()
        }
        generate = {name: str(value) for name, value in self.task.generate.items()}
        return as_json({"task": self.task.options(), "train": flags, "generate": generate})

    def name(self, code: str) -> str:
        """Return the name of the run's folder and result, `TASK/SCHEME-seedN-KEY`, for a version of the code."""
        key = key_of([self.settings, self.task.data_key(), code, self.seed])
        return f"{self.task.label}/{self.scheme}-seed{self.seed}-{key}"

    def folder(self, work: Path, code: str) -> Path:
        """Return the folder of the run's checkpoints, logs and outputs."""
        return work / "runs" / self.name(code)

    def finish(self, work: Path, store: ResultStore, code: str, threads: int = 1, keep: bool = False) -> None:
        """Train, score and keep the result; what an earlier process has done is not repeated.

        Args:
            work: folder of data and runs.
            store: keeps the result.
            code: version of the code.
            threads: threads to compute with.
            keep: whether the checkpoints stay.
        """
        folder = self.folder(work, code)
        workspace = Workspace(self.task, self.task.data_folder(work), folder, threads)
        data, checkpoints = workspace.data / "bin", workspace.checkpoints
        # The folder is the run's own, by its hash: what a kill has left there, fairseq's or ours, is gone on with.
        stages = [Stage("train", lambda: self._train(workspace), [data], [checkpoints], keeps=True)]
        for name in self.task.sets():
            file = folder / "scores" / f"{name}.json"
            score = partial(self._score, name, workspace, file)
            stages.append(Stage(f"score-{name}", score, [checkpoints], [file], keeps=True))
        made = run_stages(stages, folder)
        store.write(
            self.name(code),
            {
                "scheme": self.scheme,
                "task": self.task.label,
                "seed": self.seed,
                "code": code,
                "settings": self.settings,
                "settings_key": key_of(self.settings),
                "data": workspace.manifest()["sha256"],
                "versions": versions(),
                "unit": self.task.unit,
                **made["train"],
                "sets": {name: made[f"score-{name}"] for name in self.task.sets()},
            },
        )
        if not keep:
            remove(checkpoints)

    def _train(self, workspace: Workspace) -> dict:
        """Train to the end, from the last checkpoint of an interrupted training; return what the log and clock say."""
        checkpoints = workspace.checkpoints
        log, seconds = workspace.folder / "train.log", workspace.folder / "train.seconds"
        if not resumable(checkpoints):
            for path in (checkpoints, log, seconds):
                remove(path)
        start = elapsed_and_processor()
        try:
            fork = workspace.call("train", log.name, flags={**self.flags, "save-dir": checkpoints})
        finally:
            workspace.folder.mkdir(parents=True, exist_ok=True)
            now = elapsed_and_processor()
            with seconds.open("a", encoding="utf-8") as file:
                file.write(f"{now[0] - start[0]:.1f} {now[1] - start[1]:.1f}\n")
        known = TrainingLog.of(log)
        if not known.valid:
            raise UserError(f"fairseq-train ended without a validation; see {log}")
        for other in checkpoints.glob("*.pt"):
            if other != workspace.model:
                other.unlink()
        validations = []
        for updates, found in sorted(known.valid.items()):
            if missing := set(self.task.logged) - set(found):
                raise UserError(f"{log} has no {', '.join(sorted(missing))}: {sorted(found)}")
            validations.append({"updates": updates} | {name: found[name] for name in self.task.logged})
        return {
            "parameters": known.parameters,
            "validations": validations,
            "tokens_per_second": known.speed,
            **dict(zip(("seconds", "processor_seconds"), column_sums(seconds), strict=True)),
            "megabytes": round(fork.megabytes),
        }

    def _score(self, name: str, workspace: Workspace, file: Path) -> dict:
        """Score a test set; return the scores and every example's statistics, which `file` keeps too."""
        start = time.monotonic()
        scored = packed_scores(self.task.score(name, workspace))
        scored["seconds"] = round(time.monotonic() - start, 1)
        write_json(file, scored, renews=True)
        return scored


def runs_of(spec: Spec) -> list[Run]:
    """Return all runs, seed by seed, so that an interrupted comparison has whole pairs."""
    return [
        Run(label, flags, task, seed)
        for seed in spec.seeds
        for task in spec.tasks.values()
        for label, flags in spec.schemes.items()
    ]


def packed_scores(scored: Scored) -> dict:
    """Return scores as JSON: the value of each metric, and every example's length and statistics."""
    metrics = scored.statistics.items()
    return {
        "values": {name: float(METRICS[name].value(rows.sum(0))) for name, rows in metrics},
        **scored.notes,
        "lengths": pack(scored.lengths),
        "statistics": {name: pack(rows) for name, rows in metrics},
    }


def resumable(checkpoints: Path) -> bool:
    """Return whether a training can go on: the last checkpoint is there, and all are whole.

    A kill or a full disk may cut a checkpoint while fairseq copies it: its end, a zip file's directory, is missing.
    """
    found = list(checkpoints.glob("*.pt"))
    whole = all(zipfile.is_zipfile(path) for path in found)
    return whole and checkpoints / "checkpoint_last.pt" in found


def elapsed_and_processor() -> tuple[float, float]:
    """Return the time, and what children of this process have used of processors, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic(), usage.ru_utime + usage.ru_stime


def column_sums(path: Path) -> list[float]:
    """Return the sums of a file's columns of numbers."""
    rows = (map(float, line.split()) for line in read_lines(path))
    return [round(sum(column), 1) for column in zip(*rows, strict=True)]


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
