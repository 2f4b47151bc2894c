"""One file from one address: `.partial`, Range and If-Range, size, hash, and what servers do."""

import hashlib
import re
import threading
from collections.abc import Callable
from pathlib import Path

import requests
import urllib3
from requests.adapters import HTTPAdapter

from relpos_fairseq.engine.files import (
    BLOCK,
    named_on_disk_full,
    read_json,
    replace,
    require_space,
    sync,
    sync_folder,
    write_json,
)

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
