"""Download files, resumed and checked, and extract archives that nobody has vouched for."""

import fnmatch
import hashlib
import io
import lzma
import queue
import re
import shutil
import tarfile
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import requests
import urllib3
from requests.adapters import HTTPAdapter
from tqdm import tqdm

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import (
    BLOCK,
    Hashes,
    atomic_path,
    describe_size,
    named_on_disk_full,
    read_json,
    replace,
    require_space,
    sync,
    sync_folder,
    write_json,
    write_text,
)
from relpos_fairseq.io.lines import open_binary
from relpos_fairseq.io.progress import progress as progress_of

# ---- Archives of any origin: members come out whole, and nothing leaves the folder.


TARS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")
SHORT_SUFFIXES = {".tgz": ".gz", ".tbz2": ".bz2", ".txz": ".xz"}
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
        UserError: The archive is missing, truncated, damaged or of no known kind; a member's
            name leads out of the folder; a wanted one is a link or a device, or is not there.
    """
    archive, folder = Path(archive), Path(folder)
    wanted = None if members is None else list(members)
    name = archive.name.lower()
    if not archive.is_file():
        raise UserError(f"{archive} is not a file")
    if name.endswith(TARS):
        source = tar_members
    elif name.endswith(".zip"):
        source = zip_members
    elif name.endswith((".gz", ".bz2", ".xz")):
        source = single_member
    else:
        raise UserError(f"{archive}: its name must end in .zip, .gz, .bz2, .xz or .tar[.*]")
    made, found = [], set()
    with damage_named(archive):
        for member, size, stream, special in source(archive):
            check_name(archive, member)
            matching = [p for p in wanted or () if fnmatch.fnmatchcase(member, p)]
            if stream is None and special is None or wanted is not None and not matching:
                continue
            if special is not None:
                raise UserError(f"{archive}: {member} is {special}: extract it by hand")
            found.update(matching)
            made.append(write_member(folder / PurePosixPath(member), size, stream))
    missing = [pattern for pattern in wanted or () if pattern not in found]
    if missing:
        raise UserError(f"{archive} does not contain {', '.join(missing)}")
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
        raise UserError(f"{archive}: the entry {name!r} leads out of the folder: do not use this archive")


Member = tuple[str, int, BinaryIO | None, str | None]  # name, size, bytes, what it is if no file


def tar_members(archive: Path) -> Iterator[Member]:
    """Stream a tar's members; at its end checks that the end was really there."""
    suffix = archive.suffix.lower()
    with open_binary(archive, SHORT_SUFFIXES.get(suffix, suffix)) as raw:
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
        raise UserError(
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


# ---- What is known of a file before it is downloaded.


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded."""

    name: str  # what the program calls it
    urls: tuple[str, ...] | list[str]  # where it is, the preferred mirror first
    filename: str  # what it is called in the folder
    size: int | None = None  # its bytes, where they are known
    # its hash, where one has been published. Without one, the hash of the first download is kept
    # beside the file (`FILENAME.sha256`) and later ones must have it too
    sha256: str | None = None
    licence: str = ""  # what its use is subject to, for the eye
    md5: str | None = None  # its MD5, where that has been published instead

    def __post_init__(self) -> None:
        if Path(self.filename).name != self.filename or self.filename in ("", ".", ".."):
            raise UserError(f"{self.name}: not a plain file name: {self.filename!r}")

    def __str__(self) -> str:
        facts = [describe_size(self.size)] if self.size is not None else []
        facts += [f"sha256 {self.sha256}"] if self.sha256 else []
        known = f" ({', '.join(facts)})" if facts else ""
        return f"{self.filename}{known} from {self.urls[0] if self.urls else self.licence}"


# ---- One file from one address: `.partial`, Range and If-Range, size, hash, and what servers do.


HEADERS = {"Accept-Encoding": "identity", "User-Agent": "relpos-fairseq-prepare"}
BUSY = (429, 500, 502, 503, 504)  # worth asking again
HTML = re.compile(rb"\s*(<!doctype html|<html|<head|<\?xml[^>]*>\s*<!doctype html)", re.IGNORECASE)
NETWORK = (requests.RequestException, urllib3.exceptions.HTTPError)


class TransferError(Exception):
    """This address does not give the file; another one may."""


class Broken(Exception):
    """The connection ended early; what came is kept."""


class Stopped(Exception):
    """The program is ending."""


class Transfer:
    """Downloads one file from one address, resuming what is there.

    Args:
        url: The address.
        target: The file; while unfinished it is `NAME.partial`.
        size: Its bytes, if known.
        sha256: Its hash, if known.
        stop: Ends the transfer when set.
        report: Called with the number of bytes of every block.
        **settings: attempts, backoff and timeout of `fetch`; say, called with what happens.
    """

    def __init__(
        self,
        url: str,
        target: Path,
        size: int | None,
        sha256: str | None,
        stop: threading.Event,
        report: Callable[[int], object],
        **settings,
    ) -> None:
        self.url, self.target, self.size, self.sha256 = url, target, size, sha256
        self.stop, self.report = stop, report
        self.attempts, self.timeout = int(settings["attempts"]), settings["timeout"]
        self.backoff, self.say = settings["backoff"], settings["say"]
        self.counted = False  # whether the progress has heard of an earlier run's bytes
        self.partial = target.with_name(target.name + ".partial")
        self.state = target.with_name(target.name + ".partial.json")  # whose part it is
        self.digest = hashlib.sha256()

    def run(self) -> str:
        """Download the file; return its SHA-256.

        Raises:
            TransferError: The server does not have it, or has another file.
            Stopped: `stop` was set.
        """
        resumed = self.offset() > 0
        try:
            self.get_all()
            self.check()
        except TransferError:
            if not resumed or self.partial.exists():
                raise
            self.get_all()  # an old part may have been another file's beginning
            self.check()
        sync(self.partial)
        replace(self.partial, self.target)
        self.state.unlink(missing_ok=True)
        sync_folder(self.target.parent)
        return self.digest.hexdigest()

    def offset(self) -> int:
        """Return how many bytes are there."""
        return self.partial.stat().st_size if self.partial.exists() else 0

    def discard(self) -> None:
        """Forget what is there."""
        self.partial.unlink(missing_ok=True)
        self.state.unlink(missing_ok=True)

    def check(self) -> None:
        """Check size and hash of the finished part; a wrong one is removed."""
        size, found = self.offset(), self.digest.hexdigest()
        if self.size is not None and size != self.size:
            self.discard()
            raise TransferError(f"got {size:,} bytes, {self.size:,} expected")
        if self.sha256 is not None and found != self.sha256:
            self.discard()
            raise TransferError(f"got a file with sha256 {found}, {self.sha256} expected")

    def get_all(self) -> None:
        """Ask again, later each time, while connections break."""
        failures, furthest = 0, self.offset()
        retry = urllib3.Retry(total=3, backoff_factor=self.backoff, status_forcelist=BUSY, raise_on_status=False)
        with requests.Session() as session:
            for scheme in ("http://", "https://"):
                session.mount(scheme, HTTPAdapter(max_retries=retry))
            while True:
                try:
                    self.get(session)
                    return
                except Broken as error:
                    offset = self.offset()
                    failures = 0 if offset > furthest else failures + 1
                    furthest = max(furthest, offset)
                    self.say(f"  {self.target.name}: {error}; continuing after {offset:,} bytes")
                    if failures >= self.attempts:
                        got = f"after {offset:,} bytes, {failures} times without progress"
                        raise TransferError(f"the connection breaks {got} ({error})") from error
                    if self.stop.wait(self.backoff * 2**failures):
                        raise Stopped from None

    def get(self, session: requests.Session) -> None:
        """Ask once, for what is missing where that is safe, and writes what comes."""
        offset, headers = self.offset(), dict(HEADERS)
        state = read_json(self.state) or {}
        same = state.get("url") == self.url
        validator = state.get("etag") or state.get("modified") if same else None
        if offset and (validator or self.sha256):  # with a hash any mirror may finish the file
            headers["Range"] = f"bytes={offset}-"
            if validator:
                headers["If-Range"] = validator
        else:
            offset = 0
        try:
            response = session.get(
                self.url, headers=headers, stream=True, timeout=(min(self.timeout, 20), self.timeout)
            )
        except requests.ConnectionError as error:
            raise TransferError(f"cannot be reached ({reason_of(error)})") from error
        except requests.Timeout as error:
            raise Broken("no answer in time") from error
        except requests.RequestException as error:
            raise TransferError(reason_of(error)) from error
        with response:
            if response.status_code == 416:  # nothing after the offset: complete, or another file
                self.finish_or_restart(response, offset)
                return
            start, total = self.read_headers(response, offset)
            self.write(response, start, total)

    def finish_or_restart(self, response: requests.Response, offset: int) -> None:
        """Deal with a server that says that nothing is left to send."""
        total = re.fullmatch(r"bytes \*/(\d+)", response.headers.get("Content-Range", ""))
        if total and int(total[1]) == offset:
            self.digest = self.digest_of_part(offset)
            return
        self.discard()
        raise Broken("the file has changed on the server")

    def read_headers(self, response: requests.Response, offset: int) -> tuple[int, int | None]:
        """Return where the body starts in the file and the file's size, if the server says it."""
        status, headers = response.status_code, response.headers
        length = headers.get("Content-Length")
        start = 0
        if status == 206:
            span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""))
            if not span or int(span[1]) != offset:
                self.discard()
                raise Broken("the server sent another range than was asked for")
            start = offset
        elif status != 200:
            raise TransferError(f"status {status} {response.reason}")
        total = start + int(length) if length and length.isdigit() else None
        if self.size is not None and total is not None and total != self.size:
            raise TransferError(f"the server has {total:,} bytes, {self.size:,} expected")
        etag = headers.get("ETag", "")
        state = {
            "url": self.url,
            "etag": None if etag.startswith("W/") else etag or None,  # If-Range needs a strong one
            "modified": headers.get("Last-Modified"),
        }
        if start == 0:
            self.partial.unlink(missing_ok=True)
        write_json(self.state, state)
        return start, total

    def write(self, response: requests.Response, start: int, total: int | None) -> None:
        """Append the body to the part and hashes it as it comes."""
        if total is not None:
            require_space(self.target.parent, total - start)
        self.digest = self.digest_of_part(start)
        if start and not self.counted:
            self.report(start)
        self.counted = True
        offset = start
        with named_on_disk_full(self.partial), self.partial.open("ab") as file:
            blocks = response.raw.stream(1 << 16, decode_content=False)
            while block := next_block(blocks):
                if self.stop.is_set():
                    raise Stopped
                if offset == 0 and HTML.match(block[:512]) and not is_markup(self.target):
                    self.discard()
                    raise TransferError("the server answers with a web page, not with the file")
                file.write(block)
                file.flush()
                self.digest.update(block)
                offset += len(block)
                self.report(len(block))
        if total is not None and offset < total:
            raise Broken(f"{total - offset:,} bytes are missing")

    def digest_of_part(self, size: int):
        """Return the running hash of what is there, which must have that size."""
        digest = hashlib.sha256()
        if size:
            with self.partial.open("rb") as file:
                while block := file.read(BLOCK):
                    digest.update(block)
        return digest


def next_block(blocks) -> bytes | None:
    """Return the next block of a body; None at its end, `Broken` where it stalled."""
    try:
        return next(blocks, None)
    except NETWORK as error:
        raise Broken(reason_of(error)) from error


def is_markup(path: Path) -> bool:
    """Return whether a file may begin as a web page does."""
    return path.suffix.lower() in (".html", ".htm", ".xml", ".xhtml")


def reason_of(error: Exception) -> str:
    """Return the innermost reason of a network error, without its objects."""
    while isinstance(getattr(error, "reason", None), Exception):
        error = error.reason
    while error.args and isinstance(error.args[0], Exception):
        error = error.args[0]
        while isinstance(getattr(error, "reason", None), Exception):
            error = error.reason
    first = error.args[0] if error.args else ""
    text = first if isinstance(first, str) else str(error)
    return re.sub(r"<[^>]*>:? ?|\S+\(host=[^)]*\):? ?", "", text).strip() or type(error).__name__


# ---- Downloads that survive their servers: resumed, checked, from several mirrors, side by side.


def fetch(
    sources: Iterable[RemoteFile],
    folder: str | Path,
    *,
    workers: int = 4,
    from_dir: str | Path | None = None,
    progress: bool = True,
    attempts: int = 5,
    backoff: float = 0.5,
    timeout: float = 60.0,
    hashes: Hashes | None = None,
) -> dict[str, Path]:
    """Download files, or find them downloaded; all of them are complete and checked.

    Args:
        sources: What is wanted.
        folder: Where the files go; unfinished ones are `FILENAME.partial` and are resumed.
        workers: How many downloads run at a time.
        from_dir: A folder that has the files already, at any depth; nothing is downloaded then, and
            the paths returned are those in it.
        progress: Whether to show it.
        attempts: How often a broken connection is resumed without a byte of progress in between.
        backoff: Seconds before the first repetition; each later one waits twice as long.
        timeout: Seconds without a byte after which a connection counts as broken.
        hashes: Those of files that were read before.

    Returns:
        Each source's path, by name.

    Raises:
        UserError: Files could not be had; the message names each of them, every mirror's
            reason, and where to put files that were got elsewhere.
    """
    sources = list(sources)
    folder, hashes = Path(folder), hashes or Hashes()
    if workers < 1:
        raise UserError(f"workers must be >= 1, got {workers}")
    if from_dir is not None:
        return find_local(sources, Path(from_dir), hashes)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [source for source in sources if not is_complete(source, folder, hashes)]
    if wanted:
        settings = {"attempts": attempts, "backoff": backoff, "timeout": timeout}
        errors = run_transfers(wanted, folder, workers, progress, hashes, settings)
        if errors:
            raise UserError(explain_failures(wanted, errors))
    return {source.name: folder / source.filename for source in sources}


def find_local(sources: list[RemoteFile], folder: Path, hashes: Hashes) -> dict[str, Path]:
    """Find files in the user's folder and check them; missing or wrong ones are an error."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder")
    found, missing = {}, []
    for source in sources:
        paths = sorted(folder.rglob(source.filename), key=lambda path: (len(path.parts), path))
        if paths:
            check_local(source, paths[0], hashes)
            found[source.name] = paths[0]
        else:
            missing.append(f"  {source}")
    if missing:
        raise UserError("\n".join([f"{folder} lacks files; put there:", *missing]))
    return found


def check_local(source: RemoteFile, path: Path, hashes: Hashes) -> None:
    """Check a file against what is known of its source."""
    size = path.stat().st_size
    if source.size is not None and size != source.size:
        raise UserError(f"{path} has {size:,} bytes, {source.size:,} expected: replace it")
    if wrong := wrong_hash(source, path, hashes):
        raise UserError(f"{path} has {wrong}: replace it")


def wrong_hash(source: RemoteFile, path: Path, hashes: Hashes) -> str:
    """Say which published hash a file does not have; "" where it has them."""
    for algorithm, expected in (("md5", source.md5), ("sha256", source.sha256)):
        if expected and (found := hashes.of_file(path, algorithm)) != expected:
            return f"{algorithm} {found}, {expected} expected"
    return ""


def is_complete(source: RemoteFile, folder: Path, hashes: Hashes) -> bool:
    """Return whether a file was downloaded before and is as it was then."""
    path = folder / source.filename
    pinned = read_pin(source, folder)
    if not path.is_file() or not (source.md5 or source.sha256 or pinned):
        return False
    if source.size is not None and path.stat().st_size != source.size:
        return False
    return not wrong_hash(source, path, hashes) and pinned in (None, hashes.of_file(path))


def pin_path(source: RemoteFile, folder: Path) -> Path:
    """Return where the hash of a file without a published one is kept."""
    return folder / f"{source.filename}.sha256"


def read_pin(source: RemoteFile, folder: Path) -> str | None:
    """Return the hash of the first download; None where one is published."""
    if source.md5 or source.sha256:
        return None
    path = pin_path(source, folder)
    words = path.read_text(encoding="utf-8").split() if path.is_file() else []
    return words[0] if words else None


def run_transfers(
    sources: list[RemoteFile], folder: Path, workers: int, progress: bool, hashes: Hashes, settings: dict
) -> dict[str, list[str]]:
    """Run transfers side by side; return the failed sources' reasons, one a mirror.

    The threads are daemons: a Ctrl-C in the main thread ends the program at once, whatever a
    server is doing; the `.partial` files are then resumed by the next run.
    """
    todo: queue.SimpleQueue = queue.SimpleQueue()
    done: queue.SimpleQueue = queue.SimpleQueue()
    for source in sources:
        todo.put(source)
    stop = threading.Event()
    bar = start_progress(sources, folder) if progress else None
    report = bar.update if bar is not None else lambda n: None
    settings["say"] = tqdm.write if progress else lambda line: None  # keeps off the bar

    def work() -> None:
        while not stop.is_set():
            try:
                source = todo.get_nowait()
            except queue.Empty:
                return
            try:
                reasons = download_from_mirrors(source, folder, stop, report, hashes, settings)
                done.put((source, reasons, None))
            except BaseException as error:  # handed to the main thread
                done.put((source, [], error))

    for _ in range(min(workers, len(sources))):
        threading.Thread(target=work, daemon=True).start()
    errors = {}
    try:
        for _ in sources:
            source, reasons, error = done.get()
            if error is not None:
                raise error
            if reasons:
                errors[source.name] = reasons
    finally:
        stop.set()
        if bar is not None:
            bar.close()
    return errors


def start_progress(sources: list[RemoteFile], folder: Path):
    """Print what is downloaded; return its progress."""
    names = ", ".join(f"{source.name} ({describe_size(source.size)})" for source in sources)
    print(f"downloading {names} to {folder}", flush=True)
    known = [source.size for source in sources]
    total = None if None in known else sum(known)
    return progress_of(total=total, description="download", unit="B")


def download_from_mirrors(source: RemoteFile, folder: Path, stop, report, hashes: Hashes, settings: dict) -> list[str]:
    """Download one file from the first mirror that has it; return every mirror's reason if none.

    A file whose hash is wrong is not tried again in full at the same mirror, unless it was pieced
    together from an earlier run's part.
    """
    target = folder / source.filename
    pinned = read_pin(source, folder)
    expected = source.sha256 or pinned
    reasons = []
    for url in source.urls:
        transfer = Transfer(url, target, source.size, expected, stop, report, **settings)
        try:
            digest = transfer.run()
            if source.md5 and (wrong := wrong_hash(source, target, hashes)):
                target.unlink()
                raise TransferError(f"got a file with {wrong}")
        except Stopped:
            return [*reasons, "stopped"]
        except TransferError as error:
            reasons.append(f"{url}: {error}")
            if url != source.urls[-1]:
                settings["say"](f"  {source.filename}: {reasons[-1]}; asking the next address")
            continue
        if not source.md5:
            hashes.note(target, digest)
        if expected is None and not source.md5:
            write_text(pin_path(source, folder), f"{digest}  {source.filename}\n")
        return []
    if pinned and any("sha256" in reason for reason in reasons):
        pin = pin_path(source, folder)
        reasons.append(f"the first download had another hash: delete {pin} to accept a new file")
    return reasons or ["no address is known"]


def explain_failures(sources: list[RemoteFile], errors: dict[str, list[str]]) -> str:
    """Say what could not be had, why, and what to do."""
    failed = [source for source in sources if source.name in errors]
    lines = [f"could not download {', '.join(source.filename for source in failed)}"]
    for source in failed:
        lines += [f"  {source.filename}: {reason}" for reason in errors[source.name]]
    lines.append("run the same command again to continue, or put into a folder named by --from-dir:")
    lines += [f"  {source}" for source in failed]
    return "\n".join(lines)
