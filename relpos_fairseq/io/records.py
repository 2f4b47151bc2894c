"""Remember which files each command wrote, so that a command replaces and removes what it wrote itself and no others.

A record is a line: who wrote a path, and size and SHA-256 of the file, or of each file of a folder.  It stands there
before the path has its name, so that a kill leaves nothing unknown.  Records of what a command writes into its own
folder lie in that folder, in `.stages/written`, and move with it; those of single files below
$XDG_STATE_HOME/relpos_fairseq/written (~/.local/state without it), or in their folder if that cannot be written.
"""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict

from relpos_fairseq.io.reading import parse_json

STAMPS = ".stages"  # a folder's own notes
RECORDS = "written"
SELF = ""  # a file's own name in its record
DEPTH = 6  # folders above a file that may have been written as one, or hold its record
KEPT = 500  # records that stay when there are many
MANY = 1_000_000  # bytes
PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # no link is followed, and no pipe waited for
LIBRARY = "relpos_fairseq"  # a program that calls this package: it names each output, and may replace any command's
_writer = LIBRARY  # whose writes are recorded
_homes: tuple[Path, ...] = ()  # the folders that it writes into, with all links followed
Description = Mapping[str, tuple[int, str]]  # size and SHA-256 by the name within a folder


class Record(TypedDict):
    """A line of a path's records."""

    by: str
    path: str  # from the folder that holds `.stages`; "" where the path's own records lie elsewhere
    files: dict[str, tuple[int, str]]


@contextmanager
def writing_as(command: str, homes: Iterable[Path] = ()) -> Iterator[None]:
    """Let a command, such as "relpos translate", be who writes in this process and the children that it forks.

    Args:
        command: its words.
        homes: the folders that it writes into.
    """
    global _writer, _homes
    before = _writer, _homes
    _writer, _homes = command, tuple(Path(os.path.realpath(home)) for home in homes)
    try:
        yield
    finally:
        _writer, _homes = before


def note(path: Path, files: Description) -> None:
    """Record that this command writes a path; nothing happens where no record may be kept.

    Args:
        path: the file or folder, with all links followed.
        files: size and SHA-256 of the file, under "", or of each file in the folder.

    Raises:
        OSError: the disk is full; without its record the file would be a stranger's to the next run.
    """
    full = None
    home = next((home for home in _homes if home in path.parents), None)
    for base in (home, None) if home else (None, path.parent):
        try:
            name = SELF if base is None else path.relative_to(base).as_posix()
            records = _state_of(path) if base is None else base / STAMPS / RECORDS
            _append(records, {"by": _writer, "path": name, "files": dict(files)})
            return
        except (OSError, RuntimeError) as error:
            full = error if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) else None
    if full is not None:
        raise full


def _append(file: Path, record: Record) -> None:
    """Add a line to a file of records.

    Raises:
        OSError: there is something else in its place, which stays as it is, or it cannot be written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    if (known := _content(file)) and not known.startswith((b"{", b"\n{")):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(file))
    if len(known) > MANY:
        shorter = file.with_name(f"{file.name}.{os.getpid()}")
        shorter.write_bytes(b"".join(known.splitlines(True)[-KEPT:]))
        os.replace(shorter, file)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | PLAIN, 0o600)
    try:
        line = f"\n{json.dumps(record)}\n".encode()  # after what a full disk may have cut
        if os.write(descriptor, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
    finally:
        os.close(descriptor)


def writers_of(path: Path, described: tuple[int, str]) -> set[str]:
    """Return the commands that are known to have written a file as it is: its size and SHA-256 are `described`."""
    found = set()
    for place in (path, *path.parents[:DEPTH]):
        name = path.relative_to(place).as_posix() if place != path else SELF
        with suppress(OSError, RuntimeError):
            found |= {one["by"] for one in _read(_state_of(place)) if tuple(one["files"].get(name, ())) == described}
        for one in _read(place / STAMPS / RECORDS) if place != path else ():
            inner = name.removeprefix(f"{one['path']}/") if name != one["path"] else SELF
            if inner != name and tuple(one["files"].get(inner, ())) == described:
                found.add(one["by"])
    return found


def is_ours(path: Path, described: tuple[int, str]) -> bool:
    """Return whether this command wrote a file, and it is unchanged."""
    found = writers_of(path, described)
    return _writer in found or (_writer == LIBRARY and bool(found))


def _state_of(path: Path) -> Path:
    """Return the file of a path's records outside of its folder."""
    named = os.environ.get("XDG_STATE_HOME")
    state = Path(named) if named and os.path.isabs(named) else Path.home() / ".local" / "state"
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()
    return state / "relpos_fairseq" / RECORDS / digest[:2] / digest[2:32]


def _read(file: Path) -> Iterator[Record]:
    """Yield the records of a file; a line that was cut by a kill, or is none, is left out."""
    content = b""
    with suppress(OSError):
        content = _content(file)
    for line in content.split(b"\n"):
        with suppress(ValueError, RecursionError):
            yield parse_json(line, Record)


def _content(file: Path) -> bytes:
    """Return the bytes of a file of records, none where it is not there.

    Raises:
        OSError: it, or the folder of notes that it lies in, is a link, or it is no regular file.
    """
    if file.parent.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(file.parent))
    try:
        descriptor = os.open(file, os.O_RDONLY | PLAIN)
    except FileNotFoundError:
        return b""
    with os.fdopen(descriptor, "rb") as opened:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(file))
        return opened.read()
