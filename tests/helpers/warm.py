"""Processes of their own that begin with what nearly every one of them imports: forks of one that did nothing else.

A fairseq command takes four seconds to begin, three of them for other libraries.  What differs from a process that
was begun anew: these libraries are there first, and `ps` shows another command line.  Commands that are about either
are begun by `subprocess`, and with RELPOS_ONNX=full all are.
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
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
import warnings
from functools import cache
from pathlib import Path

FULL = os.environ.get("RELPOS_ONNX") == "full"
LIBRARIES = "torch scipy.stats sklearn.metrics hydra omegaconf sacrebleu.metrics torch.utils.data".split()
REQUEST = 1 << 22  # bytes


def run(
    words: list[str | Path],
    *,
    cwd: str | Path | None = None,
    env: dict[str, str] | None = None,
    input: str = "",
    joined: bool = False,
    anew: bool = FULL,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program as `subprocess.run` does with its output captured as UTF-8.

    Args:
        words: this Python or another program of its environment that is one, and its arguments.
        cwd: working directory.
        env: environment; None: this process's.
        input: what it reads.
        joined: whether errors are part of the output.
        anew: begin it by `subprocess` after all.
        timeout: seconds after which it is killed.

    Raises:
        subprocess.TimeoutExpired: It was killed.
    """
    words, env = [str(word) for word in words], dict(os.environ if env is None else env)
    if anew:
        ends = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT if joined else subprocess.PIPE}
        return subprocess.run(words, cwd=cwd, env=env, input=input, encoding="utf-8", timeout=timeout, **ends)
    request = json.dumps({"words": words, "cwd": str(cwd or Path.cwd()), "env": env}).encode()
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        given.write(input.encode())
        given.seek(0)
        files = [given.fileno(), said.fileno(), (said if joined else errors).fileno()]
        status = _server().run(request, files, timeout, words)
        texts = [file.seek(0) or file.read().decode() for file in (said, errors)]
    return subprocess.CompletedProcess(words, status, texts[0], None if joined else texts[1])


@cache
def _server() -> _Server:
    return _Server()


class _Server:
    """The process that is forked, and the socket that tells it to."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.socket.setsockopt(socket.SOL_SOCKET, size, REQUEST)
        with theirs:
            begun = [sys.executable, __file__, str(theirs.fileno())]
            self.process = subprocess.Popen(begun, pass_fds=[theirs.fileno()], env=_plain())
        atexit.register(self.close)

    def close(self) -> None:
        self.socket.close()
        self.process.wait()

    def run(self, request: bytes, files: list[int], timeout: float, words: list[str]) -> int:
        """Return a command's exit status, negative for a signal."""
        socket.send_fds(self.socket, [request], files)
        child = int(self.socket.recv(64))
        self.socket.settimeout(timeout)
        try:
            return int(self.socket.recv(64))
        except TimeoutError:
            os.kill(child, signal.SIGKILL)
            self.socket.settimeout(None)
            self.socket.recv(64)
            raise subprocess.TimeoutExpired(words, timeout) from None
        finally:
            self.socket.settimeout(None)


def _plain() -> dict[str, str]:
    """This process's environment without what is for Python's own start."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}


def _serve(connection: socket.socket) -> dict | None:
    """Fork for each request; returns it in the fork, and None at the end."""
    while True:
        request, files, *_ = socket.recv_fds(connection, REQUEST, 3)
        if not request:
            return None
        child = os.fork()
        if not child:
            connection.close()
            for standard, file in enumerate(files):
                os.dup2(file, standard)
                os.close(file)
            return json.loads(request)
        for file in files:
            os.close(file)
        connection.send(str(child).encode())
        connection.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())


def _become(request: dict) -> None:
    """Be the process that was asked for, as far as Python lets itself be set after its start."""
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    os.chdir(request["cwd"])
    sys.stdin, sys.stdout, sys.stderr = (
        io.TextIOWrapper(open(number, mode), encoding="utf-8", errors=errors, line_buffering=number == 2)
        for number, mode, errors in ((0, "rb", "strict"), (1, "wb", "strict"), (2, "wb", "backslashreplace"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    sys.path[:0] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    words = request["words"]
    if Path(words[0]).name.startswith("python"):
        words = words[1:]
    while words[0] in ("-u", "-W"):
        if words.pop(0) == "-W":
            warnings.simplefilter(words.pop(0))
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    match words:
        case ["-c", code, *rest]:
            sys.path.insert(0, "")
            sys.argv = ["-c", *rest]
            exec(compile(code, "<string>", "exec"), vars(main))
        case ["-m", module, *rest]:
            sys.path.insert(0, request["cwd"])
            sys.argv = [module, *rest]
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *rest]:
            sys.path.insert(0, str(Path(script).parent))
            sys.argv = [script, *rest]
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    del sys.path[0]  # of the folder that this file lies in
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        for library in LIBRARIES:
            importlib.import_module(library)
        gc.freeze()  # else a fork's end walks through all of it, page by page
        asked = _serve(channel)
    if asked is not None:
        _become(asked)
