"""Processes of their own that begin with what nearly every one of them imports: forks of one that did nothing else.

A fairseq command takes four seconds to begin, three of them for other libraries.  What differs from a process that
was begun anew: these libraries and what they import are there first, strings hash alike in all forks of a server,
umask, limits and ignored signals are the server's, `run` takes output by a file and not a pipe, whose last holder would
be waited for, and `ps` shows another command line.  Commands that are about any of this are begun anew, as is what
Python reads at its start (options, PYTHON* and the locale), and with RELPOS_ONNX=full all.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import io
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from pathlib import Path
from typing import Any

LIBRARIES = {
    "": "torch scipy.stats sklearn.metrics hydra omegaconf torch.utils.data",
    "fairseq": "torch._dynamo fairseq",
}
REQUEST, FILES = 1 << 22, 16  # bytes and descriptors at most
# Variables that are read at a process's start, and those of them that a fork heeds; the same of Python's options.
AT_START = ("PYTHON", "LC_", "LANG", "LD_", "GLIBC_", "ATEN_", "OMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_")
LATER = """
    PYTHONPATH PYTHONFAULTHANDLER PYTHONUNBUFFERED PYTHONUTF8 OMP_NUM_THREADS MKL_NUM_THREADS
""".split()
OPTIONS = {"-W": ["-W", "ignore"], "-u": ["-u"]}
GIVEN = """
    stdin stdout stderr text encoding errors bufsize shell cwd env pass_fds start_new_session
""".split()  # of Popen's arguments


class Popen(subprocess.Popen):
    """`subprocess.Popen` of a program in Python, which begins as a fork where it can.

    Args:
        words: this Python or a program in Python of its environment, and its arguments.
        anew: begin it by `subprocess` after all.
        fairseq: whether fairseq is there first too, as it is for fairseq's programs.
        given: as `subprocess.Popen`.

    Raises:
        RuntimeError: The process that is forked has died; the next call begins another.
    """

    def __init__(self, words: list[str | Path], *, anew: bool = False, fairseq: bool = False, **given: Any) -> None:
        from helpers import FULL  # not as this file begins: as a program it has no `helpers`

        words = words if isinstance(words, str) else [str(word) for word in words]
        env = dict(given.get("env") or os.environ)
        there = Path(given.get("cwd") or ".")
        self._answers: _Answers | None = None
        can = (
            given.keys() <= set(GIVEN)
            and not given.get("shell")
            and isinstance(words, list)
            and _can_be_a_fork(words, env, there)
        )
        few = len(given.get("pass_fds", ())) <= FILES - 4 and len(json.dumps([words, env])) < REQUEST >> 2
        self._anew = anew or FULL or not can or not few
        of_fairseq = Path(words[0]).name.startswith("fairseq-") or words[2:3] and words[2].startswith("fairseq_cli.")
        self._kind = "fairseq" if fairseq or of_fairseq else ""
        self._owner = os.getpid()
        self._session = given.get("start_new_session", False)
        super().__init__(words, **given)

    def _execute_child(self, words, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more) -> None:
        if self._anew or not Path(cwd or ".").is_dir():
            return super()._execute_child(words, executable, preexec_fn, close_fds, pass_fds, cwd, env, *more)
        ends = more[3:9]  # of the child and of this process by turns, then of the child's errors
        files = [own if one == -1 else one for own, one in zip((0, 1, 2), (ends[0], ends[3], ends[5]), strict=True)]
        asked = {"words": words, "cwd": os.path.abspath(cwd or "."), "files": [0, 1, 2, *pass_fds]}
        asked |= {"env": dict(os.environ if env is None else env), "session": self._session}
        try:
            self._answers = _server(self._kind).begin(json.dumps(asked).encode(), [*files, *pass_fds])
            try:
                self.pid = self._answers.read()
            except BaseException:  # a test's own time may be over, and the command has begun
                if pid := self._answers.read():
                    os.kill(pid, signal.SIGKILL)
                raise
        finally:
            self._close_pipe_fds(*ends)
        if not self.pid:
            raise _died()
        self._child_created = True

    def _wait(self, timeout: float | None) -> int:
        """Wait for the answer, where `subprocess` would ask for it again and again."""
        if self._answers is not None and self.returncode is None and timeout is not None and os.getpid() == self._owner:
            if not self._answers.ready(timeout):
                raise subprocess.TimeoutExpired(self.args, timeout)
        return super()._wait(timeout)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._answers is None:
            return super()._try_wait(wait_flags)
        if os.getpid() != self._owner:  # in a fork of this process it is no child
            return self.pid, 0
        if wait_flags & os.WNOHANG and not self._answers.ready():
            return 0, 0
        status = self._answers.read()
        if status is None:
            self.returncode = -signal.SIGKILL
            with suppress(ProcessLookupError):  # it may have outlived what waited for it
                os.kill(self.pid, signal.SIGKILL)
            raise _died()
        return self.pid, status

    def _internal_poll(self, _deadstate: int | None = None, **more: Any) -> int | None:
        if self._answers is None:
            return super()._internal_poll(_deadstate, **more)
        if self.returncode is None and os.getpid() != self._owner:  # in a fork of this process it is no child
            self.returncode = _deadstate or 0
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                with suppress(RuntimeError) if _deadstate else nullcontext():  # of `subprocess` itself, which asks all
                    pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                    if pid:
                        self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(
    words: list[str | Path],
    *,
    cwd: str | Path | None = None,
    env: dict[str, str] | None = None,
    input: str = "",
    joined: bool = False,
    anew: bool = False,
    fairseq: bool = False,
    timeout: float = 300,
) -> subprocess.CompletedProcess[str]:
    """Run a Python program as `subprocess.run` does with its output captured as UTF-8.

    Args:
        words: as `Popen`.
        cwd: working directory.
        env: environment; None: this process's.
        input: what it reads.
        joined: whether errors are part of the output.
        anew: as `Popen`.
        fairseq: as `Popen`.
        timeout: seconds after which it is killed.

    Raises:
        subprocess.TimeoutExpired: It was killed.
        RuntimeError: The process that is forked has died; the next call begins another.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        given.write(input.encode())
        given.seek(0)
        ends = {"stdin": given, "stdout": said, "stderr": subprocess.STDOUT if joined else errors}
        process = Popen(words, cwd=cwd, env=env, anew=anew, fairseq=fairseq, **ends)
        try:
            status = process.wait(timeout)
        except BaseException:  # a test's own time may be over too
            process.kill()
            process.wait()
            raise
        texts = [file.seek(0) or io.TextIOWrapper(file, encoding="utf-8").read() for file in (said, errors)]
    return subprocess.CompletedProcess(words, status, texts[0], None if joined else texts[1])


PROGRAM = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as door:
    door.connect({door!r})
    asked = json.dumps([{name!r}, sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(door, [b"%d " % len(asked)], [0, 1, 2])
    door.sendall(asked)
    os._exit(int(door.recv(9)))
"""


@contextmanager
def programs(folder: Path, given: dict[str, list[str | Path]]) -> Iterator[None]:
    """Write programs that a shell may run meanwhile: a name to the words that it stands for, which begin as `Popen`.

    They have the shell's input, output and errors; signals, limits and other files do not reach them.
    """
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(b"\0" + f"relpos {os.getpid()} {folder}".encode()[:99])
        door.listen()
        for name in given:
            text = PROGRAM.format(python=sys.executable, door=door.getsockname(), name=name)
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        threading.Thread(target=_let_in, args=(door, given), daemon=True).start()
        yield
        door.shutdown(socket.SHUT_RDWR)


def _let_in(door: socket.socket, given: dict[str, list[str | Path]]) -> None:
    with suppress(OSError):  # nobody asks any more
        while True:
            threading.Thread(target=_stand_for, args=(door.accept()[0], given), daemon=True).start()


def _stand_for(asking: socket.socket, given: dict[str, list[str | Path]]) -> None:
    """Run what a program asks for with its own files, and tell it the status that a shell knows."""
    with asking, asking.makefile("rb") as asked:
        said, files, *_ = socket.recv_fds(asking, 99, 3)
        size, _, begun = said.partition(b" ")
        name, words, cwd, env = json.loads(begun + asked.read(int(size) - len(begun)))
        ends = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
        process = Popen([*given[name], *words], cwd=cwd, env=env, fairseq=name.startswith("fairseq-"), **ends)
        for file in files:
            os.close(file)
        status = process.wait()
        asking.send(b"%d" % (status if status >= 0 else 128 - status))


def _can_be_a_fork(words: list[str], env: dict[str, str], cwd: Path) -> bool:
    """Say whether a command asks nothing of Python's start that the forked process has otherwise."""
    program, *options = words
    if program == sys.executable:
        _, options = _split(options)
        known = options and (options[0] in ("-c", "-m") or (cwd / options[0]).is_file())
    else:
        ours = Path(program).parent == Path(sys.executable).parent and Path(program).is_file()
        known = ours and not Path(program).name.startswith("python")
    return bool(known) and _read_at_start(env) == _read_at_start(os.environ)


def _read_at_start(env: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(AT_START) and name not in LATER}


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Part the options of Python that a fork heeds, by their names, from what follows them."""
    found = []
    while words and words[: len(known := OPTIONS.get(words[0], [""]))] == known:
        found.append(words[0])
        words = words[len(known) :]
    return found, words


_begun = threading.RLock()  # the server that has more is begun by the one that has less


def _server(kind: str) -> _Server:
    with _begun:
        return _kept_server(kind)


@cache
def _kept_server(kind: str) -> _Server:
    return _Server(kind)


class _Server:
    """The process that is forked, and the socket that tells it to."""

    def __init__(self, kind: str) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for size in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            self.socket.setsockopt(socket.SOL_SOCKET, size, REQUEST)
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with theirs:
            begun = [sys.executable, __file__, str(theirs.fileno()), *LIBRARIES[kind].split()]
            # What has more there first is itself a fork of what has less.
            self.process = Popen(begun, pass_fds=[theirs.fileno()], env=env, anew=not kind)
        atexit.register(self.close)

    def close(self) -> None:
        self.socket.close()
        with suppress(RuntimeError):  # the one whose fork it is has died
            self.process.wait()

    def begin(self, request: bytes, files: list[int]) -> _Answers:
        """Begin a command; a pipe of its own says its number, and how it ended."""
        reading, writing = os.pipe()
        answers = _Answers(reading)
        try:
            socket.send_fds(self.socket, [request], [writing, *files])
        except BrokenPipeError:
            raise _died() from None
        finally:
            os.close(writing)
        return answers


class _Answers:
    """The end of a pipe by which numbers come, a line each; it is closed with the last reference to it."""

    def __init__(self, number: int) -> None:
        self.number, self.said = number, b""

    def __del__(self, close=os.close) -> None:  # `os` may be gone as Python ends
        close(self.number)

    def ready(self, seconds: float = 0.0) -> bool:
        """Say whether the next number, or the end, comes within some seconds."""
        end = select.poll()
        end.register(self.number, select.POLLIN)
        return b"\n" in self.said or bool(end.poll(1000 * seconds))

    def read(self) -> int | None:
        """Wait for the next number; None: nothing comes any more."""
        while b"\n" not in self.said:
            if not (more := os.read(self.number, 99)):
                return None
            self.said += more
        line, _, self.said = self.said.partition(b"\n")
        return int(line)


def _died() -> RuntimeError:
    _kept_server.cache_clear()
    return RuntimeError("the process whose forks are commands of tests has died")


def _serve(connection: socket.socket) -> dict | None:
    """Fork for each request; returns it in the fork, and None at the end."""
    waiting: list[int] = []  # processes that wait for a command each
    while True:
        request, files, *_ = socket.recv_fds(connection, REQUEST, FILES)
        if not request:
            return None
        waiting = [one for one in waiting if not os.waitpid(one, os.WNOHANG)[0]]
        begun = os.fork()
        if not begun:
            writing, *files = files
            connection.close()
            child = os.fork()
            if not child:
                os.close(writing)
                asked = json.loads(request)
                if asked["session"]:
                    os.setsid()
                _place(files, asked["files"])
                return asked
            os.closerange(0, writing)
            os.closerange(writing + 1, max(files) + 1)
            with suppress(BrokenPipeError):  # whoever asked was interrupted, and has killed it
                os.write(writing, b"%d\n" % child)
                os.write(writing, b"%d\n" % os.waitpid(child, 0)[1])
            os._exit(0)
        waiting.append(begun)
        for file in files:
            os.close(file)


def _place(files: list[int], numbers: list[int]) -> None:
    """Give descriptors the numbers that a command knows them by."""
    above = max(*files, *numbers) + 1
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(moved, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _become(request: dict) -> None:
    """Be the process that was asked for, as far as Python lets itself be set after its start."""
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    tempfile.tempdir = None
    os.chdir(request["cwd"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell began the suite in the background
    options, words = [], request["words"]
    if words[0] == sys.executable:
        options, words = _split(words[1:])
    at_once = "-u" in options or bool(os.environ.get("PYTHONUNBUFFERED"))
    as_bytes = sys.__stdout__.errors  # how the locale has them where they are no UTF-8
    sys.stdin = io.TextIOWrapper(open(0, "rb", closefd=False), "utf-8", as_bytes, newline="\n")
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            open(number, "wb", buffering=0 if at_once else -1, closefd=False),  # a fork of this fork has its own
            "utf-8",
            errors,
            newline="\n",
            line_buffering=number == 2,
            write_through=at_once,
        )
        for number, errors in ((1, as_bytes), (2, "backslashreplace"))
    )
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    if "PYTHONFAULTHANDLER" in os.environ:
        faulthandler.enable()
    numpy, torch = sys.modules["numpy"], sys.modules["torch"]
    numpy.random.seed()
    torch.seed()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    sys.path[:0] = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if "-W" in options:
        warnings.simplefilter("ignore")
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


def _end(status: int) -> None:
    """End as Python does, but for taking apart what is loaded: that is most of a short command's time.

    What is left open is flushed, and not finished as an archive would be by its destructor.  Where threads go on, which
    may have what is taken apart, Python is left to it.
    """
    if any(thread.daemon for thread in threading.enumerate()):
        return
    threading._shutdown()
    atexit._run_exitfuncs()
    for part in gc.get_objects():
        if issubclass(type(part), io.IOBase) and part not in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                part.flush()
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)
    os._exit(status & 0xFF)


if __name__ == "__main__":
    del sys.path[0]  # of the folder that this file lies in
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        for library in sys.argv[2:]:
            importlib.import_module(library)
        logging.root.handlers.clear()  # a task of fairseq's sets up what a command of its own would have before
        logging.root.setLevel(logging.WARNING)
        gc.freeze()  # else a fork's end walks through all of it, page by page
        asked = _serve(channel)
    if asked is not None:
        status = 0
        try:
            _become(asked)
        except KeyboardInterrupt:  # ends by the signal
            raise
        except SystemExit as ended:
            status = 0 if ended.code is None else ended.code
            if not isinstance(status, int):
                print(status, file=sys.stderr)
                status = 1
        except BaseException as error:
            trace, status = error.__traceback__, 1
            while trace.tb_next and trace.tb_frame.f_code.co_filename == __file__:
                trace = trace.tb_next
            sys.excepthook(type(error), error.with_traceback(trace), trace)
        _end(status)
        sys.exit(status)
