"""Processes of their own that begin with what nearly every one of them imports: forks of one that did nothing else.

A fairseq command takes four seconds to begin, three of them for other libraries.  What differs from a process that
was begun anew: these libraries and what they import are there first, strings hash alike in all forks of a server,
output is a file and not a pipe, whose last holder would be waited for, and `ps` shows another command line.  Commands
that are about any of this are begun anew, as is what Python reads at its start (options, PYTHON* and the locale), and
with RELPOS_ONNX=full all.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

LIBRARIES = "torch scipy.stats sklearn.metrics hydra omegaconf torch.utils.data".split()
REQUEST = 1 << 22  # bytes
LATER = ("PYTHONPATH", "PYTHONFAULTHANDLER")  # of Python's variables those that a fork heeds
QUIETLY = ["-W", "ignore"]  # of its options


def run(
    words: list[str | Path],
    *,
    cwd: str | Path | None = None,
    env: dict[str, str] | None = None,
    input: str = "",
    joined: bool = False,
    anew: bool = False,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program as `subprocess.run` does with its output captured as UTF-8.

    Args:
        words: this Python or a program in Python of its environment, and its arguments.
        cwd: working directory.
        env: environment; None: this process's.
        input: what it reads.
        joined: whether errors are part of the output.
        anew: begin it by `subprocess` after all.
        timeout: seconds after which it is killed.

    Raises:
        subprocess.TimeoutExpired: It was killed.
        RuntimeError: The process that is forked has died; the next call begins another.
    """
    from helpers import FULL  # not as this file begins: as a program it has no `helpers`

    words, env, cwd = [str(word) for word in words], dict(os.environ if env is None else env), Path(cwd or ".")
    if anew or FULL or not cwd.is_dir() or not _can_be_a_fork(words, env):
        ends = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT if joined else subprocess.PIPE}
        return subprocess.run(words, cwd=cwd, env=env, input=input, encoding="utf-8", timeout=timeout, **ends)
    request = json.dumps({"words": words, "cwd": str(cwd.absolute()), "env": env}).encode()
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        given.write(input.encode())
        given.seek(0)
        files = [given.fileno(), said.fileno(), (said if joined else errors).fileno()]
        status = _server().run(request, files, timeout, words)
        texts = [file.seek(0) or io.TextIOWrapper(file, encoding="utf-8").read() for file in (said, errors)]
    return subprocess.CompletedProcess(words, status, texts[0], None if joined else texts[1])


def _can_be_a_fork(words: list[str], env: dict[str, str]) -> bool:
    """Say whether a command asks nothing of Python's start that the forked process has otherwise."""
    program, *options = words
    if program == sys.executable:
        options = options[len(QUIETLY) :] if options[: len(QUIETLY)] == QUIETLY else options
        known = options and (options[0] in ("-c", "-m") or not options[0].startswith("-"))
    else:
        known = Path(program).parent == Path(sys.executable).parent and not Path(program).name.startswith("python")
    return bool(known) and _read_at_start(env) == _read_at_start(os.environ)


def _read_at_start(env: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    return {
        name: value for name, value in env.items() if name.startswith(("PYTHON", "LC_", "LANG")) and name not in LATER
    }


@cache
def _server() -> _Server:
    return _Server()


class _Server:
    """The process that is forked, and the socket that tells it to."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.socket.setsockopt(socket.SOL_SOCKET, size, REQUEST)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with theirs:
            begun = [sys.executable, __file__, str(theirs.fileno())]
            self.process = subprocess.Popen(begun, pass_fds=[theirs.fileno()], env=env)
        atexit.register(self.close)

    def close(self) -> None:
        self.socket.close()
        self.process.wait()

    def run(self, request: bytes, files: list[int], timeout: float, words: list[str]) -> int:
        """Return a command's exit status, negative for a signal; it comes by a pipe of this command's own."""
        reading, writing = os.pipe()
        with open(reading, encoding="ascii") as answers:
            try:
                socket.send_fds(self.socket, [request], [*files, writing])
            except BrokenPipeError:
                raise _died() from None
            finally:
                os.close(writing)
            child = answers.readline()
            if not child:
                raise _died()
            try:
                if not select.select([answers], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(words, timeout)
                status = answers.readline()
            except BaseException:  # a test's own time may be over too
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(int(child), signal.SIGKILL)
                raise
            if not status:
                raise _died()
            return int(status)


def _died() -> RuntimeError:
    _server.cache_clear()
    return RuntimeError("the process whose forks are commands of tests has died")


def _serve(connection: socket.socket) -> dict | None:
    """Fork for each request; returns it in the fork, and None at the end."""
    while True:
        request, files, *_ = socket.recv_fds(connection, REQUEST, 4)
        if not request:
            return None
        *standard, writing = files
        child = os.fork()
        if not child:
            for file in (connection.detach(), writing):
                os.close(file)
            for number, file in enumerate(standard):
                os.dup2(file, number)
                os.close(file)
            return json.loads(request)
        for file in standard:
            os.close(file)
        with suppress(BrokenPipeError):  # whoever asked was interrupted, and has killed it
            os.write(writing, b"%d\n" % child)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(BrokenPipeError):
            os.write(writing, b"%d\n" % status)
        os.close(writing)


def _become(request: dict) -> None:
    """Be the process that was asked for, as far as Python lets itself be set after its start."""
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    tempfile.tempdir = None
    os.chdir(request["cwd"])
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(number, mode), "utf-8", errors, newline="\n", line_buffering=number == 2)
        for number, mode, errors in ((0, "rb", "strict"), (1, "wb", "strict"), (2, "wb", "backslashreplace"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    numpy, torch = sys.modules["numpy"], sys.modules["torch"]
    numpy.random.seed()
    torch.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    sys.path[:0] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    words = request["words"]
    if words[0] == sys.executable:
        words = words[1:]
    if words[: len(QUIETLY)] == QUIETLY:
        warnings.simplefilter("ignore")
        words = words[len(QUIETLY) :]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    match words:
        case ["-c", text, *rest]:
            sys.path.insert(0, "")
            sys.argv = ["-c", *rest]
            name = "<string>"
        case ["-m", module, *rest]:
            sys.path.insert(0, request["cwd"])
            sys.argv = ["-m", *rest]
            runpy._run_module_as_main(module)  # what Python itself calls: the module stays `__main__` to the end
            return
        case [script, *rest]:
            name = main.__file__ = os.path.abspath(script)
            sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
            sys.argv = [script, *rest]
            text = Path(name).read_bytes()
    exec(compile(text, name, "exec", dont_inherit=True), vars(main))


if __name__ == "__main__":
    del sys.path[0]  # of the folder that this file lies in
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        for library in LIBRARIES:
            importlib.import_module(library)
        gc.freeze()  # else a fork's end walks through all of it, page by page
        asked = _serve(channel)
    if asked is not None:
        _become(asked)
