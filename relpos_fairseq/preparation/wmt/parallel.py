"""Streams parallel text in chunks of lines that workers take and give back as bytes."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.lines import count_lines, raw_lines

LINES = 2000  # of a chunk
BYTES = 1 << 22  # of a chunk, so that long lines make short chunks
LONGEST_SIDE = 1 << 18  # bytes of a training line; what is longer is cut, then dropped as too long
MALFORMED = "wrong number of columns"
BLOCK = re.compile(rb"[^-]+-b(\d+)-")  # of a CzEng sentence's number


@dataclass(frozen=True)
class Text:
    """One corpus in two files, or in two columns of one."""

    name: str  # what the table and the manifest call it
    paths: tuple[Path, Path]  # the source's and the target's file; the same twice for columns
    # the source's and the target's column of tab-separated lines; () for two files
    columns: tuple[int, ...] = ()
    skipped: frozenset[int] = frozenset()  # blocks of CzEng 1.6 that are not in CzEng 1.7

    def count(self) -> int:
        """Return the number of pairs; files with different numbers of lines are refused."""
        counts = [count_lines(path) for path in dict.fromkeys(self.paths)]
        if counts[0] != counts[-1]:
            source, target = self.paths
            raise PreparationError(
                f"parallel files must have equally many lines: {source} has {counts[0]:,}, {target} has {counts[-1]:,}"
            )
        return counts[0]

    def rows(self) -> Iterator[tuple[bytes, bytes] | None]:
        """Stream the pairs; None where a line has not enough columns."""
        if not self.columns:
            yield from zip(*(raw_lines(path, LONGEST_SIDE) for path in self.paths), strict=True)
            return
        for line in raw_lines(self.paths[0], LONGEST_SIDE):
            cells = line.split(b"\t")
            if len(cells) <= max(self.columns):
                yield None
            elif self.is_skipped(cells[0]):
                yield b"", b""
            else:
                yield cells[self.columns[0]], cells[self.columns[1]]

    def is_skipped(self, number: bytes) -> bool:
        """Return whether a sentence's number is of a block to leave out."""
        block = BLOCK.match(number) if self.skipped else None
        return block is not None and int(block.group(1)) in self.skipped


@dataclass(frozen=True)
class Chunk:
    """Some pairs of a text; a line's text never has a line feed."""

    text: Text  # where they are from
    numbers: Sequence[int]  # their lines' numbers in the files, from 1
    source: bytes  # the source's lines, joined by line feeds
    target: bytes  # the target's


def read_chunks(text: Text, wanted: Iterator[bool], counts: Counter, on_bad_line: str) -> Iterator[Chunk]:
    """Read the pairs of a text that are asked for, in `wanted` for each pair.

    Malformed lines are counted under MALFORMED, or an error where `on_bad_line` is "fail".
    """
    numbers, source, target, size = [], [], [], 0
    for number, (row, asked) in enumerate(zip(text.rows(), wanted, strict=False), start=1):
        if not asked:
            continue
        if row is None:
            if on_bad_line == "fail":
                raise PreparationError(
                    f"{text.paths[0]}, line {number}: needs {max(text.columns) + 1} tab-separated "
                    "columns; mend it or use --on-bad-line drop"
                )
            counts[MALFORMED] += 1
            continue
        numbers.append(number)
        source.append(row[0])
        target.append(row[1])
        size += len(row[0]) + len(row[1])
        if len(numbers) == LINES or size > BYTES:
            yield Chunk(text, numbers, b"\n".join(source), b"\n".join(target))
            numbers, source, target, size = [], [], [], 0
    if numbers:
        yield Chunk(text, numbers, b"\n".join(source), b"\n".join(target))


def read_blobs(paths: Iterable[Path]) -> Iterator[bytes]:
    """Stream whole files of ours, one after the other, as blocks of lines."""
    for path in paths:
        with path.open("rb") as file:
            while lines := list(islice(file, LINES)):
                yield b"".join(lines)


def map_lines(function, blob: bytes) -> bytes:
    """Apply a function to each line of a block; the result ends every line."""
    lines = blob.decode("utf-8").split("\n")
    if lines[-1] == "":
        lines.pop()
    return "".join([f"{function(line)}\n" for line in lines]).encode("utf-8")
