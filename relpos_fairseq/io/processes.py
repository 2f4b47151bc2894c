"""Run work in other processes: a pool with ordered results, a forked child, and other programs."""

import hashlib
import json
import multiprocessing
import os
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

from relpos_fairseq.io.command import error_line
from relpos_fairseq.io.errors import ToolError, UserError

Chunk = TypeVar("Chunk")
Result = TypeVar("Result")
AHEAD = 2  # chunks per worker that are read ahead, so that no worker waits
HELD = (signal.SIGINT, signal.SIGTERM)
WATCH = 0.5  # seconds between two looks at the parent

_function: Callable  # a worker's function: sent once, not with every chunk


def ordered_map(function: Callable[[Chunk], Result], chunks: Iterable[Chunk], workers: int) -> Iterator[Result]:
    """Yield `function(chunk)` of every chunk, in order, whatever the number of workers.

    At most `2 * workers` chunks and results exist at a time. Ctrl-C, an exception in a worker and a
    caller that stops early end the workers at once; they also end when this process is killed.

    Args:
        function: Called in the workers; may be a closure (workers are forked), must not depend on
            earlier chunks.
        chunks: Read as the work proceeds; what is in them and in the results can be pickled.
        workers: How many processes; 1 is this process.

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
    """Submit chunks a few ahead of the result that is yielded."""
    pending: deque = deque()
    for chunk in chunks:
        pending.append(executor.submit(_call_function, chunk))
        if len(pending) >= ahead:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()


@contextmanager
def _signals_held() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait: in the middle of a fork Python would print and forget them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HELD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(function: Callable, parent: int) -> None:
    """Prepare a worker: Ctrl-C is the parent's to handle, and the parent's end is the worker's."""
    global _function
    _function = function
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD)
    end_with(parent)


def end_with(parent: int) -> None:
    """End this process when its parent has ended, however it ended: killed with SIGKILL, say."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(WATCH)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _call_function(chunk: object) -> object:
    """Call the worker's function: in a worker."""
    return _function(chunk)


# A forked child: it begins with all modules that are imported here, and its memory goes back when it ends.

POLL = 0.05  # seconds between two looks at a child


@dataclass(eq=False)
class Fork:
    """A child that runs a function; this process must not have computed with several threads."""

    function: Callable[[], object]  # an exception or `SystemExit` of it ends the child as it ends a command
    log: Path  # file to which all that it prints is appended
    status: int | None = None  # its exit status; None while it runs
    megabytes: float = 0.0  # peak memory of the child, or of a child that it waited for
    seconds: float = 0.0  # from its start to its end
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
        finally:  # whatever happens, say a full disk, it never goes on as its parent would
            try:
                sys.stdout.flush()
            finally:
                os._exit(status)

    def poll(self) -> int | None:
        """Return its exit status, negative where a signal ended it, or None while it runs."""
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
                time.sleep(POLL)

    def reason(self) -> str:
        """Return why it failed: the signal, or the last error in its log."""
        return failure(self.status or 0, self.log, self.offset)


def failure(status: int, log: Path, offset: int) -> str:
    """Return why a process failed: the signal that ended it, or the last error in its log behind `offset`."""
    if status < 0:
        return f"killed by {signal.Signals(-status).name}"
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(offset)
        return error_line(file) or f"status {status}"


def in_fork(function: Callable[[], object], log: Path, name: str) -> Fork:
    """Run a function in a child to its end.

    Raises:
        ToolError: It failed; the message begins with `name`.
    """
    fork = Fork(function, log)
    try:
        while fork.poll() is None:
            time.sleep(POLL)
    finally:
        fork.end()
    if fork.status:
        raise ToolError(f"{name}: {fork.reason()} (its whole output: {log})")
    return fork


def redirect_output(log: Path) -> None:
    """Append all output of this process, of C code too, to a file; standard input becomes empty."""
    import logging

    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in ((0, nothing), (1, out), (2, out)):
        os.dup2(source, target)
    sys.stdin = open(0, encoding="utf-8")
    sys.stdout = sys.stderr = open(1, "w", encoding="utf-8", errors="replace", buffering=1)
    for handler in logging.root.handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.stream = sys.stdout  # setStream would flush the parent's, which may be closed


USER_DIR = Path(__file__).resolve().parents[1]


def run_tool(command: list[str], log: Path, threads: int) -> None:
    """Run a command to its end with some threads; its output is appended to a log.

    Raises:
        ToolError: The command did not end with status 0.
    """
    # Unbuffered, so that the log shows progress at once.
    settings = {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"}
    settings |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    with log.open("ab") as file:
        offset = file.seek(0, os.SEEK_END)
        done = subprocess.run(
            command, env=os.environ | settings, stdin=subprocess.DEVNULL, stdout=file, stderr=file, check=False
        )
    if done.returncode:
        name = Path(command[1] if command[0] == sys.executable else command[0]).name
        raise ToolError(f"{name}: {failure(done.returncode, log, offset)} (its whole output: {log})")


def key_of(settings: object, files: Iterable[Path] = ()) -> str:
    """Return a short hash of settings and of the contents of source files."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
