"""Run what is missing of a comparison: some runs at a time in processes, or as jobs of submitit."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from relpos_fairseq.comparison.run import ComparisonRun, TrainingLog, code_version, runs_of
from relpos_fairseq.comparison.spec import Spec, read_spec
from relpos_fairseq.comparison.tasks.base import prepare_process
from relpos_fairseq.io.errors import BusyError, ToolError, UserError
from relpos_fairseq.io.files import read_json, write_text
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.processes import Fork
from relpos_fairseq.io.progress import counted

if TYPE_CHECKING:
    from relpos_fairseq.comparison.run import ComparisonRun


# ---- All cells of a comparison: which are missing, and several at a time.


SHOWN = 30.0  # seconds between two lines about cells at work
FAILED = "failed.txt"
BUSY = 75  # exit status where another process has the cell at work (sysexits.h: EX_TEMPFAIL)


@dataclass(frozen=True)
class Options:
    """Where a comparison lies and how it runs.

    Raises:
        ValueError: a number is below 1.
    """

    spec: Path
    work: Path | None = None  # folder of data, checkpoints and logs; None: `compare_out/NAME`
    results: Path | None = None  # folder of the results; None: NAME, beside the file
    workers: int = 1  # cells at a time, each in one thread
    threads: int = 1  # of a cell
    keep_models: bool = False  # whether checkpoints stay
    any_code: bool = False  # whether results of another version of the code count

    def __post_init__(self) -> None:
        for name in ("workers", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be >= 1, got {getattr(self, name)}")


@dataclass
class Comparison:
    """A specification at a place on a disk."""

    spec: Spec
    work: Path
    results: Path
    workers: int = 1
    threads: int = 1
    keep: bool = False
    any_code: bool = False

    def __post_init__(self) -> None:
        self.code, self.cells = code_version(), runs_of(self.spec)

    @classmethod
    def of(cls, options: Options) -> Comparison:
        """Read a specification."""
        spec = read_spec(options.spec)
        work = options.work or Path("compare_out") / spec.name
        results = options.results or options.spec.with_suffix("")
        return cls(spec, work, results, options.workers, options.threads, options.keep_models, options.any_code)

    def result(self, cell: ComparisonRun) -> dict | None:
        """Return a cell's result or None; of other versions of the code the newest."""
        own = cell.place(self.results, self.code)
        if own.exists() or not self.any_code:
            return read_json(own)
        others = own.parent.glob(f"{cell.scheme}-seed{cell.seed}-*.json")
        for path in sorted(others, key=lambda path: path.stat().st_mtime, reverse=True):
            found = read_json(path)
            if found["settings"] == cell.settings:
                return found
        return None

    def missing(self) -> list[ComparisonRun]:
        """Return the cells without a result."""
        return [cell for cell in self.cells if self.result(cell) is None]

    def run(self, pool: Callable[[Comparison, list[ComparisonRun]], dict[str, str]] | None = None) -> int:
        """Finish what is missing; returns the exit status: 1 where a cell failed.

        Args:
            pool: finishes cells, and says by title why some failed; None: a `Pool`.
        """
        missing = self.missing()
        print(f"{counted(len(self.cells), 'cell')}, {len(missing)} to do", flush=True)
        if not missing:
            return 0
        self.prepare(missing)
        failed = pool(self, missing) if pool else ProcessPool(self, missing).run()
        for title, reason in failed.items():
            print(f"failed: {title}: {reason}", flush=True)
        return 1 if failed else 0

    def prepare(self, cells: list[ComparisonRun]) -> None:
        """Import what cells need, and make their data."""
        prepare_process()
        for task in {cell.task.label: cell.task for cell in cells}.values():
            task.prepare(self.work)

    def absolute(self) -> Comparison:
        """Return the same, wherever a process runs."""
        return replace(self, work=self.work.absolute(), results=self.results.absolute())

    def finish(self, cell: ComparisonRun) -> None:
        """Finish a cell in this process; whether and why it failed stays in its folder."""
        folder = cell.folder(self.work, self.code)
        (folder / FAILED).unlink(missing_ok=True)
        try:
            cell.finish(self.work, self.results, self.code, self.threads, self.keep)
        except BusyError as error:
            print(f"error: {error}", flush=True)
            raise SystemExit(BUSY) from None
        except Exception as error:
            known = isinstance(error, ToolError | ValueError | OSError)
            if not known:
                traceback.print_exc()
            reason = str(error) if known else f"{type(error).__name__}: {error}"
            print(f"error: {reason}", flush=True)
            try:
                write_text(folder / FAILED, f"{reason}\n")
            finally:
                raise SystemExit(1) from None

    def failure(self, cell: ComparisonRun) -> str | None:
        """Return why a cell's last attempt failed, or None."""
        path = cell.folder(self.work, self.code) / FAILED
        return path.read_text(encoding="utf-8").strip() if path.exists() else None


class ProcessPool:
    """Cells in children of this process, some at a time."""

    def __init__(self, comparison: Comparison, cells: list[ComparisonRun]) -> None:
        self.comparison, self.waiting, self.total = comparison, list(cells), len(cells)
        self.active: dict[Fork, ComparisonRun] = {}
        self.failed: dict[str, str] = {}
        self.done, self.shown = 0, time.monotonic()
        self.said: dict[str, str] = {}  # by a cell's title, its newest line
        self.later: dict[str, float] = {}  # by a cell's title, when to try again what another process had

    def run(self) -> dict[str, str]:
        """Run all of them; returns why some failed, by title."""
        try:
            while self.waiting or self.active:
                while len(self.active) < self.comparison.workers and (cell := self.next()):
                    self.start(cell)
                for fork in [fork for fork in self.active if fork.poll() is not None]:
                    self.take(fork, self.active.pop(fork))
                self.show()
                time.sleep(0.1)
        finally:
            for fork in self.active:
                fork.end()
        return self.failed

    def next(self) -> ComparisonRun | None:
        """Take the next cell to start; one that another process finished meanwhile is done."""
        now = time.monotonic()
        for cell in [cell for cell in self.waiting if self.later.get(cell.title, 0.0) <= now]:
            self.waiting.remove(cell)
            if self.comparison.result(cell) is None:
                return cell
            self.say(cell, "finished by another process")
        return None

    def start(self, cell: ComparisonRun) -> None:
        log = cell.folder(self.comparison.work, self.comparison.code) / "cell.log"
        self.active[Fork(lambda: self.comparison.finish(cell), log)] = cell

    def take(self, fork: Fork, cell: ComparisonRun) -> None:
        """Say how a cell ended."""
        if fork.status == BUSY:
            if cell.title not in self.later:
                print(f"  {cell.title}: another process is at it; tried again later", flush=True)
            self.later[cell.title] = time.monotonic() + SHOWN
            self.waiting.append(cell)
            return
        if fork.status:
            self.failed[cell.title] = fork.reason().removeprefix("error: ")
            self.say(cell, f"failed: {self.failed[cell.title]}")
            return
        result = self.comparison.result(cell) or {"sets": {}}
        values = [
            f"{name} {metric} {value:.2f}"
            for name, scored in result["sets"].items()
            for metric, value in scored["values"].items()
        ]
        self.say(cell, f"{', '.join(values)} ({fork.seconds:.0f} s)")

    def say(self, cell: ComparisonRun, end: str) -> None:
        """Count a cell and say how it ended."""
        self.done += 1
        print(f"[{self.done}/{self.total}] {cell.title}: {end}", flush=True)

    def show(self) -> None:
        """Say now and then how far the cells at work are."""
        if time.monotonic() - self.shown < SHOWN:
            return
        self.shown = time.monotonic()
        for cell in self.active.values():
            log = cell.folder(self.comparison.work, self.comparison.code) / "train.log"
            known = TrainingLog()
            for line in read_lines(log, "drop") if log.exists() else ():
                known.read(line)
            line = f"  {cell.title}: {known.newest or 'begins'}"
            if self.said.get(cell.title) != line:  # a loaded machine says nothing twice
                print(line, flush=True)
            self.said[cell.title] = line


def status(comparison: Comparison) -> int:
    """Print what is done, what failed and what is missing; returns 1 where something is."""
    rows, failed = {}, []
    for cell in comparison.cells:
        row = rows.setdefault((cell.task.label, cell.scheme), [0, 0])
        row[1] += 1
        if comparison.result(cell) is not None:
            row[0] += 1
        elif reason := comparison.failure(cell):
            failed.append(f"failed: {cell.title}: {reason}")
    for (task, scheme), (done, total) in rows.items():
        print(f"{task} / {scheme}: {done} of {total}")
    print("\n".join(failed) or "none failed")
    done, total = (sum(row[place] for row in rows.values()) for place in (0, 1))
    print(f"{done} of {counted(total, 'cell')} done in {comparison.results} (code {comparison.code})")
    return int(done < total)


# ---- Cells as jobs, by submitit.


def run_jobs(comparison: Comparison, cluster: str) -> int:
    """Prepare the data here and run every missing cell in a job of its own.

    The jobs of one call are an array; submitit's parameters are the specification's `slurm`. Jobs
    that are still at work when this command is interrupted go on: their results count. The work
    lies on a disk that the nodes share; the cluster `local` runs the jobs here, for a test.

    Returns:
        The exit status: 1 where a cell failed.
    """
    try:
        import submitit
    except ImportError:
        raise UserError("--executor slurm needs submitit: pip install 'relpos_fairseq[slurm]'") from None

    def in_jobs(comparison: Comparison, cells: list[ComparisonRun]) -> dict[str, str]:
        executor = submitit.AutoExecutor(comparison.work.absolute() / "jobs", cluster=cluster)
        try:
            executor.update_parameters(**{"name": comparison.spec.name, **comparison.spec.slurm})
        except (TypeError, NameError) as error:
            raise UserError(f"slurm: submitit says: {error}") from None
        with executor.batch():
            jobs = [executor.submit(finish_job, comparison.absolute(), cell) for cell in cells]
        print(f"submitted: {', '.join(job.job_id for job in jobs)}", flush=True)
        failed = {}
        for job, cell in zip(jobs, cells, strict=True):
            if error := job.exception():
                failed[cell.title] = comparison.failure(cell) or str(error).strip().splitlines()[-1]
            print(f"{cell.title}: {'failed' if error else 'done'}", flush=True)
        return failed

    return comparison.run(in_jobs)


def finish_job(comparison: Comparison, cell: ComparisonRun) -> None:
    """Finish a cell, in its job."""
    prepare_process()
    try:
        comparison.finish(cell)
    except SystemExit as end:
        busy = "another process is at it: run the same command again later"
        raise RuntimeError(busy if end.code == BUSY else comparison.failure(cell) or "failed") from None
