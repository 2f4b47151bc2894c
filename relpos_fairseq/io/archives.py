"""Extract archives that nobody has vouched for, and tell whether an archive is whole."""

import fnmatch
import io
import lzma
import shutil
import tarfile
import unicodedata
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import BLOCK, atomic_path, describe_size, require_space
from relpos_fairseq.io.lines import open_binary

TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
SHORT_SUFFIXES = {".tgz": ".gz", ".tbz2": ".bz2", ".txz": ".xz"}
ZEROS = bytes(512)  # a tar ends with two such blocks
DAMAGE = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, OSError)
# What an archive may unpack to: no text becomes 200 times as large, and few bytes may always become many.
GROWTH, FREE_GROWTH = 200, 64 << 20
CONTROL = ("Cc", "Zl", "Zp")  # kinds of characters that break a line or command a terminal


class Member(NamedTuple):
    """An entry of an archive."""

    name: str
    size: int = 0
    stream: IO[bytes] | io.RawIOBase | None = None  # its bytes; None where it is no file
    special: str = ""  # "a link", "a device", "encrypted": what cannot be extracted


def extract(archive: str | Path, folder: str | Path, members: Iterable[str] | None = None) -> list[Path]:
    """Extract files of a tar (plain, .gz, .bz2, .xz), a zip, or a single compressed file.

    Each member appears whole or not at all, and replaces a file of its name. Nothing but regular files is written,
    so that no link can lead a later member out of the folder.

    Args:
        archive: The file; its suffix tells its format.
        folder: Where members go, under their names in the archive.
        members: Names or shell patterns of the wanted members; None: all of them.

    Returns:
        The extracted files, sorted.

    Raises:
        UserError: The archive is missing, truncated, damaged, of an unknown format, or unpacks to far more than
            a text can; a member's name leads out of the folder, or breaks a line; a wanted member is a link or a
            device, or is missing.
    """
    archive, folder = Path(archive), Path(folder)
    wanted = None if members is None else list(members)
    if not archive.is_file():
        raise UserError(f"{archive} is not a file")
    source = reader_of(archive.name)
    if source is None:
        raise UserError(f"{archive}: its name must end in .zip, .gz, .bz2, .xz or .tar[.*]")
    made, found = set(), set()
    with damage_named(archive):
        for member in source(archive, archive.name):
            check_name(archive, member.name)
            matching = [pattern for pattern in wanted or () if fnmatch.fnmatchcase(member.name, pattern)]
            if wanted is not None and not matching:
                continue
            if member.special:
                raise UserError(f"{archive}: {member.name} is {member.special}: extract it by hand")
            if member.stream is None:
                continue  # a folder
            found.update(matching)
            path = folder / PurePosixPath(member.name)
            require_space(path.parent, member.size)
            with atomic_path(path) as temporary, temporary.open("wb") as file:
                shutil.copyfileobj(member.stream, file, BLOCK)
            made.add(path)
    if missing := [pattern for pattern in wanted or () if pattern not in found]:
        raise UserError(f"{archive} does not contain {', '.join(missing)}")
    return sorted(made)


def reader_of(name: str) -> Callable[[Path, str], Iterator[Member]] | None:
    """Return what streams the members of an archive of this name; None where the name is of no archive."""
    name = name.lower()
    if name.endswith(TARS):
        return tar_members
    if name.endswith(".zip"):
        return zip_members
    return single_member if name.endswith((".gz", ".bz2", ".xz")) else None


def damage_of(path: Path, name: str) -> str | None:
    """Read an archive to its end; return what is wrong with it, "" if it is whole, None if its name is of no archive.

    Args:
        path: The file, which may have a temporary name.
        name: The name that tells its format.
    """
    source = reader_of(name)
    if source is None:
        return None
    try:
        for member in source(path, name):
            while member.stream is not None and member.stream.read(BLOCK):
                pass
    except (*DAMAGE, UserError) as error:
        return str(error)
    return ""


def unpacked(path: Path) -> bytes:
    """Return the bytes of a file, of a .gz, .bz2 or .xz unpacked.

    Raises:
        UserError: The file is missing or damaged, or unpacks to far more than a text can.
    """
    with open_binary(path) as file:
        limited = _Limited(file, path)
        return b"".join(iter(lambda: limited.read(BLOCK), b""))


def check_name(archive: Path, name: str) -> None:
    """Raise an error for a name in an archive that would lead out of the folder on some system."""
    parts = PurePosixPath(name.replace("\\", "/")).parts
    if not name or "\0" in name or ".." in parts or name[:1] in "/\\" or ":" in parts[0]:
        raise UserError(f"{archive}: the entry {name!r} leads out of the folder: do not use this archive")
    if any(unicodedata.category(one) in CONTROL for one in name):
        raise UserError(f"{archive}: the entry {name!r} has a control character: do not use this archive")


def tar_members(archive: Path, name: str) -> Iterator[Member]:
    """Stream a tar's members, then check that its end mark is there, which tarfile does not."""
    suffix = Path(name).suffix.lower()
    with open_binary(archive, SHORT_SUFFIXES.get(suffix, suffix)) as raw:
        tail = _Limited(raw, archive)
        with tarfile.open(fileobj=tail, mode="r|", encoding="utf-8") as tar:
            for member in tar:
                stream = tar.extractfile(member) if member.isfile() else None
                special = (
                    "a link" if member.issym() or member.islnk() else "" if stream or member.isdir() else "a device"
                )
                yield Member(member.name, member.size, stream, special)
        while tail.read(BLOCK):
            pass  # to the last byte, where a checksum is
        if tail.last != ZEROS:
            raise EOFError("the end of the archive is missing")


def zip_members(archive: Path, name: str) -> Iterator[Member]:
    """Stream a zip's members; zipfile checks each one's checksum."""
    limited = _Limited(None, archive)
    with zipfile.ZipFile(archive) as file:
        for info in file.infolist():
            if info.is_dir():
                yield Member(info.filename.rstrip("/"))
            elif info.external_attr >> 28 == 0o12:  # the upper bits of a Unix mode
                yield Member(info.filename, special="a link")
            elif info.flag_bits & 1:
                yield Member(info.filename, special="encrypted")
            else:
                with file.open(info) as stream:
                    yield Member(info.filename, info.file_size, limited.of(stream))


def single_member(archive: Path, name: str) -> Iterator[Member]:
    """Yield the one file that a .gz, .bz2 or .xz holds."""
    with open_binary(archive, Path(name).suffix.lower()) as stream:
        yield Member(Path(name).stem, 0, _Limited(stream, archive))


@contextmanager
def damage_named(archive: Path) -> Iterator[None]:
    """Turn what the libraries raise at a damaged archive into one clear error."""
    try:
        yield
    except DAMAGE as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # of the file system; gzip and bz2 raise theirs without a number
        # Where no hash is published, the first download's is kept, and with it a wrong one.
        pin = archive.with_name(archive.name + ".sha256")
        them = f"it and {pin.name}" if pin.exists() else "it"
        raise UserError(
            f"{archive} is truncated or damaged ({error}): delete {them} and run the same command again"
        ) from error


class _Limited(io.RawIOBase):
    """Passes reads on, up to the most that an archive may unpack to, and remembers the last 512 bytes."""

    def __init__(self, raw: IO[bytes] | None, archive: Path) -> None:
        self.raw, self.archive, self.last = raw, archive, b""
        self.most = self.left = GROWTH * archive.stat().st_size + FREE_GROWTH

    def of(self, raw: IO[bytes]) -> "_Limited":
        """Go on with the next file of the archive."""
        self.raw = raw
        return self

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        block = self.raw.read(size) if self.raw is not None else b""
        self.left -= len(block)
        if self.left < 0:
            raise UserError(
                f"{self.archive} has {describe_size(self.archive.stat().st_size)} and unpacks to more than "
                f"{describe_size(self.most)}, as no text does: do not use this archive, or unpack it by hand"
            )
        self.last = (self.last + block)[-len(ZEROS) :]
        return block
