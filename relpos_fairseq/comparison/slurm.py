"""Cells as jobs, by submitit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relpos_fairseq.comparison.commands import prepare_process
from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.tables import counted

if TYPE_CHECKING:
    from relpos_fairseq.comparison.cell import Cell
    from relpos_fairseq.comparison.runs import Comparison


def submit(comparison: Comparison, cluster: str) -> int:
    """Prepare the data here and run every missing cell in a job of its own.

    The jobs of one call are an array; submitit's parameters are the specification's `slurm`. Jobs
    that are still at work when this command is interrupted go on: their results count.

    Args:
        comparison: what is to be done, on a disk that the nodes share.
        cluster: submitit's name: `slurm`; `local` runs the jobs here, for a test.

    Returns:
        The exit status: 1 where a cell failed.

    Raises:
        PreparationError: submitit is not installed, or knows a parameter not.
    """
    try:
        import submitit
    except ImportError:
        raise PreparationError(
            "--executor slurm needs submitit: pip install 'relpos_fairseq[slurm]'"
        ) from None
    missing = comparison.missing()
    print(f"{counted(len(comparison.cells), 'cell')}, {len(missing)} to do", flush=True)
    if not missing:
        return 0
    comparison.prepare(missing)
    executor = submitit.AutoExecutor(comparison.work.absolute() / "jobs", cluster=cluster)
    try:
        executor.update_parameters(**{"name": comparison.spec.name, **comparison.spec.slurm})
    except (TypeError, NameError) as error:
        raise PreparationError(f"slurm: submitit says: {error}") from None
    with executor.batch():
        jobs = [executor.submit(finish, comparison.absolute(), cell) for cell in missing]
    print(f"submitted: {', '.join(job.job_id for job in jobs)}", flush=True)
    failed = {}
    for job, cell in zip(jobs, missing, strict=True):
        if error := job.exception():
            failed[cell.title] = comparison.failure(cell) or str(error).strip().splitlines()[-1]
        print(f"{cell.title}: {'failed' if error else 'done'}", flush=True)
    for title, reason in failed.items():
        print(f"failed: {title}: {reason}", flush=True)
    return 1 if failed else 0


def finish(comparison: Comparison, cell: Cell) -> None:
    """Finish a cell, in its job."""
    prepare_process()
    try:
        comparison.finish(cell)
    except SystemExit:
        raise RuntimeError(comparison.failure(cell) or "failed") from None
