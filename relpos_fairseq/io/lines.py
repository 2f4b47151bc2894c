"""Read text line by line: plain or compressed, with any line ends, in checked UTF-8."""

import bz2
import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import is_stream
from relpos_fairseq.io.progress import hush
from relpos_fairseq.io.reading import ordinary

BOM = b"\xef\xbb\xbf"
LONGEST_LINE = 1 << 26  # bytes of a line; a longer one is no text, and would not fit memory in time
PART = 1 << 20  # bytes after which `read_parts` cuts a line
ON_BAD_LINE = ("fail", "drop")


class _Streams(io.RawIOBase):
    """The bytes of a file's compressed streams, to its last byte: bz2 and lzma drop all from a damaged stream on.

    Args:
        begin: makes what decompresses a stream.
        path: the file.
    """

    def __init__(self, begin: Callable[[], Any], path: Path) -> None:
        self.begin, self.now, self.file = begin, begin(), path.open("rb")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        data = b""
        while not data:
            given = b""
            if self.now.eof:
                given = self.now.unused_data.lstrip(b"\0")  # which may stand between streams
                while not given and (more := self.file.read(PART)):
                    given = more.lstrip(b"\0")
                if not given:
                    return 0
                self.now = self.begin()
            elif self.now.needs_input and not (given := self.file.read(PART)):
                raise EOFError("it ends within a stream")
            data = self.now.decompress(given, len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _opener(begin: Callable[[], Any]) -> Callable[[Path, str], BinaryIO]:
    return lambda path, mode: io.BufferedReader(_Streams(begin, path), PART)


OPENERS: dict[str, Callable] = {
    ".gz": gzip.open,
    ".bz2": _opener(bz2.BZ2Decompressor),
    ".xz": _opener(lzma.LZMADecompressor),
}
COMPRESSED = ("", *OPENERS)  # endings under which a file is sought


def read_lines(
    path: str | Path,
    on_bad_line: str = "fail",
    counts: MutableMapping[str, int] | None = None,
    longest: int = LONGEST_LINE,
) -> Iterator[str]:
    r"""Stream the lines of a text file without their ends.

    A byte order mark is removed, `\r\n` ends a line as `\n` does; nothing else does (no lone
    `\r`, no U+2028). Compression is told by `.gz`, `.bz2` and `.xz`.

    Args:
        path: The file, UTF-8.
        on_bad_line: "fail" at a line that is not UTF-8 or too long, or "drop" it.
        counts: Counts "lines" (all lines), "invalid_utf8" and "too_long" (dropped lines).
        longest: The most bytes of a line.

    Raises:
        UserError: No such file, a damaged one, or a bad line under "fail"; the message has
            the file and the line's number.
    """
    if on_bad_line not in ON_BAD_LINE:
        raise UserError(f"on_bad_line must be fail or drop, got {on_bad_line!r}")
    for number, raw in enumerate(raw_lines(path, longest), start=1):
        count_line(counts, "lines")
        line = decode(path, number, raw, longest, on_bad_line, counts)
        if line is not None:
            yield line


def lines_of(path: Path | None) -> Iterator[str]:
    r"""Stream the lines of a file, or of standard input, without their ends (`\n`, `\r\n`); they must be UTF-8."""
    if path is not None and str(path) != "-" and not is_stream(path):
        yield from read_lines(path)
        return
    stream: AbstractContextManager[BinaryIO]
    if path is None or str(path) == "-":
        if sys.stdin.isatty():
            hush()
        path, stream = Path("standard input"), nullcontext(sys.stdin.buffer)
    else:
        stream = path.open("rb")  # read once, to its end or the first bad line
    with stream as file:
        for number, raw in enumerate(_raw_lines(file, LONGEST_LINE), start=1):
            if (line := decode(path, number, raw, LONGEST_LINE, "fail")) is not None:
                yield line


class Part(NamedTuple):
    """A line, or a part of a very long one."""

    text: str | bytes  # characters or bytes, without the line feed
    path: Path
    number: int  # the line's number in the file, from 1
    begins: bool = True  # whether the line begins here
    ends: bool = True  # whether a line feed follows


def read_byte_parts(path: Path) -> Iterator[Part]:
    """Stream a file's bytes as they are, long lines in parts."""
    number, begins = 1, True
    with open_binary(path) as file:
        while raw := file.readline(PART):
            ends = raw.endswith(b"\n")
            yield Part(raw.removesuffix(b"\n"), path, number, begins, ends)
            number, begins = number + ends, ends


def read_parts(path: Path, on_bad_line: str, counts: MutableMapping[str, int] | None = None) -> Iterator[Part]:
    r"""Stream a file's characters as `read_lines` does, but long lines in parts.

    Only the last part tells whether a line feed ends the file.
    """
    number, begins, carry, first = 1, True, b"", True
    with open_binary(path) as file:
        while (read := file.readline(PART)) or carry:
            raw, carry = carry + read, b""
            if first:
                raw, first = raw.removeprefix(BOM), False
                if not raw:
                    return  # a byte order mark and nothing more
            ends = raw.endswith(b"\n")
            if ends:
                raw = raw[:-1].removesuffix(b"\r")
            elif read:
                raw, carry = cut_at_character(raw)
            text = decode(path, number, raw, LONGEST_LINE, on_bad_line, counts)
            if text is not None:
                yield Part(text, path, number, begins, ends)
            number, begins = number + ends, ends


def cut_at_character(raw: bytes) -> tuple[bytes, bytes]:
    r"""Cut bytes so that no character, and no `\r\n`, is cut in two."""
    if raw.endswith(b"\r"):
        return raw[:-1], raw[-1:]
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.end == len(raw) and error.reason == "unexpected end of data":
            return raw[: error.start], raw[error.start :]
    return raw, b""


def plain_lines(*paths: Path) -> Iterator[bytes]:
    """Stream the lines of files that are not compressed, one file after another, with their ends."""
    for path in paths:
        with path.open("rb") as file:
            yield from file


def in_blocks(lines: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Join lines, `size` at a time."""
    while block := b"".join(islice(lines, size)):
        yield block


def count_lines(path: str | Path) -> int:
    """Count the lines of a plain or compressed file; an unfinished last one counts."""
    count, last = 0, b"\n"
    with open_binary(path) as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:] if block != BOM else last
    return count + (last != b"\n")


def raw_lines(path: str | Path, longest: int = LONGEST_LINE) -> Iterator[bytes]:
    """Stream lines as bytes; of one that is too long only `longest + 1` bytes."""
    with open_binary(path) as file:
        yield from _raw_lines(file, longest)


def _raw_lines(file: BinaryIO, longest: int) -> Iterator[bytes]:
    first = True
    while raw := file.readline(longest + 3):
        if first and raw.startswith(BOM):
            raw = raw[len(BOM) :]
            if not raw:
                return  # a mark and nothing more
        first = False
        terminated = raw.endswith(b"\n")
        body = raw.removesuffix(b"\n")
        yield (body.removesuffix(b"\r") if terminated else body)[: longest + 1]
        if not terminated and len(raw) > longest:  # of a device there is no end, and whom it matters has stopped
            while (rest := file.readline(PART)) and not rest.endswith(b"\n"):
                pass


def decode(
    path: str | Path,
    number: int,
    raw: bytes,
    longest: int,
    on_bad_line: str,
    counts: MutableMapping[str, int] | None = None,
) -> str | None:
    """Decode a line; a bad one is counted and dropped (None), or an error."""
    problem = "too_long"
    said = f"longer than {longest:,} bytes; drop such lines or cut them"
    if len(raw) <= longest:
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError as error:
            value = raw[error.start : error.start + 4].hex(" ")
            hint = " (this looks like UTF-16)" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
            said = f"invalid UTF-8 at byte {error.start + 1} ({value}){hint}; drop such lines or "
            problem, said = "invalid_utf8", f"{said}convert it"
    if on_bad_line != "drop":
        raise UserError(f"{path}, line {number}: {said}")
    count_line(counts, problem)
    return None


def count_line(counts: MutableMapping[str, int] | None, key: str) -> None:
    """Count one."""
    if counts is not None:
        counts[key] = counts.get(key, 0) + 1


@contextmanager
def open_binary(path: str | Path, suffix: str | None = None) -> Iterator[BinaryIO]:
    """Open a plain or compressed file for reading; `suffix` says how, where its own does not.

    Raises:
        UserError: It is not there, or damaged (found out while reading).
    """
    path = Path(path)
    try:
        with OPENERS.get(suffix or path.suffix, open)(ordinary(path), "rb") as file:
            yield file
    except (FileNotFoundError, IsADirectoryError) as error:
        raise UserError(f"{path} is not a file") from error
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path} is truncated or damaged ({error}): get it again") from error
    except (gzip.BadGzipFile, OSError) as error:
        # bz2 has no class of its own, but its errors have no number.
        if isinstance(error, gzip.BadGzipFile) or error.errno is None:
            message = f"{path} is no {path.suffix} file or damaged ({error}): get it again"
            raise UserError(message) from error
        raise
