"""Text as chunks for the workers: cut at lines, with the documents' starts, divided into shards."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.lines import (
    BOM,
    LONGEST_LINE,
    count_line,
    decode_checked,
    describe,
    open_binary,
    read_lines,
)

CHUNK = 1 << 19  # characters that a worker gets at a time
PIECE = 1 << 20  # bytes after which a line is cut where line feeds are tokens like any other
HEADING = re.compile(r"= (?!= ).*(?<! =) =")  # WikiText: " = Title = ", but not " = = Section = = "
DOCUMENTS = ("none", "blank", "heading")


class Piece(NamedTuple):
    """A line, or a part of a very long one.

    Attributes:
        text: Characters or bytes, without the line feed.
        path: The file.
        number: The line's number in the file, from 1.
        begins: Whether the line begins here.
        ends: Whether a line feed follows.
    """

    text: str | bytes
    path: Path
    number: int
    begins: bool = True
    ends: bool = True


@dataclass
class Chunk:
    """What a worker gets.

    Attributes:
        shard: Which shard it belongs to.
        pieces: Its lines.
        starts: The places in `pieces` where documents start.
        size: Its characters (or bytes).
    """

    shard: int = 0
    pieces: list[Piece] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    size: int = 0


def read_pieces(
    paths: Iterable[Path], level: str, on_bad_line: str, counts: dict | None = None
) -> Iterator[Piece]:
    """Streams the files' lines as a level needs them: bytes untouched, text decoded.

    Args:
        paths: The files, plain or compressed.
        level: "byte" and "char" keep line feeds apart and cut long lines; others have whole lines.
        on_bad_line: "fail" or "drop", for lines that are not UTF-8.
        counts: Counts dropped lines.
    """
    for path in paths:
        if level == "byte":
            yield from byte_pieces(path)
        elif level == "char":
            yield from char_pieces(path, on_bad_line, counts)
        else:
            # The line's own number: a dropped line counts too.
            seen = {} if counts is None else counts
            before = seen.get("lines", 0)
            for line in read_lines(path, on_bad_line, seen):
                yield Piece(line, path, seen["lines"] - before)


def byte_pieces(path: Path) -> Iterator[Piece]:
    """Streams a file's bytes as they are."""
    number, begins = 1, True
    with open_binary(path) as file:
        while raw := file.readline(PIECE):
            ends = raw.endswith(b"\n")
            yield Piece(raw.removesuffix(b"\n"), path, number, begins, ends)
            number, begins = number + ends, ends


def char_pieces(path: Path, on_bad_line: str, counts: dict | None) -> Iterator[Piece]:
    r"""Streams a file's characters; `\r\n` is read as `\n`, a byte order mark is removed."""
    number, begins, carry, first = 1, True, b"", True
    with open_binary(path) as file:
        while (read := file.readline(PIECE)) or carry:
            raw, carry = carry + read, b""
            if first:
                raw, first = raw.removeprefix(BOM), False
                if not raw:
                    return  # a byte order mark and nothing more
            ends = raw.endswith(b"\n")
            if ends:
                raw = raw[:-1].removesuffix(b"\r")
            elif read:
                raw, carry = at_character(raw)
            problem, text = decode_checked(raw, LONGEST_LINE)
            if problem is None:
                yield Piece(text, path, number, begins, ends)
            elif on_bad_line == "drop":
                count_line(counts, problem)
            else:
                raise PreparationError(describe(path, number, raw, problem, LONGEST_LINE))
            number, begins = number + ends, ends


def at_character(raw: bytes) -> tuple[bytes, bytes]:
    r"""Cuts bytes so that no character, and no `\r\n`, is cut in two."""
    if raw.endswith(b"\r"):
        return raw[:-1], raw[-1:]
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.end == len(raw) and error.reason == "unexpected end of data":
            return raw[: error.start], raw[error.start :]
    return raw, b""


def chunks(
    pieces: Iterable[Piece], documents: str = "none", shards: int = 1, total: int = 0
) -> Iterator[Chunk]:
    """Collects lines into chunks; a chunk lies in one shard.

    Args:
        pieces: The lines of all files.
        documents: What starts a document: "none", "blank" (lines before it) or "heading"
            (WikiText's). A file starts one too.
        shards: How many parts of about equal size; cut between documents, if there are any.
        total: The size of all pieces as `size_of` gives it; needed with shards.
    """
    chunk, done = Chunk(), 0
    for piece, starts in zip_starts(pieces, documents):
        if shards > 1 and piece.begins and (starts or documents == "none"):
            shard = min(done * shards // total, shards - 1)
            if shard != chunk.shard:
                if chunk.pieces:
                    yield chunk
                chunk = Chunk(shard)
        if starts:
            chunk.starts.append(len(chunk.pieces))
        chunk.pieces.append(piece)
        size = size_of(piece)
        chunk.size += size
        done += size
        if chunk.size >= CHUNK:
            yield chunk
            chunk = Chunk(chunk.shard)
    if chunk.pieces:
        yield chunk


def size_of(piece: Piece) -> int:
    """Returns a piece's characters or bytes with its line feed."""
    return len(piece.text) + piece.ends


def zip_starts(pieces: Iterable[Piece], documents: str) -> Iterator[tuple[Piece, bool]]:
    """Pairs every piece with whether a document starts there."""
    if documents not in DOCUMENTS:
        raise PreparationError(f"documents must be one of {', '.join(DOCUMENTS)}, got {documents}")
    path, blank = None, True
    for piece in pieces:
        new_file = piece.path is not path
        path = piece.path
        if documents == "none":
            yield piece, False
            continue
        text = piece.text if isinstance(piece.text, str) else piece.text.decode("latin-1")
        text = text.strip() if piece.begins else ""
        starts = piece.begins and bool(text) and (blank or new_file)
        if documents == "heading":
            starts = starts and bool(HEADING.fullmatch(text))
        yield piece, starts or new_file
        if piece.begins:
            blank = not text


def measure(paths: Sequence[Path], level: str, on_bad_line: str) -> Counter:
    """Counts the lines and the characters (or bytes) of files."""
    counts = Counter()
    for piece in read_pieces(paths, level, on_bad_line):
        counts["lines"] += piece.begins
        counts["size"] += size_of(piece)
    return counts


def describe_place(piece: Piece) -> str:
    """Names a piece's file and line."""
    return f"{piece.path}, line {piece.number}"
