"""Download files, resumed and checked.

A download is written to `NAME.partial`, and `NAME.partial.json` says whose part it is: the next request asks for
the rest by Range and If-Range, or by Range alone where the file's hash is known. Without a hash, only the part
that this program wrote is continued, and a result counts if its archive's end, or the server, says that it is whole.
Retries of a request are urllib3's; the library does not resume a body that breaks off, so `Transfer` does.
"""

import dataclasses
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from relpos_fairseq.io.archives import damage_of
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import (
    Hashes,
    describe_size,
    named_on_disk_full,
    replace,
    require_space,
    sync,
    write_json,
    write_text,
)
from relpos_fairseq.io.progress import progress, say
from relpos_fairseq.io.reading import read_json

if TYPE_CHECKING:
    import requests

HEADERS = {"Accept-Encoding": "identity", "User-Agent": "relpos-fairseq-prepare"}
BUSY = (429, 500, 502, 503, 504)  # statuses after which a request is worth repeating
HTML = re.compile(rb"\s*(<!doctype html|<html|<head|<\?xml[^>]*>\s*<!doctype html)", re.IGNORECASE)
MARKUP = (".html", ".htm", ".xml", ".xhtml")  # files that may begin as a web page does


@dataclass(frozen=True)
class RemoteFile:
    """A file that can be downloaded."""

    name: str  # what the program calls it
    urls: tuple[str, ...] | list[str]  # where it is, the preferred mirror first
    filename: str  # its name in the folder
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


@dataclass(frozen=True)
class Network:
    """How downloads deal with servers, and what counts their bytes."""

    attempts: int = 5  # how often a broken connection is resumed without a byte of progress in between
    backoff: float = 0.5  # seconds before the first repetition; each later one waits twice as long
    timeout: float = 60.0  # seconds without a byte after which a connection counts as broken
    count: Callable[[int], object] = lambda size: None  # called with the bytes of every block


def fetch(
    sources: Iterable[RemoteFile],
    folder: str | Path,
    *,
    workers: int = 4,
    from_dir: str | Path | None = None,
    hashes: Hashes | None = None,
    **network: float,
) -> dict[str, Path]:
    """Download files, or find them downloaded; all of them are complete and checked.

    Args:
        sources: The wanted files.
        folder: Where the files go; unfinished ones are `FILENAME.partial` and are resumed.
        workers: How many downloads run at a time.
        from_dir: A folder that has the files already, at any depth; nothing is downloaded then, and
            the paths returned are those in it.
        hashes: Hashes of files that were read before.
        **network: attempts, backoff and timeout of `Network`.

    Returns:
        Each source's path, by name.

    Raises:
        UserError: Files could not be had; the message names each of them, every mirror's reason, and where to put
            files that were got elsewhere.
    """
    sources = list(sources)
    folder, hashes = Path(folder), hashes or Hashes()
    if from_dir is not None:
        return find_local(sources, Path(from_dir), hashes)
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [source for source in sources if not is_complete(source, folder, hashes)]
    if wanted and (errors := run_transfers(wanted, folder, workers, hashes, network)):
        raise UserError(explain_failures(wanted, errors))
    return {source.name: folder / source.filename for source in sources}


def agree(sources: Iterable[RemoteFile], folder: str | Path, yes: bool, hashes: Hashes | None = None) -> None:
    """Have a download agreed to: it is, if `yes`, or if the folder has a part of it; else a terminal is asked.

    Args:
        sources: The wanted files.
        folder: Where they would go; those that it has need no word.
        yes: Whether it was agreed to before.
        hashes: Hashes of files that were read before.

    Raises:
        UserError: Nobody agreed; the message says what would be downloaded, and how to agree.
    """
    sources, folder, hashes = list(sources), Path(folder), hashes or Hashes()
    begun = any((folder / f"{source.filename}.partial").exists() for source in sources)
    wanted = [] if yes or begun else [source for source in sources if not is_complete(source, folder, hashes)]
    if not wanted:
        return
    sizes = [source.size for source in wanted if source.size is not None]
    size = [describe_size(sum(sizes))] if sizes else []
    size += [f"{len(wanted) - len(sizes)} of unknown size"] if len(sizes) < len(wanted) else []
    names = ", ".join(source.filename for source in wanted)
    what = f"download {names} ({' and '.join(size)}) to {folder}"
    if sys.stdin and sys.stdin.isatty():
        print(f"{what}? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
        raise UserError("nothing was downloaded")
    raise UserError(f"would {what}: add --yes to agree, or name a folder that has them with --from-dir")


def find_local(sources: list[RemoteFile], folder: Path, hashes: Hashes) -> dict[str, Path]:
    """Find files in the user's folder and check them; missing or wrong ones are an error."""
    found, missing = {}, []
    for source in sources:
        paths = sorted(folder.rglob(source.filename), key=lambda path: (len(path.parts), path))
        if not paths:
            missing.append(f"  {source}")
            continue
        path = found[source.name] = paths[0]
        if wrong := difference(source, path, hashes):
            raise UserError(f"{path} has {wrong}: replace it")
    if missing:
        raise UserError("\n".join([f"{folder} lacks files; put there:", *missing]))
    return found


def difference(source: RemoteFile, path: Path, hashes: Hashes) -> str:
    """Describe the published size or hash that a file does not have; "" where it has them all."""
    if source.size is not None and (size := path.stat().st_size) != source.size:
        return f"{size:,} bytes, {source.size:,} expected"
    for algorithm, expected in (("md5", source.md5), ("sha256", source.sha256)):
        if expected and (found := hashes.of_file(path, algorithm)) != expected:
            return f"{algorithm} {found}, {expected} expected"
    return ""


def is_complete(source: RemoteFile, folder: Path, hashes: Hashes) -> bool:
    """Return whether a file was downloaded before and has not changed since."""
    path, pinned = folder / source.filename, read_pin(source, folder)
    if not path.is_file() or not (source.md5 or source.sha256 or pinned):
        return False
    return not difference(source, path, hashes) and pinned in (None, hashes.of_file(path))


def pin_path(source: RemoteFile, folder: Path) -> Path:
    """Return the file that keeps the first download's hash, where none is published."""
    return folder / f"{source.filename}.sha256"


def read_pin(source: RemoteFile, folder: Path) -> str | None:
    """Return the hash of the first download; None where a hash is published."""
    path = pin_path(source, folder)
    words = path.read_text(encoding="utf-8").split() if path.is_file() else []
    return words[0] if words and not (source.md5 or source.sha256) else None


def run_transfers(
    sources: list[RemoteFile], folder: Path, workers: int, hashes: Hashes, options: dict
) -> dict[str, list[str]]:
    """Run transfers side by side; return the failed sources' reasons, one a mirror.

    The pool's threads are daemons: a Ctrl-C in the main thread ends the program at once, whatever a
    server is doing; the `.partial` files are then resumed by the next run.
    """
    stop = threading.Event()
    names = ", ".join(f"{source.name} ({describe_size(source.size)})" for source in sources)
    print(f"downloading {names} to {folder}", flush=True)
    sizes = [source.size for source in sources if source.size is not None]
    bar = progress(total=sum(sizes) if len(sizes) == len(sources) else None, description="download", unit="B")
    network = Network(**options, count=bar.update)

    def work(source: RemoteFile) -> tuple[str, list[str]]:
        return source.name, [] if stop.is_set() else download_from_mirrors(source, folder, stop, hashes, network)

    try:
        with bar, ThreadPool(min(workers, len(sources))) as pool:
            return {name: reasons for name, reasons in pool.imap_unordered(work, sources) if reasons}
    finally:
        stop.set()


def download_from_mirrors(
    source: RemoteFile, folder: Path, stop: threading.Event, hashes: Hashes, network: Network
) -> list[str]:
    """Download one file from the first mirror that has it; return every mirror's reason if none has.

    A file whose hash is wrong is not tried again in full at the same mirror, unless it was pieced
    together from an earlier run's part.
    """
    pinned = read_pin(source, folder)
    wanted = dataclasses.replace(source, sha256=source.sha256 or pinned)
    reasons: list[str] = []
    for url in source.urls:
        try:
            digest = Transfer(url, wanted, folder / source.filename, stop, hashes, network).run()
        except Stopped:
            return [*reasons, "stopped"]
        except TransferError as error:
            reasons.append(f"{url}: {error}")
            if url != source.urls[-1]:
                say(f"  {source.filename}: {reasons[-1]}; asking the next address")
            continue
        if not (wanted.sha256 or wanted.md5):
            write_text(pin_path(source, folder), f"{digest}  {source.filename}\n", renews=True)
        return []
    if pinned and any("sha256" in reason for reason in reasons):
        pin = pin_path(source, folder)
        reasons.append(f"the first download had another hash: delete {pin} to accept a new file")
    return reasons or ["no address is known"]


def explain_failures(sources: list[RemoteFile], errors: dict[str, list[str]]) -> str:
    """Say what could not be downloaded, why, and what to do."""
    failed = [source for source in sources if source.name in errors]
    lines = [f"could not download {', '.join(source.filename for source in failed)}"]
    for source in failed:
        lines += [f"  {source.filename}: {reason}" for reason in errors[source.name]]
    lines.append("run the same command again to continue, or put into a folder named by --from-dir:")
    return "\n".join([*lines, *(f"  {source}" for source in failed)])


# One file from one address


class State(TypedDict, total=False):
    """Whose part an unfinished file is."""

    url: str
    etag: str | None
    modified: str | None
    file: list[int]


class TransferError(Exception):
    """The file could not be fetched from this address; another address may have it."""


class Broken(Exception):
    """The connection ended early; the bytes that came are kept."""


class Stopped(Exception):
    """The program is ending."""


@dataclass
class Transfer:
    """Downloads one file from one address, resuming an unfinished part."""

    url: str
    source: RemoteFile
    target: Path  # the file; while unfinished it is `NAME.partial`
    stop: threading.Event  # ends the transfer when set
    hashes: Hashes
    network: Network
    length_told: bool = False  # whether the server said where the body ends
    counted: bool = False  # whether the progress has been told of an earlier run's bytes

    def __post_init__(self) -> None:
        self.partial = self.target.with_name(f"{self.target.name}.partial")
        self.state = self.target.with_name(f"{self.target.name}.partial.json")  # whose part it is

    def run(self) -> str:
        """Download the file; return its SHA-256.

        Raises:
            TransferError: The server does not have it, or has another file.
            Stopped: `stop` was set.
        """
        resumed = self.offset() > 0
        try:
            self.get_all()
        except TransferError:
            if not resumed or self.partial.exists():
                raise
            self.get_all()  # an old part may have been another file's beginning
        sync(self.partial)
        digest = self.hashes.of_file(self.partial)
        replace(self.partial, self.target)
        self.hashes.note(self.target, digest)
        self.state.unlink(missing_ok=True)
        sync(self.target.parent)
        return digest

    def offset(self) -> int:
        """Return the bytes of the unfinished part."""
        return self.partial.stat().st_size if self.partial.exists() else 0

    def identity(self) -> list[int]:
        """Return what tells the unfinished part from a file that others put in its place."""
        status = self.partial.stat()
        return [status.st_dev, status.st_ino]

    def discard(self) -> None:
        """Delete the unfinished part."""
        self.partial.unlink(missing_ok=True)
        self.state.unlink(missing_ok=True)

    def get_all(self) -> None:
        """Request the file until it is complete, later each time a connection breaks; check size and hash."""
        import requests  # like urllib3, only here and below: it takes longer to import than --help may
        import urllib3

        failures, furthest = 0, self.offset()
        backoff = self.network.backoff
        retry = urllib3.Retry(total=3, backoff_factor=backoff, status_forcelist=BUSY, raise_on_status=False)
        with requests.Session() as session:
            for scheme in ("http://", "https://"):
                session.mount(scheme, requests.adapters.HTTPAdapter(max_retries=retry))
            while True:
                try:
                    self.get(session)
                    break
                except Broken as error:
                    offset = self.offset()
                    failures = 0 if offset > furthest else failures + 1
                    furthest = max(furthest, offset)
                    say(f"  {self.target.name}: {error}; continuing after {offset:,} bytes")
                    if failures >= self.network.attempts:
                        got = f"after {offset:,} bytes, {failures} times without progress"
                        raise TransferError(f"the connection breaks {got} ({error})") from error
                    if self.stop.wait(backoff * 2**failures):
                        raise Stopped from None
        if wrong := self.wrong():
            self.discard()
            raise TransferError(f"got {wrong}")

    def wrong(self) -> str:
        """Describe what is wrong with the whole part; "" if it is the file."""
        source = self.source
        other = difference(source, self.partial, self.hashes)
        if other or source.sha256 or source.md5:
            return other
        damage = damage_of(self.partial, self.target.name)
        if damage:
            return f"an archive that is truncated or damaged ({damage})"
        if damage is None and source.size is None and not self.length_told:
            return "a file of a length that the server does not tell, so that it may have been cut"
        return ""

    def get(self, session: "requests.Session") -> None:
        """Send one request, with a Range header if the partial file can be resumed, and append the body."""
        import requests

        offset, headers, timeout = self.offset(), dict(HEADERS), self.network.timeout
        state = read_json(self.state, State, {}, "delete it")
        same = offset and state.get("url") == self.url and (self.source.sha256 or state.get("file") == self.identity())
        validator = state.get("etag") or state.get("modified") if same else None
        if offset and (validator or self.source.sha256):  # with a hash any mirror may finish the file
            headers["Range"] = f"bytes={offset}-"
            if validator:
                headers["If-Range"] = validator
        else:
            offset = 0
        try:
            response = session.get(self.url, headers=headers, stream=True, timeout=(min(timeout, 20), timeout))
        except requests.ConnectionError as error:
            raise TransferError(f"cannot be reached ({reason_of(error)})") from error
        except requests.Timeout as error:
            raise Broken("no answer in time") from error
        except requests.RequestException as error:
            raise TransferError(reason_of(error)) from error
        with response:
            if response.status_code != 416:
                self.write(response, *self.read_headers(response, offset))
                return
            # The server has nothing after the offset: the file is complete, or has changed.
            total = re.fullmatch(r"bytes \*/(\d+)", response.headers.get("Content-Range", ""))
            if not total or int(total[1]) != offset:
                self.discard()
                raise Broken("the file has changed on the server")
            self.length_told = True

    def read_headers(self, response: "requests.Response", offset: int) -> tuple[int, int | None]:
        """Return where the body starts in the file, and the file's size if the server tells it."""
        status, headers = response.status_code, response.headers
        length, start = headers.get("Content-Length"), 0
        if status == 206:
            span = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", headers.get("Content-Range", ""))
            if not span or int(span[1]) != offset:
                self.discard()
                raise Broken("the server sent another range than was asked for")
            start = offset
        elif status != 200:
            raise TransferError(f"status {status} {response.reason}")
        total = start + int(length) if length and length.isdigit() else None
        if total is not None and self.source.size not in (None, total):
            raise TransferError(f"the server has {total:,} bytes, {self.source.size:,} expected")
        if start == 0:
            self.partial.unlink(missing_ok=True)
            self.partial.touch()
        self.length_told = total is not None or headers.get("Transfer-Encoding", "").lower() == "chunked"
        etag = headers.get("ETag", "")
        strong = None if etag.startswith("W/") else etag or None  # If-Range needs a strong one
        state = {"url": self.url, "etag": strong, "modified": headers.get("Last-Modified")}
        write_json(self.state, {**state, "file": self.identity()}, renews=True)
        return start, total

    def write(self, response: "requests.Response", start: int, total: int | None) -> None:
        """Append the body to the part."""
        if total is not None:
            require_space(self.target.parent, total - start)
        if start and not self.counted:
            self.network.count(start)
        self.counted = True
        offset = start
        with named_on_disk_full(self.partial), self.partial.open("ab") as file:
            blocks = response.raw.stream(1 << 16, decode_content=False)
            while block := next_block(blocks):
                if self.stop.is_set():
                    raise Stopped
                if offset == 0 and HTML.match(block[:512]) and self.target.suffix.lower() not in MARKUP:
                    self.discard()
                    raise TransferError("the server answers with a web page, not with the file")
                file.write(block)
                file.flush()
                offset += len(block)
                self.network.count(len(block))
        if total is not None and offset < total:
            raise Broken(f"{total - offset:,} bytes are missing")


def next_block(blocks: Iterator[bytes]) -> bytes | None:
    """Return the next block of a body, None at its end; raise `Broken` where it stalled."""
    from requests import RequestException
    from urllib3.exceptions import HTTPError

    try:
        return next(blocks, None)
    except (RequestException, HTTPError) as error:
        raise Broken(reason_of(error)) from error


def reason_of(error: Exception) -> str:
    """Return the innermost reason of a network error, without its objects."""
    inner: object = error
    while isinstance(inner, Exception):
        error = inner
        reason = getattr(error, "reason", None)
        inner = reason if isinstance(reason, Exception) else next(iter(error.args), None)
    first = error.args[0] if error.args else ""
    text = first if isinstance(first, str) else str(error)
    return re.sub(r"<[^>]*>:? ?|\S+\(host=[^)]*\):? ?", "", text).strip() or type(error).__name__
