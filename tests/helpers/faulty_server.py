"""A local HTTP server that commits the faults that real ones do."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGE = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head></html>\n"


@dataclass
class File:
    """What a path answers.

    Attributes:
        data: The true bytes.
        faults: One a request, used up from the front: ("stop", n) ends the connection after n
            bytes of the body, ("stall", n) falls silent there, ("status", code), ("html",),
            ("mute",) ends it before any answer, ("wrong range",), ("ok",). None left: no fault.
        etag: The ETag; None sends none.
        ranges: Whether Range is honoured.
        length: Whether Content-Length is sent.
        piece: Bytes a write.
    """

    data: bytes
    faults: list[tuple] = field(default_factory=list)
    etag: str | None = '"1"'
    ranges: bool = True
    length: bool = True
    piece: int = 1 << 16


@dataclass
class Server:
    """A running server.

    Attributes:
        files: What each path answers; change it at any time.
        requests: (path, Range header or None, status sent) of every request.
    """

    url: str
    files: dict[str, File] = field(default_factory=dict)
    requests: list[tuple] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def put(self, name: str, data: bytes, **more) -> str:
        """Serves a file; returns its address."""
        self.files[f"/{name}"] = File(data, **more)
        return f"{self.url}/{name}"

    def ranges(self, name: str) -> list[str | None]:
        """The Range headers of all requests for a file."""
        return [given for path, given, _ in self.requests if path == f"/{name}"]


class Handler(BaseHTTPRequestHandler):
    """Answers from the server's files."""

    protocol_version = "HTTP/1.1"
    state: Server

    def do_GET(self) -> None:  # noqa: N802  the base class's name
        file = self.state.files.get(self.path)
        fault = file.faults.pop(0) if file and file.faults else ("ok",)
        self.close_connection = True
        if file is None or fault[0] == "status":
            self.body(404 if file is None else fault[1], b"", {}, fault)
        elif fault[0] == "mute":
            self.note(0)
        elif fault[0] == "html":
            self.body(200, PAGE, {"Content-Type": "text/html"}, fault)
        else:
            self.send_file(file, fault)

    def send_file(self, file: File, fault: tuple) -> None:
        given = self.headers.get("Range") if file.ranges else None
        condition = self.headers.get("If-Range")
        if given and condition and condition != file.etag:
            given = None
        start = int(re.fullmatch(r"bytes=(\d+)-", given)[1]) if given else 0
        size = len(file.data)
        headers = {"ETag": file.etag}
        if given and start >= size:
            headers["Content-Range"] = f"bytes */{size}"
            self.body(416, b"", headers, fault)
            return
        if given:
            shift = 1 if fault[0] == "wrong range" else 0
            headers["Content-Range"] = f"bytes {start + shift}-{size - 1}/{size}"
        self.body(206 if given else 200, file.data[start:], headers, fault, file)

    def body(self, status: int, data: bytes, headers: dict, fault: tuple, file=None) -> None:
        self.note(status)
        self.send_response(status)
        for name, value in headers.items():
            if value is not None:
                self.send_header(name, value)
        if file is None or file.length:
            self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        end = fault[1] if fault[0] in ("stop", "stall") else len(data)
        piece = file.piece if file else 1 << 16
        for place in range(0, min(end, len(data)), piece):
            self.wfile.write(data[place : min(place + piece, end)])
            self.wfile.flush()
        if fault[0] == "stall":
            self.state.over.wait(30)

    def note(self, status: int) -> None:
        self.state.requests.append((self.path, self.headers.get("Range"), status))

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@contextlib.contextmanager
def serve() -> Iterator[Server]:
    """Runs a server on a free port."""
    handler = type("OwnHandler", (Handler,), {})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    http.daemon_threads = True
    handler.state = state = Server(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.over.set()
        http.shutdown()
        http.server_close()
        thread.join(10)
