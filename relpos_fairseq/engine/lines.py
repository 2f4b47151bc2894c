"""Text of any origin, line by line: plain or compressed, any line ends, checked encoding."""

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from relpos_fairseq.engine.errors import PreparationError

BOM = b"\xef\xbb\xbf"
LONGEST_LINE = 1 << 26  # bytes of a line; a longer one is no text, and would not fit memory in time
OPENERS: dict[str, Callable] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
ON_BAD_LINE = ("fail", "drop")


def read_lines(
    path: str | Path,
    on_bad_line: str = "fail",
    counts: MutableMapping[str, int] | None = None,
    longest: int = LONGEST_LINE,
) -> Iterator[str]:
    r"""Streams the lines of a text file without their ends.

    A byte order mark is removed, `\r\n` ends a line as `\n` does; nothing else does (no lone
    `\r`, no U+2028). Compression is told by `.gz`, `.bz2` and `.xz`.

    Args:
        path: The file, UTF-8.
        on_bad_line: What becomes of a line that is not UTF-8 or too long: "fail" or "drop".
        counts: Counts "lines" (all of them), "invalid_utf8" and "too_long" (those dropped).
        longest: The most bytes of a line.

    Raises:
        PreparationError: No such file, a damaged one, or a bad line under "fail"; the message has
            the file and the line's number.
    """
    if on_bad_line not in ON_BAD_LINE:
        raise PreparationError(f"on_bad_line must be fail or drop, got {on_bad_line!r}")
    for number, raw in enumerate(raw_lines(path, longest), start=1):
        count_line(counts, "lines")
        problem, line = decode_checked(raw, longest)
        if problem is None:
            yield line
        elif on_bad_line == "drop":
            count_line(counts, problem)
        else:
            raise PreparationError(describe(path, number, raw, problem, longest))


def read_parallel(
    paths: Sequence[str | Path],
    on_bad_line: str = "fail",
    counts: MutableMapping[str, int] | None = None,
    longest: int = LONGEST_LINE,
) -> Iterator[tuple[str, ...]]:
    """Streams the lines of files that belong together; a bad line drops its whole row.

    Args:
        paths: The files.
        on_bad_line: As in `read_lines`.
        counts: As in `read_lines`, in rows.
        longest: As in `read_lines`.

    Raises:
        PreparationError: As in `read_lines`, or the files have different numbers of lines; the
            message names every file and its number.
    """
    streams = [raw_lines(path, longest) for path in paths]
    number = 0
    while True:
        row = [next(stream, None) for stream in streams]
        if None in row:
            break
        number += 1
        count_line(counts, "lines")
        decoded = [decode_checked(raw, longest) for raw in row]
        bad = [index for index, (problem, _) in enumerate(decoded) if problem is not None]
        if not bad:
            yield tuple(line for _, line in decoded)
        elif on_bad_line == "drop":
            count_line(counts, decoded[bad[0]][0])
        else:
            first = bad[0]
            problem = decoded[first][0]
            raise PreparationError(describe(paths[first], number, row[first], problem, longest))
    if any(raw is not None for raw in row):
        lengths = [
            number + (raw is not None) + sum(1 for _ in stream)
            for raw, stream in zip(row, streams, strict=True)
        ]
        named = ", ".join(f"{path}: {n:,} lines" for path, n in zip(paths, lengths, strict=True))
        raise PreparationError(f"parallel files must have equally many lines; {named}")


def count_lines(path: str | Path) -> int:
    """Counts the lines of a plain or compressed file; an unfinished last one counts."""
    count, last = 0, b"\n"
    with open_binary(path) as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:] if block != BOM else last
    return count + (last != b"\n")


def raw_lines(path: str | Path, longest: int = LONGEST_LINE, ends: bool = False) -> Iterator[bytes]:
    r"""Streams lines as bytes; of one that is too long only `longest + 1` bytes.

    Args:
        path: The file.
        longest: The most bytes of a line.
        ends: Whether to keep the `\n` (never a `\r` before it).
    """
    with open_binary(path) as file:
        first = True
        while raw := file.readline(longest + 3):
            if first and raw.startswith(BOM):
                raw = raw[len(BOM) :]
                if not raw:
                    return  # a mark and nothing more
            first = False
            terminated = raw.endswith(b"\n")
            if not terminated and len(raw) > longest:
                while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                    pass
                terminated = rest.endswith(b"\n")
            body = raw.removesuffix(b"\n")
            if terminated:
                body = body.removesuffix(b"\r")
            yield body[: longest + 1] + (b"\n" if ends and terminated else b"")


def decode_checked(raw: bytes, longest: int) -> tuple[str | None, str]:
    """Returns a line's problem (or None) and its text."""
    if len(raw) > longest:
        return "too_long", ""
    try:
        return None, raw.decode("utf-8")
    except UnicodeDecodeError:
        return "invalid_utf8", ""


def describe(path: str | Path, number: int, raw: bytes, problem: str, longest: int) -> str:
    """Says what is wrong with a line, and what helps."""
    if problem == "too_long":
        return f"{path}, line {number}: longer than {longest:,} bytes; drop such lines or cut them"
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        value = raw[error.start : error.start + 4].hex(" ")
        where = f"byte {error.start + 1} ({value})"
        hint = " (this looks like UTF-16)" if raw[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
    return f"{path}, line {number}: invalid UTF-8 at {where}{hint}; drop such lines or convert it"


def count_line(counts: MutableMapping[str, int] | None, key: str) -> None:
    """Counts one."""
    if counts is not None:
        counts[key] = counts.get(key, 0) + 1


@contextmanager
def open_binary(path: str | Path, suffix: str | None = None) -> Iterator[BinaryIO]:
    """Opens a plain or compressed file for reading.

    Args:
        path: The file.
        suffix: Says the compression, where the file's own does not.

    Raises:
        PreparationError: It is not there, or damaged (found out while reading).
    """
    path = Path(path)
    try:
        with OPENERS.get(suffix or path.suffix, open)(path, "rb") as file:
            yield file
    except (FileNotFoundError, IsADirectoryError) as error:
        raise PreparationError(f"{path} is not a file") from error
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise PreparationError(f"{path} is truncated or damaged ({error}): get it again") from error
    except (gzip.BadGzipFile, OSError) as error:
        if (
            isinstance(error, gzip.BadGzipFile) or error.errno is None
        ):  # bz2 has no class of its own
            message = f"{path} is no {path.suffix} file or damaged ({error}): get it again"
            raise PreparationError(message) from error
        raise
