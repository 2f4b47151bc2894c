r"""Compare schemes on tasks, each with several seeds, by fairseq's own commands.

    relpos compare run examples/comparison/quick.yaml --workers 2
    relpos compare status examples/comparison/quick.yaml
    relpos compare report examples/comparison/quick.yaml

A cell is a scheme on a task with a seed. `run` does what is missing: after an interruption, or on
another machine that has the folder of results, the same command again continues.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "schemes x seeds x tasks from one file: runs, statistics, a report"
EPILOG = """\
The file's keys, the tasks and the statistics: relpos_fairseq/comparison/README.md.

exit status: 0 all done, 1 a cell failed (status: is missing), 2 wrong options or file, 130 or 143
interrupted
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add = parser.add_argument
    add("action", choices=("run", "status", "report"), help="what to do")
    add("spec", type=Path, metavar="SPEC", help="the comparison, a YAML file")
    add("--work", type=Path, help="data, checkpoints and logs (default: compare_out/NAME)")
    add("--results", type=Path, help="results, small files to keep (default: NAME beside SPEC)")
    add("--workers", type=int, default=1, help="cells at a time (default: %(default)s)")
    add("--threads", type=int, default=1, help="threads of a cell (default: %(default)s)")
    add(
        "--executor",
        choices=("local", "slurm"),
        default="local",
        help="slurm: a job a cell, by submitit and the file's `slurm:` (default: %(default)s)",
    )
    add("--keep-models", action="store_true", help="keep each cell's checkpoint")
    add("--any-code", action="store_true", help="count results of other versions of the code")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    given = vars(args)
    action, executor = given.pop("action"), given.pop("executor")
    from relpos_fairseq.comparison.runs import Comparison, Options, status

    comparison = Comparison.of(Options(**given))
    if action == "status":
        return status(comparison)
    if action == "report":
        from relpos_fairseq.comparison.report import write_report

        return write_report(comparison)
    if executor == "slurm":
        from relpos_fairseq.comparison.slurm import submit

        return submit(comparison, executor)
    return comparison.run()
