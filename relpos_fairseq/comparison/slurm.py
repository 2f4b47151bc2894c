"""Cells as jobs, by submitit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relpos_fairseq.comparison.commands import prepare_process
from relpos_fairseq.comparison.runs import BUSY, Comparison
from relpos_fairseq.engine.errors import PreparationError

if TYPE_CHECKING:
    from relpos_fairseq.comparison.cell import Cell


def submit(comparison: Comparison, cluster: str) -> int:
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
        raise PreparationError("--executor slurm needs submitit: pip install 'relpos_fairseq[slurm]'") from None

    def in_jobs(comparison: Comparison, cells: list[Cell]) -> dict[str, str]:
        executor = submitit.AutoExecutor(comparison.work.absolute() / "jobs", cluster=cluster)
        try:
            executor.update_parameters(**{"name": comparison.spec.name, **comparison.spec.slurm})
        except (TypeError, NameError) as error:
            raise PreparationError(f"slurm: submitit says: {error}") from None
        with executor.batch():
            jobs = [executor.submit(finish, comparison.absolute(), cell) for cell in cells]
        print(f"submitted: {', '.join(job.job_id for job in jobs)}", flush=True)
        failed = {}
        for job, cell in zip(jobs, cells, strict=True):
            if error := job.exception():
                failed[cell.title] = comparison.failure(cell) or str(error).strip().splitlines()[-1]
            print(f"{cell.title}: {'failed' if error else 'done'}", flush=True)
        return failed

    return comparison.run(in_jobs)


def finish(comparison: Comparison, cell: Cell) -> None:
    """Finish a cell, in its job."""
    prepare_process()
    try:
        comparison.finish(cell)
    except SystemExit as end:
        busy = "another process is at it: run the same command again later"
        raise RuntimeError(busy if end.code == BUSY else comparison.failure(cell) or "failed") from None
