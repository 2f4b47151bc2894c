"""Folders for what is found out once for a machine: compiled kernels, verdicts on GPUs."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def folders() -> Iterator[Path]:
    """Where files are kept, best first: RELPOS_CACHE, XDG_CACHE_HOME, the user's home."""
    for variable, inner in (("RELPOS_CACHE", ""), ("XDG_CACHE_HOME", "relpos_fairseq")):
        if os.environ.get(variable):
            yield Path(os.environ[variable]).absolute() / inner
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield Path.home() / ".cache" / "relpos_fairseq"


def writable_folder() -> Path:
    """The first of them that takes files, or one of this process alone."""
    for folder in folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
    private = Path(tempfile.mkdtemp(prefix="relpos_fairseq-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return private


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """One process at a time; where files cannot be locked, each for itself."""
    import fcntl  # which Windows has not

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # another user's lock in a folder of several
            file = stack.enter_context(open(path.with_suffix(".lock"), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
