"""Plain text as a stream of sentences and ends of documents.

A document may be as long as its file, so nothing here holds one whole: a stream has a string for a
sentence and None for the end of a document.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.lines import read_lines

CHUNK_CHARACTERS = 1 << 18  # what one worker is given at a time
# Where a sentence may end: closing punctuation, what closes after it and space; the full stops of
# Chinese, Japanese, Hindi and Urdu need no space. No list of abbreviations: "Mr. Smith" is cut.
SENTENCE_END = re.compile(r"(?<=[.!?])[\"'”’)\]]*\s+|(?<=[。！？])[\"'”’」』）]*\s*|(?<=[।۔])\s*")
OPENING = "\"'“‘([「『（"


@dataclass(frozen=True)
class Reading:
    """How a file's lines are documents and sentences."""

    # what ends a document: `blank` (an empty line), `line` (each line is one), `file`, or a regular
    # expression that matches the line that begins one.  `json`: each line is an object whose `text`
    # is a document, as C4's files are
    documents: str = "blank"
    sentences: str = "line"  # `line` (a line is a sentence) or `split` (a line has several)
    on_bad_line: str = "fail"  # `fail` or `drop` where a line is not UTF-8

    def __post_init__(self) -> None:
        if self.sentences not in ("line", "split"):
            raise PreparationError(f"sentences must be 'line' or 'split', got {self.sentences!r}")
        try:
            re.compile(self.documents)
        except re.error as error:
            raise PreparationError(
                f"documents must be blank, line, file, json or a regular expression for a "
                f"document's first line, got {self.documents!r}: {error}"
            ) from None


def read_stream(path: Path, reading: Reading, counts: Counter | None = None) -> Iterator[str | None]:
    """The sentences of a file, plain or compressed, with None after the last of each document.

    A document without sentences is none. `counts` counts `documents`, `sentences`, `characters` and
    dropped lines.
    """
    counts = Counter() if counts is None else counts
    if reading.documents == "json":
        yield from _read_objects(path, reading, counts)
        return
    begins = None
    if reading.documents not in ("blank", "line", "file"):
        begins = re.compile(reading.documents)
    is_open = False
    for line in read_lines(path, on_bad_line=reading.on_bad_line, counts=counts):
        text = line.strip()
        ends = not text and reading.documents == "blank"
        if begins is not None and begins.search(line):
            ends = True
        if ends and is_open:
            counts["documents"] += 1
            is_open = False
            yield None
        if not text:
            continue
        for sentence in _sentences(text, reading):
            counts["sentences"] += 1
            counts["characters"] += len(sentence)
            is_open = True
            yield sentence
        if reading.documents == "line":
            counts["documents"] += 1
            is_open = False
            yield None
    if is_open:
        counts["documents"] += 1
        yield None


def _read_objects(path: Path, reading: Reading, counts: Counter) -> Iterator[str | None]:
    """Do as `read_stream` for JSON lines, each with a `text`, whose lines are or hold sentences."""
    lines = read_lines(path, on_bad_line=reading.on_bad_line, counts=counts)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)["text"]
            parts = text.split("\n")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise PreparationError(
                f"{path}, line {number} is no JSON object with a text: {line.strip()[:60]!r}: give "
                f"files of JSON lines, or another --documents than json"
            ) from None
        stripped = (part.strip() for part in parts)
        sentences = [one for part in stripped if part for one in _sentences(part, reading)]
        for sentence in sentences:
            counts["sentences"] += 1
            counts["characters"] += len(sentence)
            yield sentence
        if sentences:
            counts["documents"] += 1
            yield None


def in_chunks(stream: Iterable[str | None], characters: int = CHUNK_CHARACTERS) -> Iterator[list[str | None]]:
    """Cut a stream between sentences; where it is cut changes no result."""
    chunk, size = [], 0
    for item in stream:
        chunk.append(item)
        size += 1 if item is None else len(item)
        if size >= characters:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _sentences(text: str, reading: Reading) -> list[str]:
    if reading.sentences == "line":
        return [text]
    ends = [match.end() for match in SENTENCE_END.finditer(text)]
    # What goes on with a small letter is the same sentence.
    ends = [end for end in ends if not text[end:].lstrip(OPENING)[:1].islower()]
    parts = (text[i:j].strip() for i, j in itertools.pairwise([0, *ends, len(text)]))
    return [part for part in parts if part]
