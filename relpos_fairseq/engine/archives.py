"""Archives of any origin: members come out whole, and nothing leaves the folder."""

import fnmatch
import io
import lzma
import shutil
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import atomic_path, require_space
from relpos_fairseq.engine.lines import open_binary

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
SHORT = {".tgz": ".gz", ".tbz2": ".bz2", ".txz": ".xz"}
ZEROS = bytes(512)  # a tar ends with two such blocks


def extract(archive: str | Path, folder: str | Path, members: Iterable[str] | None = None) -> list[Path]:
    """Extract files of a tar (plain, .gz, .bz2, .xz), a zip, or a single compressed file.

    Each member appears whole or not at all. A member that is already there is replaced.

    Args:
        archive: The file; its suffix says its kind.
        folder: Where members go, under their names in the archive.
        members: Names or shell patterns of those wanted; None: all of them.

    Returns:
        The extracted files, sorted.

    Raises:
        PreparationError: The archive is missing, truncated, damaged or of no known kind; a member's
            name leads out of the folder; a wanted one is a link or a device, or is not there.
    """
    archive, folder = Path(archive), Path(folder)
    wanted = None if members is None else list(members)
    name = archive.name.lower()
    if not archive.is_file():
        raise PreparationError(f"{archive} is not a file")
    if name.endswith(TARS):
        source = tar_members
    elif name.endswith(".zip"):
        source = zip_members
    elif name.endswith((".gz", ".bz2", ".xz")):
        source = single_member
    else:
        raise PreparationError(f"{archive}: its name must end in .zip, .gz, .bz2, .xz or .tar[.*]")
    made, found = [], set()
    with damage_named(archive):
        for member, size, stream, special in source(archive):
            check_name(archive, member)
            matching = [p for p in wanted or () if fnmatch.fnmatchcase(member, p)]
            if stream is None and special is None or wanted is not None and not matching:
                continue
            if special is not None:
                raise PreparationError(f"{archive}: {member} is {special}: extract it by hand")
            found.update(matching)
            made.append(write_member(folder / PurePosixPath(member), size, stream))
    missing = [pattern for pattern in wanted or () if pattern not in found]
    if missing:
        raise PreparationError(f"{archive} does not contain {', '.join(missing)}")
    return sorted(set(made))


def write_member(path: Path, size: int, stream: BinaryIO) -> Path:
    """Write one member, whole or not at all."""
    require_space(path.parent, size)
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        shutil.copyfileobj(stream, file, 1 << 20)
    return path


def check_name(archive: Path, name: str) -> None:
    """Refuse names that lead out of the folder, on any system."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not name or "\0" in name or ".." in parts or name[:1] in "/\\" or ":" in parts[0]:
        raise PreparationError(f"{archive}: the entry {name!r} leads out of the folder: do not use this archive")


Member = tuple[str, int, BinaryIO | None, str | None]  # name, size, bytes, what it is if no file


def tar_members(archive: Path) -> Iterator[Member]:
    """Stream a tar's members; at its end checks that the end was really there."""
    suffix = archive.suffix.lower()
    with open_binary(archive, SHORT.get(suffix, suffix)) as raw:
        tail = _Tail(raw)
        with tarfile.open(fileobj=tail, mode="r|", encoding="utf-8") as tar:
            for member in tar:
                special = None
                if not (member.isfile() or member.isdir()):
                    special = "a link" if member.issym() or member.islnk() else "a device"
                stream = tar.extractfile(member) if member.isfile() else None
                yield member.name, member.size, stream, special
        while tail.read(1 << 20):
            pass  # to the last byte, where a checksum is
        if tail.last != ZEROS:
            raise EOFError("the end of the archive is missing")


def zip_members(archive: Path) -> Iterator[Member]:
    """Stream a zip's members; zipfile checks each one's checksum."""
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            if info.is_dir():
                yield info.filename.rstrip("/"), 0, None, None
                continue
            kind = info.external_attr >> 28  # the upper bits of a Unix mode
            if kind == 0o12:
                yield info.filename, 0, None, "a link"
            elif info.flag_bits & 1:
                yield info.filename, 0, None, "encrypted"
            else:
                with file.open(info) as stream:
                    yield info.filename, info.file_size, stream, None


def single_member(archive: Path) -> Iterator[Member]:
    """Yield the one file that a .gz, .bz2 or .xz holds."""
    with open_binary(archive) as stream:
        yield archive.stem, 0, stream, None


@contextmanager
def damage_named(archive: Path) -> Iterator[None]:
    """Turn what the libraries raise of a damaged archive into one clear error."""
    damage = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, OSError)
    try:
        yield
    except damage as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system; gzip and bz2 raise theirs without a number
        # Where no hash is published, the first download's is kept, and with it a wrong one.
        pin = archive.with_name(archive.name + ".sha256")
        them = f"it and {pin.name}" if pin.exists() else "it"
        raise PreparationError(
            f"{archive} is truncated or damaged ({error}): delete {them} and run the same command again"
        ) from error


class _Tail(io.RawIOBase):
    """Passes reads on and remembers the last 512 bytes."""

    def __init__(self, raw: BinaryIO) -> None:
        self.raw, self.last = raw, b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        block = self.raw.read(size)
        self.last = (self.last + block)[-len(ZEROS) :]
        return block
