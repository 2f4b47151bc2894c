"""Plants each bug of tests/mutations.md in a copy of the project and runs the test to see it.

    python tests/mutate.py            # all of them, one process a core
    python tests/mutate.py rope       # those whose row mentions `rope`

Exit status: 0 every planted bug was caught, 1 one survived, 2 a row no longer fits the code.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shutil
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
TABLE = TESTS / "mutations.md"

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork has only the thread that forked
tqdm.monitor_interval = 0  # and no thread may run beside it


@dataclass(frozen=True)
class Mutation:
    """One planted bug."""

    bug: str
    file: str
    before: str
    after: str
    test: str


def mutations(text: str) -> list[Mutation]:
    """The rows of the table.

    Raises:
        ValueError: if a row's `before` does not occur exactly once in its file.
    """
    rows = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 5 or cells[0] in ("bug", "---") or set(cells[0]) == {"-"}:
            continue
        row = Mutation(*(cell.removeprefix("`").removesuffix("`") for cell in cells))
        found = (ROOT / row.file).read_text().count(row.before)
        if found != 1:
            raise ValueError(f"{row.bug}: {row.before!r} occurs {found} times in {row.file}")
        rows.append(row)
    return rows


def warm_up() -> None:
    """Import once what every test imports, but nothing of the project."""
    for name in ("pytest", "hypothesis", "torch", "scipy", "fairseq.models", "fairseq_cli.train"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def run_planted(row: Mutation, copy: Path) -> int:
    """In a process of its own: pytest's exit status with the bug planted in a copy."""
    ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "quickstart_out", "*.pt")
    shutil.copytree(ROOT, copy, ignore=ignored)
    path = copy / row.file
    path.write_text(path.read_text().replace(row.before, row.after))
    os.chdir(copy)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy)}
    sys.path[:] = [str(copy), *(part for part in sys.path if Path(part) not in (ROOT, TESTS))]
    sys.argv = ["pytest"]
    import pytest

    return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", f"tests/{row.test}"]))


def start(row: Mutation, folder: Path) -> int:
    """Fork a process for one row; its output goes to `folder`/log.  Returns its process id."""
    folder.mkdir()
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = run_planted(row, folder / "project")
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def run_all(rows: list[Mutation], workers: int) -> list[Mutation]:
    """Plant each bug in a fork of this process, `workers` at a time.

    Returns:
        The rows whose test passed all the same.

    Raises:
        ValueError: A row's test neither passed nor failed.
    """
    waiting, running, survivors = list(enumerate(rows)), {}, []
    with (
        tempfile.TemporaryDirectory() as folder,
        tqdm(total=len(rows), disable=None) as progress,
    ):
        while waiting or running:
            while waiting and len(running) < workers:
                number, row = waiting.pop(0)
                place = Path(folder) / str(number)
                running[start(row, place)] = row, place
            child, status = os.wait()
            row, place = running.pop(child)
            code = os.waitstatus_to_exitcode(status)
            if code not in (0, 1):  # 1: the test failed, as it should
                text = (place / "log").read_text()[-1200:]
                raise ValueError(f"{row.bug}: {row.test} did not run (status {code}):\n{text}")
            if code == 0:
                survivors.append(row)
            shutil.rmtree(place)
            progress.update()
    return survivors


def main() -> int:
    """Plant, run, report."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        rows = [row for row in mutations(TABLE.read_text()) if word in str(row)]
        warm_up()
        survivors = run_all(rows, workers=len(os.sched_getaffinity(0)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    for row in survivors:
        print(f"SURVIVED: {row.bug} ({row.file}); {row.test} passed")
    print(f"{len(rows) - len(survivors)} of {len(rows)} planted bugs caught")
    return 1 if survivors or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
