"""Find the cache folders of this machine, for compiled kernels and for verdicts on its GPUs."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def folders() -> Iterator[Path]:
    """Yield the folders where files may be kept, best first: RELPOS_CACHE, XDG_CACHE_HOME, the user's home."""
    for variable, inner in (("RELPOS_CACHE", ""), ("XDG_CACHE_HOME", "relpos_fairseq")):
        if os.environ.get(variable):
            yield Path(os.environ[variable]).absolute() / inner
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield Path.home() / ".cache" / "relpos_fairseq"


def writable_folder() -> Path:
    """Return the first of `folders` that is writable, or else a temporary folder of this process."""
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
    """Let one process at a time run the block, by a lock beside `path`; without a lock where files cannot be locked."""
    import fcntl  # Windows lacks it

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the lock file of another user, in a folder that several share
            file = stack.enter_context(open(path.with_suffix(".lock"), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
