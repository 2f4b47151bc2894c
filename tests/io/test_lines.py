"""Compressed text is read to its last byte."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.lines import BOM, lines_of, read_lines

PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("suffix", PACK)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(st.lists(st.text("ab\u00e9 ", max_size=40), max_size=30), min_size=1, max_size=4),
    zeros=st.booleans(),
)
def test_every_stream_is_read(suffix: str, lines: list, zeros: bool, tmp_path: Path) -> None:
    path = tmp_path / f"a{suffix}"
    streams = ["".join(f"{line}\n" for line in part) for part in lines]
    path.write_bytes((b"\0" * 8 * zeros).join(PACK[suffix](one.encode()) for one in streams) + b"\0" * 4 * zeros)
    assert list(read_lines(path)) == [line for part in lines for line in part]


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("place", [0, 2, -12])
def test_a_damaged_stream_after_a_whole_one_is_named(suffix: str, place: int, tmp_path: Path) -> None:
    """A bit of its header, of its mark, of its end; and an end that is missing."""
    path = tmp_path / f"a{suffix}"
    first, second = (PACK[suffix](text.encode() * 500) for text in ("one line\n", "another\n"))
    changed = bytearray(second)
    changed[place] ^= 8
    for broken in (second[:-5], changed):
        path.write_bytes(first + broken)
        with pytest.raises(UserError, match=f"^{path} "):
            list(read_lines(path))


def test_a_line_without_an_end_is_named(monkeypatch):
    with pytest.raises(UserError, match="^/dev/zero, line 1: longer than"):
        next(lines_of(Path("/dev/zero")))
    with open("/dev/zero") as zeros:
        monkeypatch.setattr("sys.stdin", zeros)
        for path in (None, Path("-")):
            with pytest.raises(UserError, match="^standard input, line 1: longer than"):
                next(lines_of(path))


def test_pipes_are_texts(tmp_path, monkeypatch):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    writer = threading.Thread(target=lambda: fifo.write_bytes(BOM + b"a\r\nb\n\n"))
    writer.start()
    assert list(lines_of(fifo)) == ["a", "b", ""]
    writer.join()
