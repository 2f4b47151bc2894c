"""Text as chunks for the workers: cut at lines, with the documents' starts, divided into shards."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.lines import Part, read_byte_parts, read_lines, read_parts
from relpos_fairseq.preparation.lm.settings import DOCUMENTS

CHUNK = 1 << 19  # characters that a worker gets at a time
HEADING = re.compile(r"= (?!= ).*(?<! =) =")  # WikiText: " = Title = ", but not " = = Section = = "


@dataclass
class Chunk:
    """What a worker gets."""

    shard: int = 0  # which shard it belongs to
    parts: list[Part] = field(default_factory=list)  # its lines
    starts: list[int] = field(default_factory=list)  # the places in `parts` where documents start
    size: int = 0  # its characters (or bytes)


def read_text(paths: Iterable[Path], level: str, on_bad_line: str, counts: dict | None = None) -> Iterator[Part]:
    """Stream the files' lines as a level needs them, and count dropped ones.

    "byte" has bytes, untouched, all others text; "byte" and "char" keep line feeds apart and cut
    long lines, others have whole lines. `on_bad_line` ("fail" or "drop") is for what is no UTF-8.
    """
    for path in paths:
        if level == "byte":
            yield from read_byte_parts(path)
        elif level == "char":
            yield from read_parts(path, on_bad_line, counts)
        else:
            # The line's own number: a dropped line counts too.
            seen = {} if counts is None else counts
            before = seen.get("lines", 0)
            for line in read_lines(path, on_bad_line, seen):
                yield Part(line, path, seen["lines"] - before)


def chunks(parts: Iterable[Part], documents: str = "none", shards: int = 1, total: int = 0) -> Iterator[Chunk]:
    """Collect lines into chunks; a chunk lies in one shard.

    Args:
        parts: The lines of all files.
        documents: What starts a document: "none", "blank" (lines before it) or "heading"
            (WikiText's). A file starts one too.
        shards: How many parts of about equal size; cut between documents, if there are any.
        total: The size of all parts as `size_of` gives it; needed with shards.
    """
    chunk, done = Chunk(), 0
    for part, starts in zip_starts(parts, documents):
        if shards > 1 and part.begins and (starts or documents == "none"):
            shard = min(done * shards // total, shards - 1)
            if shard != chunk.shard:
                if chunk.parts:
                    yield chunk
                chunk = Chunk(shard)
        if starts:
            chunk.starts.append(len(chunk.parts))
        chunk.parts.append(part)
        size = size_of(part)
        chunk.size += size
        done += size
        if chunk.size >= CHUNK:
            yield chunk
            chunk = Chunk(chunk.shard)
    if chunk.parts:
        yield chunk


def size_of(part: Part) -> int:
    """Return a part's characters or bytes with its line feed."""
    return len(part.text) + part.ends


def zip_starts(parts: Iterable[Part], documents: str) -> Iterator[tuple[Part, bool]]:
    """Pair every part with whether a document starts there."""
    if documents not in DOCUMENTS:
        raise PreparationError(f"documents must be one of {', '.join(DOCUMENTS)}, got {documents}")
    path, blank = None, True
    for part in parts:
        new_file = part.path is not path
        path = part.path
        if documents == "none":
            yield part, False
            continue
        text = part.text if isinstance(part.text, str) else part.text.decode("latin-1")
        text = text.strip() if part.begins else ""
        starts = part.begins and bool(text) and (blank or new_file)
        if documents == "heading":
            starts = starts and bool(HEADING.fullmatch(text))
        yield part, starts or new_file
        if part.begins:
            blank = not text


def measure(paths: Sequence[Path], level: str, on_bad_line: str) -> Counter:
    """Count the lines and the characters (or bytes) of files."""
    counts = Counter()
    for part in read_text(paths, level, on_bad_line):
        counts["lines"] += part.begins
        counts["size"] += size_of(part)
    return counts
