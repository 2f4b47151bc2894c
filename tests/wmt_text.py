"""Small parallel text for tests, as files and as a small WMT's archives, and a faulty server."""

from __future__ import annotations

import hashlib
import io
import random
import tarfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

WORDS = {
    "en": "the house a tree sees old man red dog new day walks under over garden child".split(),
    "de": "das Haus ein Baum sieht alte Mann rot Hund neue Tag geht unter über Garten Kind".split(),
}
TRAIN, VALID, TEST = 150, 7, 9
FAULTS = ("cut", "404", "html", "corrupt")


def sentences(count: int, seed: int) -> dict[str, list[str]]:
    """Makes pairs of sentences, word for word."""
    draw = random.Random(seed)
    lines = {"en": [], "de": []}
    for _ in range(count):
        chosen = [draw.randrange(len(WORDS["en"])) for _ in range(draw.randint(3, 9))]
        for language, words in WORDS.items():
            lines[language].append(" ".join(words[n] for n in chosen).capitalize() + ".")
    return lines


def write_texts(folder: Path) -> Path:
    """Writes train, valid and test of English and German."""
    folder.mkdir(parents=True)
    for name, count, seed in (("train", TRAIN, 1), ("valid", VALID, 2), ("test", TEST, 3)):
        for language, lines in sentences(count, seed).items():
            (folder / f"{name}.{language}").write_text("".join(f"{line}\n" for line in lines))
    return folder


def pack(members: dict[str, str]) -> bytes:
    """Makes a .tgz of texts."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in members.items():
            content = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def archives(folder: Path) -> dict[str, bytes]:
    """Makes a small WMT: two training archives and two test sets."""

    def text(name: str, language: str) -> str:
        return (folder / f"{name}.{language}").read_text()

    def sgml(name: str, language: str) -> str:
        lines = text(name, language).splitlines()
        rows = "\n".join(f'<seg id="{n}"> {line} </seg>' for n, line in enumerate(lines, start=1))
        return f'<refset>\n<doc docid="d">\n{rows}\n</doc>\n</refset>\n'

    half = {
        lang: [text("train", lang).splitlines(True)[part::2] for part in (0, 1)] for lang in WORDS
    }
    return {
        "first.tgz": pack({f"training/first.de-en.{k}": "".join(v[0]) for k, v in half.items()}),
        "second.tgz": pack({f"second.de-en.{k}": "".join(v[1]) for k, v in half.items()}),
        "dev.tgz": pack({f"test/newstest2013-src.{k}.sgm": sgml("valid", k) for k in WORDS}),
        "test.tgz": pack({f"test/newstest2015-{k}.sgm": sgml("test", k) for k in WORDS}),
    }


def md5(content: bytes) -> str:
    """Returns a hash as sacrebleu declares it."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


class Handler(BaseHTTPRequestHandler):
    """Serves files, from where a Range header says, with the faults that the server still has."""

    def do_GET(self) -> None:
        name = self.path.rsplit("/", 1)[-1]
        server = self.server
        server.requests.append((self.path, self.headers.get("Range")))
        faults = server.faults.get(self.path.strip("/"), [])
        fault = faults.pop(0) if faults else None
        content = server.files.get(name)
        if fault == "404" or content is None:
            self.send_error(404)
            return
        if fault == "html":
            self.answer(200, b"<!DOCTYPE html><html><body>Moved.</body></html>", "text/html")
            return
        start = int((self.headers.get("Range") or "bytes=0-")[6:].split("-")[0])
        body = content[start:]
        if fault == "corrupt":
            body = body[:40] + bytes(b ^ 1 for b in body[40:60]) + body[60:]
        sent = body[: len(body) // 2] if fault == "cut" else body
        status = 206 if start else 200
        self.answer(status, sent, "application/gzip", len(body), start, len(content))
        if fault == "cut":
            self.close_connection = True
            self.connection.close()

    def answer(self, status, body, kind, length=None, start=0, total=0) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body) if length is None else length))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(files: dict[str, bytes]):
    """Runs a server; `faults` takes PATH -> faults of its next requests."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.files, server.faults, server.requests = files, {}, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
