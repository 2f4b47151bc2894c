"""Find and lock the cache folder, which holds compiled kernels and the results of self-tests on GPUs."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
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
    """Return the first of `folders` that this user alone may write to, or else a temporary one, deleted at exit."""
    for folder in folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK | os.X_OK) and is_private(folder):
                return folder
    private = Path(tempfile.mkdtemp(prefix="relpos_fairseq-"))
    atexit.register(shutil.rmtree, private, ignore_errors=True)
    return private


def is_private(path: Path) -> bool:
    """Return whether nobody but this user and root can change a file or folder, or put another in its place."""
    absolute, resolved = path.absolute(), path.resolve()
    return all(_is_ours(part) for part in {resolved, *resolved.parents, *absolute.parents})


def _is_ours(path: Path) -> bool:
    """Return whether this user or root owns a path, and others can neither write to it nor rename what is in it."""
    try:
        status = path.stat()
    except OSError:
        return False
    if status.st_uid not in (0, os.geteuid()):
        return False
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX  # as /tmp: owners alone rename
    open_to_group = status.st_mode & stat.S_IWGRP and not _is_own_group(status.st_gid)
    return bool(is_sticky) or not (status.st_mode & stat.S_IWOTH or open_to_group)


def _is_own_group(group: int) -> bool:
    """Return whether a group has this user alone, as many systems give each user one under the user's name."""
    import grp  # Windows lacks both
    import pwd

    try:
        user, entry = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return entry.gr_name == user and set(entry.gr_mem) <= {user}


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on the file `path` with the suffix `.lock` while the `with` block runs.

    Where that file cannot be opened or locked, the block runs without a lock.
    """
    from filelock import FileLock

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # the lock file of another user, in a folder that several share
            stack.enter_context(FileLock(path.with_suffix(".lock"), mode=0o600, fallback_to_soft=False))
        yield
