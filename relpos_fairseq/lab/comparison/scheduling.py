"""Make what is missing of a comparison: some runs at a time in processes, or as jobs of submitit.

submitit's local executor is no replacement for the process pool: it starts all jobs at once, imports fairseq anew in
each (a fork of this process has it), and its jobs outlive a kill.
"""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, Literal, TypedDict

from relpos_fairseq.io.errors import BusyError, ToolError, UserError
from relpos_fairseq.io.files import write_text
from relpos_fairseq.io.processes import Fork, wait_for
from relpos_fairseq.io.progress import counted, duration, progress, say
from relpos_fairseq.io.reading import Number, of_type
from relpos_fairseq.lab.comparison.choices import choices_of, choices_table
from relpos_fairseq.lab.comparison.further import verdicts
from relpos_fairseq.lab.comparison.results import ResultStore
from relpos_fairseq.lab.comparison.run import Run, code_version, runs_of
from relpos_fairseq.lab.comparison.scores import METRICS
from relpos_fairseq.lab.comparison.spec import Spec, read_spec, seeds_of
from relpos_fairseq.lab.comparison.tasks.base import prepare_process
from relpos_fairseq.lab.comparison.training_run import TrainingLog

RETRY = 30.0  # seconds until a run is tried again that another process has at work
FAILED = "failed.txt"
BUSY = 75  # exit status where another process is at work on the run (sysexits.h: EX_TEMPFAIL)


@dataclass
class Comparison:
    """A specification with its folders: all runs, and which of them have results."""

    spec: Spec
    work: Path
    results: Path
    workers: int = 1  # runs at a time
    threads: int = 1  # of a run
    keep_models: bool = False  # whether checkpoints stay
    any_code: bool = False  # whether results of another version of the code count
    fold: bool = False  # whether the results move into one file when all are there
    published: Spec | None = None  # the specification as it is written, where other seeds were asked for

    def __post_init__(self) -> None:
        self.code, self.runs, self.store = code_version(), runs_of(self.spec), ResultStore(self.results)

    @classmethod
    def of(
        cls, spec: Path, work: Path | None = None, results: Path | None = None, seeds: str = "", **given: Any
    ) -> Comparison:
        """Read a specification.

        Args:
            spec: the file.
            work: folder of data, checkpoints and logs; None: `compare_out/NAME`.
            results: folder of the results; None: NAME, beside the file.
            seeds: in place of the file's, separated by commas.
            given: other fields of a comparison.

        Raises:
            ValueError: the file is wrong.
        """
        found, published = read_spec(spec), None
        if seeds:
            found, published = replace(found, seeds=seeds_of(as_numbers(seeds))), found
        work, results = work or Path("compare_out") / found.name, results or spec.with_suffix("")
        return cls(found, work, results, fold=True, published=published, **given)

    def folder(self, run: Run) -> Path:
        """Return the folder of a run's checkpoints, logs and outputs."""
        return run.folder(self.work, self.code)

    def result(self, run: Run) -> dict | None:
        """Return a run's result or None; with `any_code` that of another version of the code, the newest."""
        found = self.newest(run) if self.any_code else self.store.read(run.name(self.code))
        return found and of_type(
            found, _type_for(run.task.noted, run.task.sets(), run.task.logged), f"the result of {run.title}"
        )

    def ended(self) -> list[tuple[Run, dict]]:
        """Return the runs that have a result, with it."""
        found = [(run, self.result(run)) for run in self.runs]
        return [(run, result) for run, result in found if result is not None]

    def durations(self) -> list[float]:
        """Return the seconds of the runs that have ended."""
        every = [sum(one["seconds"] for one in (each, *each["sets"].values())) for _, each in self.ended()]
        return [seconds for seconds in every if seconds]

    def missing(self) -> list[Run]:
        """Return the runs without a result."""
        return [run for run in self.runs if self.result(run) is None]

    def run(self, executor: Callable[[Comparison, list[Run]], dict[str, str]] | None = None) -> int:
        """Make the missing runs; return the exit status, 1 if a run failed.

        Args:
            executor: makes runs, and returns why some failed by their titles; None: a `ProcessPool`.
        """
        missing = self.missing()
        took = self.durations()
        about = (
            f", about {duration(mean(took) * len(missing) / self.workers)} by the others" if missing and took else ""
        )
        print(f"{counted(len(self.runs), 'run')}, {len(missing)} to do{about}", flush=True)
        for label in sorted({run.task.label for run in missing if run.never_warm}):
            print(f"warning: {label}: max-update ends within warmup-updates: no training reaches its learning rate")
        failed = {}
        if missing:
            self.prepare(missing)
            failed = executor(self, missing) if executor else ProcessPool(self, missing).run()
        for title, reason in failed.items():
            print(f"failed: {title}: {reason}", flush=True)
        if self.fold and (chosen := choices_of(self.spec, self.ended())):
            print(f"\n{choices_table(chosen)}", flush=True)
        if self.fold and not self.missing():
            self.store.fold()
        if self.published:
            print("\n".join(self.compared()), flush=True)
        return 1 if failed else 0

    def compared(self) -> list[str]:
        """Return a line for each run: whether its scores lie where the seeds of the file put a further one."""
        known = [(run, self.newest(run)) for run in runs_of(self.published)]
        return list(verdicts(self.ended(), [one for one in known if one[1]]))

    def newest(self, run: Run) -> dict | None:
        """Return a run's result, of whatever version of the code, or None."""
        return self.store.read(run.name(self.code)) or self.store.newest(
            run.task.label, run.scheme, run.seed, run.settings, run.task.inputs_key
        )

    def prepare(self, runs: list[Run]) -> None:
        """Import modules that runs need, and prepare the runs' data."""
        prepare_process()
        for task in {run.task.label: run.task for run in runs}.values():
            task.prepare(self.work)

    def finish(self, run: Run) -> None:
        """Finish a run in this process and exit it where the run fails; the reason is kept in the run's folder."""
        failure = self.folder(run) / FAILED
        failure.unlink(missing_ok=True)
        try:
            run.finish(self.work, self.store, self.code, self.threads, self.keep_models)
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
                write_text(failure, f"{reason}\n", renews=True)
            finally:
                raise SystemExit(1) from None

    def failure(self, run: Run) -> str | None:
        """Return why a run's last attempt failed, or None."""
        path = self.folder(run) / FAILED
        return path.read_text(encoding="utf-8").strip() if path.exists() else None


@cache
def _type_for(noted: Any, sets: tuple[str, ...], logged: tuple[str, ...]) -> Any:
    """Return the type of a task's results: scores of its sets in metrics that are known, and all that it logs."""

    def having(**parts: Any) -> Any:
        return TypedDict("Having", parts)

    metrics: Any = Literal[tuple(METRICS)]
    scored: Any = Annotated[noted, having(statistics=dict[metrics, object])]
    return having(sets=having(**dict.fromkeys(sets, scored)), validations=list[having(**dict.fromkeys(logged, Number))])


def as_numbers(text: str) -> list[int]:
    """Return the numbers of `--seeds`, separated by commas."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds takes whole numbers separated by commas, say 101,102, got {text!r:.40}") from None


class ProcessPool:
    """Make runs in child processes, several at a time."""

    def __init__(self, comparison: Comparison, runs: list[Run]) -> None:
        self.comparison, self.waiting, self.total = comparison, list(runs), len(runs)
        self.active: dict[Fork, Run] = {}
        self.failed: dict[str, str] = {}
        self.took = comparison.durations()
        self.bar = progress(total=self.total, description="runs", unit="runs", note=self.note)
        self.told: dict[str, None] = {}  # warnings of trainings
        self.later: dict[str, float] = {}  # when to try again what another process was at work on, by title

    def run(self) -> dict[str, str]:
        """Make all runs; return the reasons of those that failed, by title."""
        try:
            with self.bar:
                while self.waiting or self.active:
                    while len(self.active) < self.comparison.workers and (run := self.next()):
                        log = self.comparison.folder(run) / "cell.log"
                        self.active[Fork(partial(self.comparison.finish, run), log)] = run
                    for fork in [fork for fork in self.active if fork.poll() is not None]:
                        self.take(fork, self.active.pop(fork))
                    wait_for(self.active, 0.1)
        finally:
            for fork in self.active:
                fork.end()
        return self.failed

    def next(self) -> Run | None:
        """Return the next run to start, or None; skip and count runs that another process has finished meanwhile."""
        now = time.monotonic()
        for run in [run for run in self.waiting if self.later.get(run.title, 0.0) <= now]:
            self.waiting.remove(run)
            if self.comparison.result(run) is None:
                return run
            self.count(run, "finished by another process")
        return None

    def take(self, fork: Fork, run: Run) -> None:
        """Record how a child ended: try its run again later if another process works on it."""
        if fork.status == BUSY:
            if run.title not in self.later:
                say(f"  {run.title}: another process is at it; tried again later")
            self.later[run.title] = time.monotonic() + RETRY
            self.waiting.append(run)
        elif fork.status:
            self.failed[run.title] = fork.reason().removeprefix("error: ")
            self.count(run, f"failed: {self.failed[run.title]}")
        else:
            sets = (self.comparison.result(run) or {"sets": {}})["sets"].items()
            values = [f"{name} {metric} {v:.2f}" for name, one in sets for metric, v in one["values"].items()]
            self.took.append(fork.seconds)
            warnings = TrainingLog.of(self.comparison.folder(run) / "train.log").warnings
            for warning in [one for one in warnings if one not in self.told]:
                say(f"warning: {run.title}: {warning}")
            self.told |= warnings
            self.count(run, f"{', '.join(values)} ({fork.seconds:.0f} s)")

    def count(self, run: Run, end: str) -> None:
        """Count a run that has ended, and print how."""
        self.bar.update()
        say(f"[{self.bar.n}/{self.total}] {run.title}: {end}")

    def note(self) -> str:
        """Say how far the runs at work are, and what remains by them and by those that have ended."""
        told, took, left = [], list(self.took), 0.0
        for run in list(self.active.values()):
            log, updates = TrainingLog.of(self.comparison.folder(run) / "train.log"), int(run.flags["max-update"])
            at = f"begins (its log has a line every {run.flags['log-interval']} updates)"
            if log.updates:
                own = log.wall * max(updates / log.updates - 1, 0)
                took, left = [*took, log.wall + own], left + own
                then = f"{duration(own)} left" if own else "scored now"
                of, then = (f" of {updates:,}", f", {then}") if updates else ("", "")  # else an epoch ends it
                at = f"update {log.updates:,}{of}, training loss {log.loss}{then}"
            told.append(f"{run.title}: {at}")
        if took and (told or self.waiting):
            left += len(self.waiting) * mean(took)
            told.insert(0, f"all in about {duration(left / self.comparison.workers)}")
        return "; ".join(told)


def run_jobs(comparison: Comparison, cluster: str) -> int:
    """Prepare the data here and make every missing run in a job of submitit.

    The jobs of one call are an array; submitit's parameters are the specification's `slurm`. Jobs
    that are still at work when this command is interrupted go on: their results count. The work
    lies on a disk that the nodes share; the cluster `local` runs the jobs here, for a test.

    Returns:
        The exit status: 1 where a run failed.
    """
    import submitit

    def in_jobs(comparison: Comparison, runs: list[Run]) -> dict[str, str]:
        executor = submitit.AutoExecutor(comparison.work.absolute() / "jobs", cluster=cluster)
        try:
            executor.update_parameters(**{"name": comparison.spec.name, **comparison.spec.slurm})
        except (TypeError, NameError) as error:
            raise UserError(f"slurm: submitit says: {error}") from None
        # A job may start in another folder.
        shared = replace(comparison, work=comparison.work.absolute(), results=comparison.results.absolute())
        with executor.batch():
            jobs = [executor.submit(finish_job, shared, run) for run in runs]
        print(f"submitted: {', '.join(job.job_id for job in jobs)}", flush=True)
        failed = {}
        for job, run in progress(list(zip(jobs, runs, strict=True)), description="jobs", unit="jobs"):
            if error := job.exception():
                failed[run.title] = comparison.failure(run) or str(error).strip().splitlines()[-1]
            say(f"{run.title}: {'failed' if error else 'done'}")
        return failed

    return comparison.run(in_jobs)


def finish_job(comparison: Comparison, run: Run) -> None:
    """Finish a run, in its job."""
    prepare_process()
    try:
        comparison.finish(run)
    except SystemExit as end:
        busy = "another process is at it: run the same command again later"
        raise RuntimeError(busy if end.code == BUSY else comparison.failure(run) or "failed") from None


def status(comparison: Comparison) -> int:
    """Print what is done, what failed and what is missing; return 1 where something is."""
    runs, missing = comparison.runs, comparison.missing()
    total, left = (Counter((run.task.label, run.scheme) for run in some) for some in (runs, missing))
    for (task, scheme), number in total.items():
        print(f"{task} / {scheme}: {number - left[task, scheme]} of {number}")
    failures = [(run.title, reason) for run in missing if (reason := comparison.failure(run))]
    print("\n".join(f"failed: {title}: {reason}" for title, reason in failures) or "none failed")
    done = f"{len(runs) - len(missing)} of {counted(len(runs), 'run')}"
    print(f"{done} done in {comparison.results} (code {comparison.code})")
    return int(bool(missing))
