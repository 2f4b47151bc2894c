"""Run one scheme on one task with one seed: train, score every example, write the result."""

from __future__ import annotations

import json
import re
import resource
import statistics
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from relpos_fairseq.comparison.scores import METRICS, pack
from relpos_fairseq.comparison.spec import Spec
from relpos_fairseq.comparison.tasks.base import Scored, Task, Workspace
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import Hashes, remove, write_json
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.processes import USER_DIR, key_of
from relpos_fairseq.io.stages import Stage, as_json, run_stages, versions

# ---- What fairseq-train logs (--log-format json): curves, speed, parameters.


LOG_LINE = re.compile(r"\bINFO \| (train_inner|train|valid\d*) \| (\{.*\})\s*$")
PARAMETERS = re.compile(r"num\. shared model params: ([\d,]+)")


@dataclass
class TrainingLog:
    """Numbers of a training, line by line; after a resumption later lines replace earlier ones."""

    parameters: int = 0  # of the model
    speeds: list[float] = field(default_factory=list)  # tokens a second, of every line of training
    epochs: list[float] = field(default_factory=list)  # likewise, of every epoch
    # updates to all that a validation logged
    valid: dict[int, dict[str, float]] = field(default_factory=dict)
    newest: str = ""  # the last line of training, for the eye

    def read(self, line: str) -> None:
        if match := PARAMETERS.search(line):
            self.parameters = int(match[1].replace(",", ""))
        if (match := LOG_LINE.search(line)) is None:
            return
        part, values = match[1], json.loads(match[2])
        if part == "train_inner":
            self.speeds.append(float(values["wps"]))
            self.newest = f"update {values['num_updates']}, training loss {values['loss']}"
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


# ---- One cell of a comparison: a scheme on a task with a seed.


# What no trained number depends on.
NOT_TRAINING = """
    cli benchmarks pictures comparison preparation engine conversion inference export
""".split()


def code_version() -> str:
    """Return a hash of the sources that a result depends on, and of the packages' versions."""
    files = [path for path in USER_DIR.rglob("*") if path.suffix in (".py", ".c", ".h")]
    inside = [p for p in files if p.relative_to(USER_DIR).parts[0] not in NOT_TRAINING]
    return key_of({k: v for k, v in versions().items() if k != "python"}, sorted(inside))


CHECKPOINT_HASHES = Hashes()  # of checkpoints that schemes begin with


@dataclass(frozen=True)
class ComparisonRun:
    """A scheme on a task with a seed."""

    scheme: str
    scheme_flags: dict  # its flags of fairseq-train
    task: Task
    seed: int

    @property
    def title(self) -> str:
        return f"{self.task.label} / {self.scheme} / seed {self.seed}"

    @cached_property
    def flags(self) -> dict:
        """All flags of fairseq-train but those that name folders."""
        return self.task.flags(self.scheme_flags, self.seed)

    @cached_property
    def settings(self) -> dict:
        """All that was chosen, as JSON; a file counts by its content."""
        flags = {
            name: CHECKPOINT_HASHES.of(value) if name.endswith("from-model") else value
            for name, value in {k: str(v) for k, v in self.flags.items()}.items()
        }
        generate = {name: str(value) for name, value in self.task.generate.items()}
        return as_json({"task": self.task.options(), "train": flags, "generate": generate})

    def name(self, code: str) -> str:
        """Return the name of its folder and its result, for a version of the code."""
        key = key_of([self.settings, self.task.data_key(), code, self.seed])
        return f"{self.scheme}-seed{self.seed}-{key}"

    def place(self, results: Path, code: str) -> Path:
        """Return its result's file."""
        return results / self.task.label / f"{self.name(code)}.json"

    def folder(self, work: Path, code: str) -> Path:
        """Return the folder of its run."""
        return work / "runs" / self.task.label / self.name(code)

    def finish(self, work: Path, results: Path, code: str, threads: int = 1, keep: bool = False) -> dict:
        """Train, score and write the result; what is done is not repeated.

        Args:
            work: folder of data and runs.
            results: folder of results.
            code: version of the code.
            threads: to compute with.
            keep: whether the checkpoints stay.
        """
        data, folder = self.task.data_folder(work), self.folder(work, code)
        run = Workspace(self.task, data, folder, threads)
        scored = folder / "scores"
        made = run_stages(
            [
                Stage("train", lambda: self._train(run), [data / "bin"], [run.checkpoints]),
                *(
                    Stage(
                        f"score-{name}", self._scoring(name, run, scored), [run.checkpoints], [scored / f"{name}.json"]
                    )
                    for name in self.task.sets()
                ),
            ],
            folder,
        )
        result = {
            "scheme": self.scheme,
            "task": self.task.label,
            "seed": self.seed,
            "code": code,
            "settings": self.settings,
            "settings_key": key_of(self.settings),
            "data": run.manifest()["sha256"],
            "versions": versions(),
            "unit": self.task.unit,
            **made["train"],
            "sets": {name: made[f"score-{name}"] for name in self.task.sets()},
        }
        write_json(self.place(results, code), result)
        if not keep:
            remove(run.checkpoints)
        return result

    def _train(self, run: Workspace) -> dict:
        """Train to the end; an interrupted training continues from its last checkpoint."""
        log, seconds = run.folder / "train.log", run.folder / "train.seconds"
        if not resumable(run.checkpoints):
            for path in (run.checkpoints, log, seconds):
                remove(path)
        start = elapsed_and_processor()
        try:
            flags = {**self.flags, "save-dir": run.checkpoints}
            fork = run.call("train", "train.log", flags=flags)
        finally:
            run.folder.mkdir(parents=True, exist_ok=True)
            now = elapsed_and_processor()
            with seconds.open("a", encoding="utf-8") as file:
                file.write(f"{now[0] - start[0]:.1f} {now[1] - start[1]:.1f}\n")
        known = TrainingLog()
        for line in read_lines(log, "drop"):
            known.read(line)
        if not known.valid:
            raise UserError(f"fairseq-train ended without a validation; see {log}")
        for other in run.checkpoints.glob("*.pt"):
            if other != run.model:
                other.unlink()
        return {
            "parameters": known.parameters,
            "validations": [
                {"updates": updates} | self._logged(found, log) for updates, found in sorted(known.valid.items())
            ],
            "tokens_per_second": known.speed,
            **dict(zip(("seconds", "processor_seconds"), column_sums(seconds), strict=True)),
            "megabytes": round(fork.megabytes),
        }

    def _logged(self, found: dict[str, float], log: Path) -> dict[str, float]:
        """Return what is kept of a validation."""
        if missing := set(self.task.logged) - set(found):
            raise UserError(f"{log} has no {', '.join(sorted(missing))}: {sorted(found)}")
        return {name: found[name] for name in self.task.logged}

    def _scoring(self, name: str, run: Workspace, folder: Path) -> Callable[[], dict]:
        def work() -> dict:
            start = time.monotonic()
            scored = self.task.score(name, run)
            found = packed_scores(scored) | {"seconds": round(time.monotonic() - start, 1)}
            write_json(folder / f"{name}.json", found)
            return found

        return work


def elapsed_and_processor() -> tuple[float, float]:
    """Return the time, and what children of this process have used of processors, in seconds."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic(), usage.ru_utime + usage.ru_stime


def column_sums(path: Path) -> list[float]:
    """Return the sums of a file's columns."""
    rows = (map(float, line.split()) for line in read_lines(path))
    return [round(sum(column), 1) for column in zip(*rows, strict=True)]


def packed_scores(scored: Scored) -> dict:
    """Return scores as JSON: values for the eye, and every example's statistics."""
    metrics = scored.statistics.items()
    return {
        "values": {name: float(METRICS[name].value(rows.sum(0))) for name, rows in metrics},
        **scored.notes,
        "lengths": pack(scored.lengths),
        "statistics": {name: pack(rows) for name, rows in metrics},
    }


def resumable(checkpoints: Path) -> bool:
    """Whether a training can go on: every checkpoint is whole.

    A kill or a full disk may cut one while fairseq copies it: its end, a directory, is missing.
    """
    found = list(checkpoints.glob("*.pt"))
    whole = all(zipfile.is_zipfile(path) for path in found)
    return whole and checkpoints / "checkpoint_last.pt" in found


def runs_of(spec: Spec) -> list[ComparisonRun]:
    """Return all cells, seed by seed, so that an interrupted comparison has whole pairs."""
    return [
        ComparisonRun(label, flags, task, seed)
        for seed in spec.seeds
        for task in spec.tasks.values()
        for label, flags in spec.schemes.items()
    ]
