"""Run work in other processes: a worker pool with ordered results, a forked child, or another program."""

import hashlib
import json
import math
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from relpos_fairseq.io.child import command_of
from relpos_fairseq.io.command import error_line
from relpos_fairseq.io.errors import ToolError, UserError
from relpos_fairseq.io.progress import doing

Chunk = TypeVar("Chunk")
Result = TypeVar("Result")
AHEAD = 2  # chunks per worker that are read ahead, so that no worker waits
HELD = (signal.SIGINT, signal.SIGTERM)
WATCH = 0.5  # seconds between two checks that the parent is alive

_function: Callable  # a worker's function: sent once, not with every chunk


def ordered_map(function: Callable[[Chunk], Result], chunks: Iterable[Chunk], workers: int) -> Iterator[Result]:
    """Yield `function(chunk)` for every chunk, in the order of the chunks, computed by `workers` processes.

    At most `2 * workers` chunks and results exist at a time. Workers are ended at once by Ctrl-C, by an
    exception in a worker, or if the caller stops early; they also end when this process is killed.

    Args:
        function: Called in the workers; may be a closure (workers are forked), must not depend on
            earlier chunks.
        chunks: Read as the work proceeds; chunks and results must be picklable.
        workers: How many processes; with 1, the work is done in this process.

    Raises:
        UserError: `workers` is below 1, or a worker was killed.
    """
    if workers < 1:
        raise UserError(f"workers must be >= 1, got {workers}")
    if workers == 1:
        yield from map(function, chunks)
        return
    others = set(multiprocessing.active_children())
    executor = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=_start_worker,
        initargs=(function, os.getpid()),
    )
    done = False
    try:
        with _signals_held():
            executor.submit(os.getpid)  # the first call forks all workers
        yield from _stream(executor, chunks, AHEAD * workers)
        done = True
    except BrokenProcessPool as error:
        raise UserError("a worker process was killed, perhaps for want of memory: use fewer --workers") from error
    finally:
        if not done:
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
        executor.shutdown(wait=True, cancel_futures=True)


def _stream(executor: ProcessPoolExecutor, chunks: Iterable, ahead: int) -> Iterator:
    """Yield the results of chunks in order, with up to `ahead` chunks submitted and not yet yielded."""
    pending: deque = deque()
    for chunk in chunks:
        pending.append(executor.submit(_call_function, chunk))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Block SIGINT (Ctrl-C) and SIGTERM while the `with` block forks; they are delivered afterwards.

    In the middle of a fork Python would print the exception that they raise, and go on.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(function: Callable, parent: int) -> None:
    """Set up a worker process: keep its function, ignore Ctrl-C (the parent handles it), and end with the parent."""
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    end_with(parent)


def end_with(parent: int) -> None:
    """Start a thread that ends this process once the parent process has ended, even by SIGKILL."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _call_function(chunk: object) -> object:
    """Call, in a worker process, the function that `_start_worker` kept."""
    return _function(chunk)


# A forked child starts with all modules imported, and its memory is freed when it ends.

POLL = 0.05  # seconds between two checks whether a child has ended
TAIL, SHOWN = 1 << 16, 200  # bytes of a log's end that are read, characters of its last line that are shown


@dataclass(eq=False)
class Fork:
    """Run a function in a forked child process, which starts at once.

    This process must not have run multi-threaded computations before: a fork copies only one thread.
    """

    function: Callable[[], object]  # as in a command, an exception or `SystemExit` ends the child
    log: Path  # file to which the child's output is appended
    status: int | None = None  # the child's exit status; None while it runs
    megabytes: float = 0.0  # peak memory of the child, or of a child that it waited for
    seconds: float = 0.0  # from the child's start to its end
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.offset = self.log.stat().st_size if self.log.exists() else 0
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(parent)

    def _run(self, parent: int) -> None:
        """Run the function in the child, with its output in the log, and end the child."""
        status = 1
        try:
            end_with(parent)
            redirect_output(self.log)
            self.function()
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:  # whatever happens, say a full disk: the child must not run on into the parent's code
            try:
                sys.stdout.flush()
            finally:
                os._exit(status)

    def poll(self) -> int | None:
        """Return the child's exit status, negative if a signal ended it, or None while it runs."""
        if self.status is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                self.megabytes = usage.ru_maxrss / (1 << 10)
                self.seconds = time.monotonic() - self.started
        return self.status

    def end(self) -> None:
        """Kill the child if it runs, and wait for its end."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            while self.poll() is None:
                wait_for([self], POLL)

    def reason(self) -> str:
        """Return why the child failed: the signal that ended it, or the last error in its log."""
        return failure(self.status or 0, self.log, self.offset)


def failure(status: int, log: Path, offset: int) -> str:
    """Return why a process failed: the signal that ended it, or the last error after byte `offset` of its log."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(offset)
        return error_line(file) or f"status {status}"


def last_line(log: Path, offset: int = 0) -> str:
    """Return the last line of a log after byte `offset`, cut to `SHOWN` characters: what a process is at."""
    with log.open("rb") as file:
        file.seek(max(offset, file.seek(0, os.SEEK_END) - TAIL))
        lines = [line for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
    return lines[-1].strip()[:SHOWN] if lines else ""


def wait_for(forks: Iterable[Fork], seconds: float) -> None:
    """Sleep for some seconds, or, where the system tells of it, until one of the children ends or has ended."""
    forks = list(forks)
    if any(fork.status is not None for fork in forks):
        return
    numbers: list[int] = []
    try:
        numbers.extend(os.pidfd_open(fork.pid) for fork in forks)
        ends = select.poll()
        for number in numbers:
            ends.register(number, select.POLLIN)
        ends.poll(1000 * seconds)
    except (AttributeError, OSError):  # another system, or an old one
        time.sleep(seconds)
    finally:
        for number in numbers:
            os.close(number)


def in_fork(function: Callable[[], object], log: Path, name: str) -> Fork:
    """Run a function in a forked child and wait for its end; return the finished `Fork`.

    Raises:
        ToolError: The child failed; the message begins with `name`.
    """
    fork = Fork(function, log)
    try:
        with doing(name, lambda: last_line(log, fork.offset)):
            while fork.poll() is None:
                wait_for([fork], POLL)
    finally:
        fork.end()
    if fork.status:
        raise ToolError(f"{name}: {fork.reason()} (its whole output: {log})")
    return fork


def redirect_output(log: Path) -> None:
    """Append standard output and error of this process, C code included, to a file; make standard input empty."""
    import logging

    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, out), (2, out)):
        os.dup2(source, target)
    sys.stdin = open(0, encoding="utf-8")
    sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", errors="replace", buffering=1)
    for handler in logging.root.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.stream = sys.stdout  # setStream would flush the parent's stream, which may be closed


USER_DIR = Path(__file__).resolve().parents[1]


def run_tool(command: list[str], log: Path, threads: int) -> None:
    """Run a command to its end, with `threads` as OMP_NUM_THREADS; append its output to a log.

    Raises:
        ToolError: The command did not end with status 0.
    """
    # Unbuffered, so that the log shows progress at once.
    settings = {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    settings |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    with log.open("ab") as file:
        offset = file.seek(0, os.SEEK_END)
        name = command[2] if command[:2] == command_of("")[:2] else Path(command[0]).name
        with doing(name, lambda: last_line(log, offset)):
            done = subprocess.run(
                command, env=os.environ | settings, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False
            )
    if done.returncode:
        raise ToolError(f"{name}: {failure(done.returncode, log, offset)} (its whole output: {log})")


def key_of(settings: object, files: Iterable[Path] = ()) -> str:
    """Return a hash, 8 hexadecimal digits, of settings (JSON) and of the contents of files."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]


def mebibytes(key: str, process: int | str = "self") -> float:
    """Return a size in MiB that the system tells of a process, VmRSS or its peak VmHWM; nan where it tells none.

    What `getrusage` tells is, of a process that was begun by a larger one, the larger one's.
    """
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return math.nan
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(key)), math.nan)
