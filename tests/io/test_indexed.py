"""Binarised text: an index that contradicts itself or its ids is one line, and nothing else changes what is read."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.indexed import MAGIC, check_ids, read_indexed

SIZES = [3, 0, 2, 1]


def write(prefix: Path, ids: list[int]) -> bytes:
    """Write a text of four sentences; returns its index."""
    places = np.cumsum([0, *SIZES[:-1]]) * 2
    header = MAGIC + struct.pack("<QBQ", 1, 8, len(SIZES))
    index = header + np.array(SIZES, np.int32).tobytes() + places.astype(np.int64).tobytes()
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(np.array(ids, np.uint16).tobytes())
    return index


def test_a_text_is_read_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path / "a", [4, 5, 6, 7, 8, 2])
    found = read_indexed(tmp_path / "a")
    assert (found.sizes.tolist(), found.ids.tolist()) == (SIZES, [4, 5, 6, 7, 8, 2])
    check_ids(tmp_path / "a", found.ids, 9)
    with pytest.raises(UserError, match="a.bin is not text of this dictionary .it has the id 8, and the dictionary 8 "):
        check_ids(tmp_path / "a", found.ids, 8)


@given(st.integers(0, 73), st.binary(max_size=9), st.integers(0, 9))
@settings(deadline=None)
def test_a_damaged_index_is_one_line(tmp_path_factory, at: int, new: bytes, cut: int) -> None:
    prefix = tmp_path_factory.getbasetemp() / "damaged"
    index = write(prefix, [4, 5, 6, 7, 8, 2])
    damaged = index[:at] + new + index[at + cut :]
    Path(f"{prefix}.idx").write_bytes(damaged)
    try:
        found = read_indexed(prefix)
    except UserError as error:
        assert str(prefix) in str(error) and "\n" not in str(error)
    else:
        assert found.ids.nbytes == 12 and int(found.sizes.sum()) == len(found.ids)


@pytest.mark.parametrize("bytes_of", [0, 11, 13])
def test_ids_of_another_length_are_one_line(tmp_path: Path, bytes_of: int) -> None:
    write(tmp_path / "a", [4, 5, 6, 7, 8, 2])
    Path(tmp_path / "a.bin").write_bytes(bytes(bytes_of))
    with pytest.raises(UserError, match=f"a.bin is not .*{bytes_of} bytes"):
        read_indexed(tmp_path / "a")
