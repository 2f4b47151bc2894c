"""Small parallel text for tests, as files and as the archives of a small WMT."""

from __future__ import annotations

import gzip
import hashlib
import io
import random
import tarfile
from pathlib import Path

from helpers.faulty_server import Server

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
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, text in members.items():
            content = text.encode()
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return gzip.compress(buffer.getvalue(), mtime=0)  # the same bytes whenever it is made


def archives(folder: Path) -> dict[str, bytes]:
    """Makes a small WMT: two training archives and two test sets."""

    def text(name: str, language: str) -> str:
        return (folder / f"{name}.{language}").read_text()

    def sgml(name: str, language: str) -> str:
        lines = text(name, language).splitlines()
        rows = "\n".join(f'<seg id="{n}"> {line} </seg>' for n, line in enumerate(lines, start=1))
        return f'<refset>\n<doc docid="d">\n{rows}\n</doc>\n</refset>\n'

    halves = [{k: "".join(text("train", k).splitlines(True)[part::2]) for k in WORDS} for part in (0, 1)]
    return {
        "first.tgz": pack({f"training/first.de-en.{k}": half for k, half in halves[0].items()}),
        "second.tgz": pack({f"second.de-en.{k}": half for k, half in halves[1].items()}),
        "dev.tgz": pack({f"test/newstest2013-src.{k}.sgm": sgml("valid", k) for k in WORDS}),
        "test.tgz": pack({f"test/newstest2015-{k}.sgm": sgml("test", k) for k in WORDS}),
    }


def md5(content: bytes) -> str:
    """Returns a hash as sacrebleu declares it."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def serve_archives(server: Server, files: dict[str, bytes]) -> None:
    """Serves training archives from two mirrors, test sets from one, without faults."""
    for name, data in files.items():
        for folder in ("one/", "two/") if name in ("first.tgz", "second.tgz") else ("",):
            server.put(f"{folder}{name}", data)


def spoil(server: Server, name: str, fault: str) -> None:
    """Lets a file have a fault from now on."""
    file = server.files[f"/{name}"]
    if fault == "corrupt":
        file.data = file.data[:40] + bytes(byte ^ 1 for byte in file.data[40:60]) + file.data[60:]
    else:
        kinds = {"cut": ("stop", len(file.data) // 2), "404": ("status", 404), "html": ("html",)}
        file.faults = [kinds[fault]] * 9
