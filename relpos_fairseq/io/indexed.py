"""Read and write binarised text as fairseq does (`--dataset-impl mmap`): an index of sizes and places, and the ids.

PREFIX.idx    MAGIC, version 1, a code of the ids' type, the number of sentences, their sizes, where each begins
PREFIX.bin    the ids

Preparation does not import fairseq, whose classes take a sentence at a time, keep a Python integer for each, and assert
where a file is damaged.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from relpos_fairseq.io.reading import reading

MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
HEADER = np.dtype([("magic", "V9"), ("version", "<u8"), ("code", "u1"), ("items", "<u8")])
# The codes of fairseq's indexed_dataset.
KINDS = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
CODES = {np.dtype(kind): code for code, kind in KINDS.items()}
WHOLE = 1 << 28  # bytes of ids that are all looked at, in some 0.1 s
PART = 1 << 20  # ids
REMEDY = "binarise the text again, or copy both files"


@dataclass(frozen=True)
class Indexed:
    """A binarised text, whose index has been checked.

    Attributes:
        sizes: (N,) ids of each sentence.
        ids: all ids, where they lie.
    """

    sizes: np.ndarray
    ids: np.ndarray


def read_indexed(prefix: str | Path) -> Indexed:
    """Return a binarised text whose index and ids belong together.

    Raises:
        UserError: names the file, and what is wrong with it.
    """
    index, data = f"{prefix}.idx", f"{prefix}.bin"
    with reading(index, "an index of binarised text", REMEDY):
        length = os.path.getsize(index)
        if length < HEADER.itemsize:
            raise ValueError(f"it has {length:,} bytes, fewer than a header")
        header = np.fromfile(index, HEADER, 1)[0]
        if header["magic"].tobytes() != MAGIC or header["version"] != VERSION:
            raise ValueError("it begins with something else")
        code, count = int(header["code"]), int(header["items"])
        if code not in KINDS:
            raise ValueError(f"its ids are of a type {code} that is none")
        if length != HEADER.itemsize + 12 * count:
            raise ValueError(f"it has {length:,} bytes, which are not those of {count:,} sentences")
        kind, bytes_of = np.dtype(KINDS[code]), os.path.getsize(data)
        rest = np.memmap(index, np.uint8, "r", offset=HEADER.itemsize) if count else np.empty(0, np.uint8)
        sizes = rest[: 4 * count].view("<i4")
        starts = rest[4 * count :].view("<i8")
        ends = np.cumsum(sizes, dtype=np.int64) * kind.itemsize
        if count and (sizes.min() < 0 or starts[0] != 0 or not np.array_equal(starts[1:], ends[:-1])):
            raise ValueError("its sizes and places contradict each other")
    with reading(data, "the ids of its index", REMEDY):
        wanted = int(ends[-1]) if count else 0
        if bytes_of != wanted:
            raise ValueError(f"it has {bytes_of:,} bytes, and {index} asks for {wanted:,}")
        ids = np.memmap(data, kind, "r") if wanted else np.empty(0, kind)
    return Indexed(sizes, ids)


def write_index(file: BinaryIO, sizes: np.ndarray, kind: np.dtype) -> None:
    """Write the index of ids of a type, from the number of ids of each sentence (N,)."""
    ends = np.cumsum(sizes, dtype=np.int64) * kind.itemsize
    file.write(np.array([(MAGIC, VERSION, CODES[kind], len(sizes))], HEADER).tobytes())
    file.write(sizes.astype("<i4").tobytes())
    file.write((ends - sizes.astype(np.int64) * kind.itemsize).astype("<i8").tobytes())


def check_ids(prefix: str | Path, ids: np.ndarray, symbols: int) -> None:
    """Raise a UserError for ids that a dictionary of so many symbols has not; of a large text parts are looked at."""
    with reading(f"{prefix}.bin", "text of this dictionary", "binarise the text with it"):
        parts = [ids]
        if ids.nbytes > WHOLE:
            starts = np.linspace(0, len(ids) - PART, WHOLE // (PART * ids.itemsize), dtype=np.int64)
            parts = [ids[start : start + PART] for start in starts]
        least = min(int(part.min(initial=0)) for part in parts)
        most = max(int(part.max(initial=0)) for part in parts)
        if least < 0 or most >= symbols:
            raise ValueError(f"it has the id {least if least < 0 else most:,}, and the dictionary {symbols:,} symbols")
