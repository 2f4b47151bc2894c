"""Work in a child of this process: it begins with all that is imported, and leaves nothing here."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from relpos_fairseq.engine.command import last_words
from relpos_fairseq.engine.errors import ToolError
from relpos_fairseq.engine.pool import end_with

POLL = 0.05  # seconds between two looks at a child


@dataclass(eq=False)
class Fork:
    """A child that runs a function; this process must not have computed with several threads."""

    # what it runs; an exception or `SystemExit` ends it as in a command
    function: Callable[[], object]
    log: Path  # file to which all that it prints is appended
    status: int | None = None  # how it ended; None: it runs
    # the most memory that it, and each child that it waited for, used at a time
    megabytes: float = 0.0
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
        """In the child: print to the log, run the function, end."""
        status = 1
        try:
            end_with(parent)
            redirect(self.log)
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
        """Return how it ended, negative where a signal ended it, or None."""
        if self.status is None:
            pid, status, usage = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
                self.megabytes = usage.ru_maxrss / (1 << 10)
                self.seconds = time.monotonic() - self.started
        return self.status

    def end(self) -> None:
        """End it, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            while self.poll() is None:
                time.sleep(POLL)

    def reason(self) -> str:
        """Return why it failed, in words."""
        if self.status is not None and self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}"
        with self.log.open(encoding="utf-8", errors="replace") as file:
            file.seek(self.offset)
            return last_words(file) or f"status {self.status}"


def in_fork(function: Callable[[], object], log: Path, name: str) -> Fork:
    """Run a function in a child to its end; where it fails, the ToolError calls it by its name."""
    fork = Fork(function, log)
    try:
        while fork.poll() is None:
            time.sleep(POLL)
    finally:
        fork.end()
    if fork.status:
        raise ToolError(f"{name}: {fork.reason()} (its whole output: {log})")
    return fork


def redirect(log: Path) -> None:
    """Send what this process prints, by any way, to the end of a file; nothing is read."""
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
