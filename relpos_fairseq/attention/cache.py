"""Find and lock the cache folder, which holds compiled kernels and the results of self-tests on GPUs."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path


def folders() -> Iterator[Path]:
    """Yield the cache folders to try, best first, whether they exist or not.

    These are $RELPOS_CACHE, $XDG_CACHE_HOME/relpos_fairseq and ~/.cache/relpos_fairseq.
    """
    for variable, inner in (("RELPOS_CACHE", ""), ("XDG_CACHE_HOME", "relpos_fairseq")):
        if os.environ.get(variable):
            yield Path(os.environ[variable]).absolute() / inner
    with contextlib.suppress(RuntimeError):  # the user has no home folder
        yield Path.home() / ".cache" / "relpos_fairseq"


def writable_folder() -> Path:
    """Return the first of `folders` that can be made and written to, or else a temporary one, deleted at exit."""
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
    """Hold an exclusive lock on the file `path` with the suffix `.lock` while the `with` block runs.

    Where that file cannot be opened or locked, the block runs without a lock.
    """
    import fcntl  # Windows lacks it

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # say, another user's lock file in a shared folder
            file = stack.enter_context(open(path.with_suffix(".lock"), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
