"""Write files and folders whole or not at all, hash them, lock them, and check the room on their disk."""

import errno
import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import platform
import re
import shutil
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from relpos_fairseq.io import records
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.reading import ordinary
from relpos_fairseq.io.records import STAMPS as STAMPS

TEMPORARY = ".partial-"  # in front, so that the suffix still tells the file's kind
# A temporary name: the machine, the process, when the process began, a number within it; then the name it is for.
_OWNED = re.compile(re.escape(TEMPORARY) + r"(?P<host>[0-9a-f]{8})\.(?P<process>\d+)\.(?P<start>\d+)\.\d+-")
_NUMBERS = itertools.count()
BLOCK = 1 << 20
TICK = 20_000_000  # ns; file systems' clocks advance every 10 ms or oftener


@contextmanager
def atomic_path(path: str | Path, renews: bool = False) -> Iterator[Path]:
    """Yield a temporary path beside `path`; if the `with` block succeeds, rename that file to `path`.

    After a failure the temporary file is removed and `path` is as it was. What killed processes left beside it goes;
    of two processes that write the same path, the one that ends later wins. Of a link its target is written, and of a
    device or pipe the path itself is yielded.

    Args:
        path: the file.
        renews: whether the caller has read what is there and writes it with a change, so that nothing is lost.

    Raises:
        UserError: `path` is a folder, or a file that another has written, or changed since: see `replace`.
        OSError: With `filename` set where the disk is full, so that the error can say which.
    """
    if is_stream(path):
        yield Path(path)
        return
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise UserError(f"{path} is a folder, and a file would take its place: name another")
    with _taking_place(path, renews) as temporary:
        yield temporary


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty temporary folder; if the `with` block succeeds, it replaces `path`.

    The temporary name is unique to this process: a child that outlives a killed parent writes
    into a folder that nobody reads. What killed processes left beside it goes.

    Raises:
        UserError: `path` is a folder that holds a file of others, and stays as it was: see `replace`.
    """
    with _taking_place(Path(os.path.realpath(path))) as temporary:
        temporary.mkdir()
        yield temporary


@contextmanager
def _taking_place(path: Path, renews: bool = False) -> Iterator[Path]:
    """Yield a temporary path; if the `with` block succeeds, what is there then replaces `path`, else it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)
    temporary = temporary_path(path)
    try:
        with named_on_disk_full(path):
            yield temporary
            for file in files_below(temporary) if temporary.is_dir() else [temporary]:
                sync(file)
            replace(temporary, path, renews)
    except BaseException:
        _remove_quietly(temporary)
        raise
    sync(path.parent)


def is_stream(path: str | Path) -> bool:
    """Tell whether a path is a device, a pipe or a descriptor (/dev/stdout), which is written to as it is."""
    if str(path).startswith(("/dev/", "/proc/")):
        return os.path.exists(path)
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


@contextmanager
def named_on_disk_full(path: Path) -> Iterator[None]:
    """Add the name of the file that is being written to an OSError that names none."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None:
            error.filename = str(path)
        raise
    except RuntimeError as error:  # torch.save's stream says no more than that it failed
        if not any(words in str(error) for words in ("iostream error", "inline_container")):
            raise
        full = shutil.disk_usage(path.parent).free < BLOCK
        number = errno.ENOSPC if full else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error


def temporary_path(path: Path) -> Path:
    """Return a name beside `path` that no other call of any process gives, with the same suffix."""
    owner = f"{_host()}.{os.getpid()}.{_own_start()}.{next(_NUMBERS)}"
    return path.with_name(f"{TEMPORARY}{owner}-{path.name[-100:]}")


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files and folders for `path` that ended processes of this machine left beside it."""
    name = path.name[-100:]
    for other in path.parent.glob(f"{TEMPORARY}*{glob.escape(name)}"):
        owned = _OWNED.match(other.name)
        if owned and other.name[owned.end() :] == name and owned["host"] == _host():
            if _start_of(int(owned["process"])) != owned["start"]:
                _remove_quietly(other)


def _is_temporary(name: str) -> bool:
    """Tell whether a name is one that `temporary_path` gives on this machine."""
    owned = _OWNED.match(name)
    return owned is not None and owned["host"] == _host()


def _remove_quietly(path: Path) -> None:
    with suppress(OSError):
        remove(path)


@cache
def _host() -> str:
    """Return what tells this machine, and its numbering of processes, from others that share its disks."""
    with suppress(OSError):
        return hashlib.sha256(f"{platform.node()} {os.readlink('/proc/self/ns/pid')}".encode()).hexdigest()[:8]
    return hashlib.sha256(platform.node().encode()).hexdigest()[:8]


@cache
def _own_start() -> str | None:
    """Return when this process began."""
    return _start_of(os.getpid())


os.register_at_fork(after_in_child=_own_start.cache_clear)


def _start_of(process: int) -> str | None:
    """Return when a process began, in the system's ticks ("0" where that is not known), or None if it has ended."""
    with suppress(OSError):
        state = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if state[0] == "Z" else state[19]
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return "0"


def replace(temporary: Path, path: Path, renews: bool = False) -> None:
    """Rename over what is at `path` and record it; a folder there is moved aside first, and back if that fails.

    What is there must be this command's own by the records of `records.py`, or equal to what takes its place.

    Args:
        temporary: a file or folder.
        path: its name, with all links followed.
        renews: see `atomic_path`.

    Raises:
        UserError: it is not, or a file would replace a folder; nothing has changed.
    """
    if path.is_dir() and not temporary.is_dir():
        raise UserError(f"{path} is a folder, and a file would take its place: name another")
    if not renews and not any(map(_is_temporary, path.parts)):  # a folder is recorded as a whole
        new = described(temporary)
        check_replaceable(path, new)
        records.note(path, new)
    old = temporary_path(path)
    while True:
        try:
            os.replace(temporary, path)
            break
        except OSError as error:  # a folder with files, perhaps another process's since a moment ago
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                if old.exists() and not path.exists():
                    os.rename(old, path)
                raise
        _remove_quietly(old)
        with suppress(FileNotFoundError):
            os.rename(path, old)
    _remove_quietly(old)


def described(path: Path) -> records.Description:
    """Return size and SHA-256 of a file, under "", or of each file and link below a folder, by its name there."""
    if not path.is_dir():
        return {records.SELF: _state_of(path)}
    return {file.relative_to(path).as_posix(): _state_of(file) for file in found_below(path)}


def _state_of(file: Path) -> tuple[int, str]:
    """Return size and SHA-256 of a file; of a link in a folder, those of its words."""
    if file.is_symlink():
        words = os.fsencode(os.readlink(file))
        return len(words), hashlib.sha256(b"link " + words).hexdigest()
    return file.stat().st_size, sha256_of(file)


def check_replaceable(path: Path, new: records.Description | None = None) -> None:
    """Check that a file or folder may be replaced: this command wrote what is there, or it is equal to the new.

    Args:
        path: what would be replaced; there may be nothing.
        new: what would take its place, as `described` returns it, if that is known.

    Raises:
        UserError: names the first file that is neither, and who wrote it.
    """
    path = Path(os.path.realpath(path))
    for file in found_below(path) if path.is_dir() else [path]:
        name = file.relative_to(path).as_posix() if file != path else records.SELF
        reason = why_foreign(file, (new or {}).get(name))
        if reason and file == path:
            raise UserError(f"{path} is there already and {reason}: move it, or name another")
        if reason:
            raise UserError(f"{path} would be replaced, and {name} in it {reason}: move it, or name another folder")


def why_foreign(file: Path, new: tuple[int, str] | None = None) -> str | None:
    """Return in words why a file may not be replaced or removed; None if this command wrote it or it equals `new`."""
    if _is_temporary(file.name):
        return None
    try:
        kind = stat.S_IFMT(os.lstat(file).st_mode)
        if kind == stat.S_IFDIR:  # which another process has made in its place
            return None
        if kind not in (stat.S_IFREG, stat.S_IFLNK):
            return "is no file"
        here = _state_of(file)
    except FileNotFoundError:  # another process has replaced its folder
        return None
    if new == here or records.is_ours(file, here):
        return None
    others = sorted(records.writers_of(file, here))
    return f"was written by {others[0]}" if others else "was not written by this command, or was changed since"


def found_below(folder: Path) -> list[Path]:
    """Return the files and links below a folder, which another process may replace meanwhile."""
    while True:
        try:
            return sorted(file for file in folder.rglob("*") if not file.is_dir() or file.is_symlink())
        except FileNotFoundError:
            if not folder.is_dir():
                return []


def check_outputs(outputs: Mapping[str, Path], inputs: Mapping[str, Path]) -> None:
    """Check, before anything is written, that no output is an input, by whatever name or link.

    Args:
        outputs: files that would be written, by what the user calls them.
        inputs: files and folders that are read, by what the user calls them.

    Raises:
        UserError: With both names. An output folder may hold inputs: each file is checked where it is written.
    """
    for what, output in outputs.items():
        for name, path in inputs.items():
            same = same_file(output, path)
            if same and not path.is_dir():
                raise UserError(f"{what} {output} is also an input ({name}) and would be overwritten: name another")


def same_file(one: Path, other: Path) -> bool:
    """Tell whether two paths, of which one may lead nowhere or in a circle, are of one place or one file."""
    return os.path.realpath(one) == os.path.realpath(other) or (one.exists() and other.exists() and one.samefile(other))


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Write a file's bytes, or a folder's names, through to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_lock(path: Path, wait: bool = True) -> AbstractContextManager:
    """Take an exclusive lock on a file, created if missing; return what frees it at the end of a `with` block.

    The system frees it if this process is killed, though forked workers live on: filelock closes the file in them.

    Raises:
        BlockingIOError: It is held already, and `wait` is false.
        UserError: The path is a link.
    """
    from filelock import FileLock, Timeout  # slow, and few commands lock

    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(path, blocking=wait, fallback_to_soft=False).acquire()  # a soft lock outlives its process
    except Timeout as error:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path)) from error
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise UserError(f"{path} is a link, and a lock must be a file of its own: remove it") from error


@contextmanager
def open_text_out(path: str | Path, renews: bool = False) -> Iterator[TextIO]:
    """Open a UTF-8 text file for writing as `atomic_path` does, whole or not at all; `.gz` is compressed.

    The compressed bytes depend on the text alone: no clock time, no name in the header.
    """
    path = Path(path)
    with atomic_path(path, renews) as temporary, temporary.open("wb") as raw:
        zipped = path.suffix == ".gz"
        packed: Any = gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) if zipped else raw
        with packed, io.TextIOWrapper(packed, encoding="utf-8", newline="\n") as file:
            yield file


@contextmanager
def open_together(*paths: Path) -> Iterator[list[BinaryIO]]:
    """Open files for writing bytes that become visible together, when all are complete."""
    with ExitStack() as stack:
        temporary = [stack.enter_context(atomic_path(path)) for path in paths]
        yield [stack.enter_context(path.open("wb")) for path in temporary]


def write_bytes(path: str | Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    with open_together(Path(path)) as (file,):
        file.write(content)


def copy_file(source: Path, *targets: Path) -> None:
    """Copy a file to each target, whole or not at all; a target that is the file itself is left alone."""
    for target in targets:
        if source.absolute() != target.absolute():
            with atomic_path(target) as temporary:
                shutil.copyfile(source, temporary)


def write_text(path: str | Path, text: str, renews: bool = False) -> None:
    """Write a UTF-8 text file as `atomic_path` does, whole or not at all."""
    with open_text_out(path, renews) as file:
        file.write(text)


def write_json(path: str | Path, value: object, renews: bool = False) -> None:
    """Write a value as indented JSON with sorted keys as `atomic_path` does, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n", renews)


def sha256_of(path: str | Path, hashes: "Hashes | None" = None) -> str:
    """Return the SHA-256 of a file's bytes, or of a folder's names and files in order."""
    path = Path(path)
    if path.is_dir():
        digest = hashlib.sha256()
        for file in files_below(path):
            name = file.relative_to(path).as_posix()
            digest.update(f"{name}\0{sha256_of(file, hashes)}\n".encode())
        return digest.hexdigest()
    return hash_file(path)["sha256"] if hashes is None else hashes.of_file(path)


def hash_file(path: Path, algorithms: Iterable[str] = ("sha256",)) -> dict[str, str]:
    """Read a file once; return its hash by each algorithm."""
    digests = {name: hashlib.new(name, usedforsecurity=False) for name in algorithms}
    with ordinary(path).open("rb") as file:
        while block := file.read(BLOCK):
            for digest in digests.values():
                digest.update(block)
    return {name: digest.hexdigest() for name, digest in digests.items()}


class Hashes:
    """Hashes of files, each file read once while it stays the same."""

    def __init__(self) -> None:
        self.known: dict[tuple, dict[str, str]] = {}

    def of(self, path: str | Path) -> str:
        """Return a file's or folder's SHA-256."""
        return sha256_of(path, self)

    def of_file(self, path: Path, algorithm: str = "sha256") -> str:
        """Return a file's hash; its SHA-256 is computed on the way, as every stage asks for it."""
        found = self.known.setdefault(self.state(path), {})
        if algorithm not in found:
            found |= hash_file(path, {"sha256", algorithm})
        return found[algorithm]

    def note(self, path: Path, sha256: str) -> None:
        """Remember the hash of a file that was hashed while it was written."""
        self.known[self.state(path)] = {"sha256": sha256}

    def state(self, path: Path) -> tuple:
        """Return path, inode, size and times of a file, which change whenever its bytes do.

        A second write within one tick of the file system's clock leaves the times unchanged, so that this waits until
        the tick of the last write has passed.
        """
        path = Path(path).absolute()
        status = path.stat()
        changed = max(status.st_mtime_ns, status.st_ctime_ns)
        if 0 <= (age := time.time_ns() - changed) < TICK:
            time.sleep((TICK - age) / 1e9)
        return (path, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def size_of(path: str | Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    path = Path(path)
    files = files_below(path) if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files)


def bytes_below(folder: Path) -> int:
    """Return the bytes of all files below a folder; files that other processes remove meanwhile do not count."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                size += os.stat(os.path.join(parent, name)).st_size
    return size


def describe_size(size: int | None) -> str:
    """Write a number of bytes for the eye."""
    return "unknown size" if size is None else f"{size / 1e6:,.1f} MB"


def files_below(folder: Path) -> list[Path]:
    """Return a folder's files at any depth, in the order of their names."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


def existing_folder(path: str | Path) -> Path:
    """Return the nearest folder at or above a path that exists."""
    path = Path(path).absolute()
    while not path.is_dir():
        path = path.parent
    return path


def require_space(folder: str | Path, bytes: int) -> None:
    """Raise a UserError unless the disk of a folder has room for so many bytes."""
    free = shutil.disk_usage(existing_folder(folder)).free
    if free < bytes:
        raise UserError(
            f"{folder} needs {bytes / 1e6:,.1f} MB, its disk has {free / 1e6:,.1f} MB free: "
            "make room or choose another folder"
        )
