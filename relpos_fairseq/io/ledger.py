"""Remember which files each command wrote, so that a command replaces and removes what it wrote itself and no others.

A record is a line in a file for each path below $XDG_STATE_HOME/relpos_fairseq/written (~/.local/state without it):
who wrote, and size and SHA-256 of the file, or of each file of a folder.  It stands there before the path has its name,
so that a kill leaves nothing unknown.  Where records are lost, what differs from a new result is refused, never lost.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypedDict

from relpos_fairseq.io.reading import parse_json

SELF = ""  # a file's own name in its record
DEPTH = 4  # folders above a file that may have been written as one
KEPT = 20  # records of a path that stay when there are many
MANY = 100_000  # bytes
LIBRARY = "relpos_fairseq"  # a program that calls this package: it names each output, and may replace any command's
_writer = LIBRARY  # whose writes are recorded
Description = Mapping[str, tuple[int, str]]  # size and SHA-256 by the name within a folder


class Record(TypedDict):
    """A line of a path's records."""

    by: str
    files: dict[str, tuple[int, str]]


@contextmanager
def writing_as(command: str) -> Iterator[None]:
    """Let a command, such as "relpos translate", be who writes in this process and the children that it forks."""
    global _writer
    before, _writer = _writer, command
    try:
        yield
    finally:
        _writer = before


def note(path: Path, files: Description) -> None:
    """Record that this command writes a path; nothing happens where records cannot be kept.

    Args:
        path: the file or folder, with all links followed.
        files: size and SHA-256 of the file, under "", or of each file in the folder.
    """
    line = json.dumps({"by": _writer, "files": files}) + "\n"
    with suppress(OSError, RuntimeError):
        file = _record_of(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists() and file.stat().st_size > MANY:
            _shorten(file)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def writers_of(path: Path, described: tuple[int, str]) -> set[str]:
    """Return the commands that are known to have written a file as it is: its size and SHA-256 are `described`."""
    found = set()
    for place in (path, *path.parents[:DEPTH]):
        name = path.relative_to(place).as_posix() if place != path else SELF
        found |= {by for by, files in _read(place) if tuple(files.get(name, ())) == described}
    return found


def is_ours(path: Path, described: tuple[int, str]) -> bool:
    """Return whether this command wrote a file, and it is unchanged."""
    found = writers_of(path, described)
    return _writer in found or (_writer == LIBRARY and bool(found))


def _record_of(path: Path) -> Path:
    """Return the file of a path's records."""
    named = os.environ.get("XDG_STATE_HOME")
    state = Path(named) if named and os.path.isabs(named) else Path.home() / ".local" / "state"
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()
    return state / "relpos_fairseq" / "written" / digest[:2] / digest[2:32]


def _read(path: Path) -> Iterator[tuple[str, dict]]:
    """Yield the records of a path: the writer and the files; a line that was cut by a kill is left out."""
    lines: Iterable[str] = ()
    with suppress(OSError, RuntimeError, UnicodeDecodeError):
        lines = _record_of(path).read_text(encoding="utf-8").splitlines()
    for line in lines:
        with suppress(ValueError, RecursionError):
            found = parse_json(line, Record)
            yield found["by"], found["files"]


def _shorten(file: Path) -> None:
    """Keep the last records of a path."""
    lines = file.read_bytes().splitlines(True)[-KEPT:]
    shorter = file.with_name(f"{file.name}.{os.getpid()}")
    shorter.write_bytes(b"".join(lines))
    os.replace(shorter, file)
