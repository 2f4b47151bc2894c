"""Programs in Python of processes of their own, which begin as forks of one that has other libraries imported.

A fairseq command takes four seconds to begin, three of them for other libraries.  `multiprocessing`'s fork server
imports these once.  What asks for anything of Python's start (options, PYTHON*, the locale) is begun anew, as is what
a test talks to while it runs (`subprocess.Popen`), and with RELPOS_ONNX=full all.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from helpers import FULL

LIBRARIES = "torch scipy.stats sklearn.metrics hydra omegaconf torch.utils.data torch._dynamo".split()
# Variables that are read at a process's start, and those of them that a fork heeds.
AT_START = ("PYTHON", "LC_", "LANG", "LD_", "GLIBC_", "ATEN_", "OMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_")
LATER = {"PYTHONPATH", "PYTHONFAULTHANDLER", "PYTHONUNBUFFERED", "PYTHONUTF8", "OMP_NUM_THREADS", "MKL_NUM_THREADS"}
_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(LIBRARIES)


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
    """Run a program in Python as `subprocess.run` does with its output captured as UTF-8.

    Args:
        words: this Python or a program of its environment, and its arguments.
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
    as_python = words[1:] if words[0] == sys.executable else words
    plain = as_python[0] in ("-c", "-m") or not as_python[0].startswith("-")
    if anew or not plain or _at_start(env) != _at_start(os.environ):
        errors = subprocess.STDOUT if joined else subprocess.PIPE
        ends = {"stdout": subprocess.PIPE, "stderr": errors, "encoding": "utf-8"}
        return subprocess.run(words, cwd=cwd, env=env, input=input, timeout=timeout, **ends)
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / name for name in ("input", "output", "output" if joined else "errors")]
        for file in files[1:]:
            file.touch()
        files[0].write_text(input, encoding="utf-8", newline="")
        process = _forks.Process(target=_become, args=(as_python, os.path.abspath(cwd or "."), env, files))
        process.start()
        try:
            process.join(timeout)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(words, timeout)
        finally:
            process.kill()
        said, wrong = (file.read_bytes().decode() for file in files[1:])
    return subprocess.CompletedProcess(words, process.exitcode, said, None if joined else wrong)


def _at_start(env: os._Environ[str] | dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(AT_START) and name not in LATER}


def _recorded(env: dict[str, str]) -> AbstractContextManager[None]:
    """What records, in a run of the suite that does, what the program executes."""
    if "RELPOS_REACH" not in env:
        return nullcontext()
    from reach import recorded

    return recorded(env.get("PYTEST_CURRENT_TEST", "").rpartition(" (")[0])


def _become(words: list[str], cwd: str, env: dict[str, str], files: list[Path]) -> None:
    """Be the program, as far as Python lets itself be set after its start."""
    import torch

    for number, (file, how) in enumerate(zip(files, (os.O_RDONLY, os.O_WRONLY, os.O_WRONLY), strict=True)):
        os.dup2(os.open(file, how | (os.O_APPEND if number else 0)), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors=sys.stdout.errors, closefd=False)
    sys.stderr = open(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    torch.set_num_threads(int(env.get("OMP_NUM_THREADS") or torch.get_num_threads()))
    tempfile.tempdir = None
    path = [part for part in env.get("PYTHONPATH", "").split(os.pathsep) if part]
    kind = words.pop(0) if words[0] in ("-c", "-m") else ""
    sys.argv = [kind or words[0], *words[1:]]
    sys.path[:0] = ["" if kind else str(Path(words[0]).resolve().parent), *path]
    try:
        with _recorded(env):
            if kind == "-m":
                runpy.run_module(words[0], run_name="__main__", alter_sys=True)
            elif kind:
                exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
            else:
                runpy.run_path(words[0], run_name="__main__")
    except Exception:
        sys.stdout.flush()  # as Python itself does
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
