"""Plants each bug of tests/planted_bugs.yaml in a copy of the project and runs the test to see it.

    python tests/mutate.py            # all of them, one process a core
    python tests/mutate.py rope       # those whose row mentions `rope`
    python tests/mutate.py --durations 20 --workers 1    # and the 20 that took longest
    python tests/mutate.py --new --record                # those that changed; tests/planted_bugs.caught then has them
    python tests/mutate.py --random 150 --seed 1         # so many drawn mutants (tests/mutants.py)

Exit status: 0 every planted bug was caught, 1 one survived, 2 a row no longer fits the code.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import faulthandler
import gc
import hashlib
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field, replace
from pathlib import Path

import yaml
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests"
TABLE = TESTS / "planted_bugs.yaml"
CAUGHT = TESTS / "planted_bugs.caught"  # the digest of every row that was caught, one a line
COPIED = "relpos_fairseq scripts examples tests pyproject.toml setup.py README.md".split()
WARM = """pytest hypothesis torch scipy.stats fairseq.models fairseq_cli.train fairseq_cli.generate
torch._dynamo torch.distributed.tensor torch.testing torch.utils.flop_counter triton.language
torch._subclasses.schema_check_mode requests sentencepiece tokenizers sacremoses
subword_nmt.apply_bpe""".split()
LIMIT = 100  # seconds for one bug's test; twice that for a second try

sys.path[:0] = [str(TESTS)]
from definitions import find  # noqa: E402  (of tests/; `helpers` must not be imported before a copy of it is)

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork has only the thread that forked
os.environ.setdefault("TRITON_INTERPRET", "1")  # as tests/conftest.py, before triton is imported
tqdm.monitor_interval = 0  # and no thread may run beside it


@dataclass(frozen=True)
class Mutation:
    """One planted bug: a text for another, between the beginning and the end of a definition in a file."""

    bug: str
    file: str
    begin: int
    end: int
    before: str
    after: str
    test: str
    digest: str = field(default="", repr=False)  # of the definition, the bug and the test's file

    def planted(self, text: str) -> str:
        """Return the file's text with the bug in it."""
        definition = text[self.begin : self.end].replace(self.before, self.after)
        return text[: self.begin] + definition + text[self.end :]


def mutations(text: str) -> list[Mutation]:
    """Return the planted bugs of the YAML file's text.

    Raises:
        ValueError: A row names no definition of the package, or its `before` does not occur exactly once there.
    """
    rows = []
    for row in yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        path, begin, end = find(ROOT, row["in"])
        definition = path.read_text(encoding="utf-8")[begin:end]
        if (found := definition.count(row["before"])) != 1:
            raise ValueError(f"{row['bug']}: {row['before']!r} occurs {found} times in {row['in']}")
        file = path.relative_to(ROOT).as_posix()
        seen_by = (TESTS / row["test"].partition("::")[0]).read_text(encoding="utf-8")
        bug = row["before"], row["after"], row["test"]
        digest = hashlib.sha256(repr((definition, bug, seen_by)).encode()).hexdigest()[:16]
        rows.append(Mutation(row["bug"], file, begin, end, *bug, digest))
    return rows


def recorded() -> set[str]:
    """The digests of the rows that were caught; a row that changed since, or whose test did, has another."""
    return set(CAUGHT.read_text().split()) if CAUGHT.exists() else set()


def record(done: list[Run]) -> None:
    """Write the digests of the rows caught now, and of those caught before that are still in the table."""
    kept = recorded() - {run.row.digest for run in done} | {run.row.digest for run in done if run.caught}
    kept &= {row.digest for row in mutations(TABLE.read_text())}
    CAUGHT.write_text("".join(f"{digest}\n" for digest in sorted(kept)))


def warm_up() -> None:
    """Import once what many tests import, but nothing of the project."""
    for name in WARM:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    store_configs_later()
    gc.collect()
    gc.freeze()  # else every fork collects all of it, and copies it by that


def store_configs_later() -> None:
    """Let hydra convert the classes of the plugin's configs where one is read; few tests read any."""
    from hydra.core.config_store import ConfigStore

    store, read, waiting = ConfigStore.store, ConfigStore._open, []

    def ready(self: ConfigStore, path: str) -> object:
        while waiting:
            given, named = waiting.pop(0)
            store(self, *given, **named)
        return read(self, path)

    ConfigStore.store = lambda self, *given, **named: waiting.append((given, named))
    ConfigStore._open = ready


def copy_project(copy: Path) -> None:
    """Copy the project and compile the copy, so that what runs with a bug compiles one file."""
    copy.mkdir(parents=True)
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, copy / name)
    compileall.compile_dir(copy, quiet=2)


def compile_apart(copy: Path) -> None:
    """What is compiled of a planted bug is nobody else's, and shows it without being fast."""
    compiler = copy / "cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    os.environ |= {"RELPOS_CACHE": str(copy / "cache"), "CC": str(compiler)}


def run_planted(row: Mutation, copy: Path, anew: bool) -> int:
    """In a process of its own: pytest's exit status with the bug planted in a copy."""
    path = copy / row.file
    path.write_text(row.planted(path.read_text(encoding="utf-8")), encoding="utf-8")
    os.chdir(copy)
    # what is compiled of it would outlive it in the copy
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    if path.suffix in (".c", ".h"):
        compile_apart(copy)
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--hypothesis-profile", "planted"]
    # where CI is set, pytest writes whole differences: of two long values, for many minutes
    arguments += ["--assert=plain", *(f"tests/{test}" for test in row.test.split("\n"))]
    if anew:
        os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])
    traces = os.fdopen(os.dup(2), "w")  # pytest takes descriptor 2 for itself
    faulthandler.dump_traceback_later(LIMIT - 5, file=traces)
    sys.path[:] = [str(copy), *(part for part in sys.path if Path(part) not in (ROOT, TESTS))]
    sys.argv = ["pytest"]
    import pytest

    return int(pytest.main(arguments))


def start(row: Mutation, folder: Path, anew: bool) -> int:
    """Fork a process for one row; its output goes to `folder`/log.

    Args:
        row: the bug.
        folder: of a copy of the project, which no other process has meanwhile.
        anew: run pytest in a new interpreter, not in the fork of this one.

    Returns:
        Its process id, which is its process group's too.
    """
    (folder / "log").unlink(missing_ok=True)
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        os.setsid()
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = run_planted(row, folder / "project", anew)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


@dataclass
class Run:
    """One row's process, the processor time that it took, and whether its test failed."""

    row: Mutation
    place: Path
    anew: bool
    deadline: float
    seconds: float = 0.0
    caught: bool = False

    failed: str = ""  # the test that did

    def tail(self) -> str:
        """The end of what it printed."""
        return (self.place / "log").read_text(errors="replace")[-8000:]


def wait_for_one(running: dict[int, Run]) -> tuple[Run, int | None]:
    """The next of them to end and its exit status, or one past its deadline, killed, and None."""
    while True:
        for child, run in running.items():
            ended, status, used = os.wait4(child, os.WNOHANG)
            if ended:
                run.seconds = used.ru_utime + used.ru_stime
                return running.pop(child), os.waitstatus_to_exitcode(status)
            if time.monotonic() > run.deadline:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return running.pop(child), None
        time.sleep(0.02)


def run_all(rows: list[Mutation], workers: int, drawn: bool = False) -> list[Run]:
    """Plant each bug in a fork of this process, `workers` at a time.

    A fork that does not end in time is run once more, in a new interpreter; of drawn mutants, it has seen its own.

    Returns:
        How each ended.

    Raises:
        ValueError: A row's test neither passed nor failed.
    """
    waiting, running, done = [(row, False) for row in rows], {}, []
    with tempfile.TemporaryDirectory() as folder, tqdm(total=len(rows), disable=None) as progress:
        free = [Path(folder) / str(number) for number in range(min(workers, len(rows)))]
        for place in free:
            copy_project(place / "project")
        try:
            while waiting or running:
                while waiting and free:
                    row, anew = waiting.pop(0)
                    child = start(row, place := free.pop(), anew)
                    running[child] = Run(row, place, anew, time.monotonic() + LIMIT * (1 + anew))
                run, code = wait_for_one(running)
                free.append(run.place)
                shutil.copy2(ROOT / run.row.file, run.place / "project" / run.row.file)
                if drawn:
                    code = int(code != 0)  # one that hangs, or that nothing can import, is seen too
                if code is None and not run.anew:
                    print(f"{run.row.bug}: no end in {LIMIT} s:\n{run.tail()}", file=sys.stderr)
                    waiting.append((run.row, True))
                    continue
                if code not in (0, 1):  # 1: the test failed, as it should
                    how = "did not end" if code is None else f"did not run (status {code})"
                    raise ValueError(f"{run.row.bug}: {run.row.test} {how}:\n{run.tail()}")
                run.caught = code == 1
                failed = re.findall(r"^FAILED tests/(.*?)(?: - .*)?$", run.tail(), re.M) if run.caught else []
                run.failed = failed[0] if failed else ""
                done.append(run)
                progress.update()
        finally:
            for child in running:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
    return done


def draw(number: int, seed: int) -> tuple[list[Mutation], list[str]]:
    """Draw mutants; return those that tests reach, and the names of those that none does.

    Raises:
        FileNotFoundError: It was not recorded what tests reach.
        ValueError: It was recorded of other files.
    """
    import mutants

    reach, rows, alone = mutants.Reach.read(), [], []
    for one in mutants.drawn(number, seed):
        name = f"{one.file}:{one.line}: {one.before} -> {one.after}"
        tests = [test.removeprefix("tests/") for test in mutants.tests_of(one, reach)]
        if tests:
            rows.append(Mutation(name, one.file, one.begin, one.end, one.before, one.after, "\n".join(tests)))
        else:
            alone.append(name)
    return rows, alone


def seen_without(done: list[Run], workers: int) -> set[str]:
    """The tests that fail in a copy without any mutant, of those that have failed with one."""
    failed = {run.failed for run in done if run.failed}
    rows = [Mutation(test, "README.md", 0, 0, "", "", test) for test in sorted(failed)]
    return {run.row.test for run in run_all(rows, workers, drawn=True) if run.caught}


def run_drawn(rows: list[Mutation], workers: int) -> list[Run]:
    """Plant drawn mutants; what a test says that fails in a copy without any is not counted, and it is left out."""
    done, broken = [], set()
    while rows:
        ran = run_all(rows, workers, drawn=True)
        broken |= (found := seen_without(ran, workers))
        done += [run for run in ran if run.failed not in found]
        again = [run.row for run in ran if run.failed in found]
        rows = [replace(row, test="\n".join(t for t in row.test.split("\n") if t not in broken)) for row in again]
    return done


def main_drawn(number: int, seed: int, workers: int) -> int:
    """Plant mutants that are drawn, and print those that no test sees."""
    rows, alone = draw(number, seed)
    warm_up()
    done = run_drawn(rows, workers)
    gc.unfreeze()
    survivors = [run.row for run in done if not run.caught]
    for name in alone:
        print(f"NO TEST ENTERS {name}")
    for row in survivors:
        print(f"SURVIVED {len(row.test.splitlines())} tests: {row.bug}")
    print(f"{number - len(alone) - len(survivors)} of {number} drawn mutants caught (seed {seed})")
    return 0


def main() -> int:
    """Plant, run, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("word", nargs="?", default="", help="of the rows to plant (default: all)")
    parser.add_argument("--new", action="store_true", help=f"those alone that {CAUGHT.name} has not as they stand")
    parser.add_argument("--record", action="store_true", help=f"write into {CAUGHT.name} which were caught")
    parser.add_argument("--durations", type=int, default=0, help="how many of the slowest to print")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--random", type=int, default=0, metavar="N", help="plant so many drawn mutants instead")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    given = parser.parse_args()
    try:
        if given.random:
            return main_drawn(given.random, given.seed, given.workers)
        rows = [row for row in mutations(TABLE.read_text()) if given.word in str(row)]
        if given.new:
            known = recorded()
            print(
                f"{sum(row.digest in known for row in rows)} of {len(rows)} were caught as they stand, and are skipped"
            )
            rows = [row for row in rows if row.digest not in known]
        warm_up()
        done = run_all(rows, given.workers)
        gc.unfreeze()
    except (FileNotFoundError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    for run in sorted(done, key=lambda run: -run.seconds)[: given.durations]:
        print(f"{run.seconds:6.1f} s  {run.row.bug}; {run.row.test}")
    if given.record:
        record(done)
    survivors = [run.row for run in done if not run.caught]
    for row in survivors:
        print(f"SURVIVED: {row.bug} ({row.file}); {row.test} passed")
    print(f"{len(rows) - len(survivors)} of {len(rows)} planted bugs caught")
    return 1 if survivors or not (rows or given.new) else 0


if __name__ == "__main__":
    sys.exit(main())
