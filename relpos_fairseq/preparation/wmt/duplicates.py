"""Drops pairs that came before, in bounded memory and time linear in their number.

Cleaning leaves one fixed record a pair on disk. Hashes are sorted into buckets (by remainder) in an
unnamed file, and the buckets dealt with one at a time, each small enough for memory; what stays in
memory is one bit a pair. A pair is a duplicate if the 64-bit hash of both sides together came
before: two different pairs among N share one with probability N²/2⁶⁵ (forty million pairs:
0.00004).
"""

import tempfile
from collections.abc import Iterator
from itertools import compress, islice
from pathlib import Path
from typing import BinaryIO

import numpy as np

from relpos_fairseq.engine.files import named_on_disk_full, open_together
from relpos_fairseq.preparation.wmt.clean import RECORD
from relpos_fairseq.preparation.wmt.parallel import LINES

BUCKET = 1 << 16  # pairs of a bucket, on average
READ = 1 << 13  # records read at a time, and bytes of bits
SORTED = 1 << 15  # records sorted into buckets at a time: enough for few, long writes
# What a bucket has of every pair: its hash and its place among all pairs.
ENTRY = np.dtype([("hash", "<u8"), ("number", "<u8")])


def read_records(paths: list[Path], size: int = READ) -> Iterator[tuple[int, np.ndarray]]:
    """Stream all records in blocks of at most `size`, with the number of the first of each."""
    start = 0
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(size * RECORD.itemsize):
                records = np.frombuffer(block, RECORD)
                yield start, records
                start += len(records)


def first_occurrences(paths: list[Path], folder: Path) -> np.ndarray:
    """Return one bit a pair, packed: whether no earlier pair in these RECORDs is the same.

    `folder` takes the buckets, in a file without a name, which no kill can leave behind.
    """
    total = sum(path.stat().st_size for path in paths) // RECORD.itemsize
    keep = np.zeros(-(-total // 8), np.uint8)
    folder.mkdir(parents=True, exist_ok=True)
    with named_on_disk_full(folder / "buckets"), tempfile.TemporaryFile(dir=folder) as file:
        sizes = sort_into_buckets(paths, max(1, -(-total // BUCKET)), file)
        file.seek(0)
        for size in sizes.tolist():
            entries = np.frombuffer(file.read(size * ENTRY.itemsize), ENTRY)
            _, first = np.unique(entries["hash"], return_index=True)
            kept = entries["number"][first].astype(np.int64)
            np.bitwise_or.at(keep, kept >> 3, (1 << (kept & 7)).astype(np.uint8))
    return keep


def sort_into_buckets(paths: list[Path], buckets: int, file: BinaryIO) -> np.ndarray:
    """Write an ENTRY a pair, bucket after bucket, each in the pairs' order, to an empty file.

    Returns:
        Each bucket's number of pairs.
    """
    sizes = np.zeros(buckets, np.int64)
    for _, records in read_records(paths, SORTED):
        sizes += np.bincount(bucket_of(records, buckets), minlength=buckets)
    places = np.cumsum(sizes) - sizes  # where each bucket's next entry goes
    for start, records in read_records(paths, SORTED):
        bucket = bucket_of(records, buckets)
        order = np.argsort(bucket, kind="stable")
        entries = np.empty(len(records), ENTRY)
        entries["hash"] = records["hash"][order]
        entries["number"] = order + start
        found, first = np.unique(bucket[order], return_index=True)
        for number, part in zip(found, np.split(entries, first[1:]), strict=True):
            file.seek(int(places[number]) * ENTRY.itemsize)
            file.write(part)
            places[number] += len(part)
    return sizes


def bucket_of(records: np.ndarray, buckets: int) -> np.ndarray:
    """Return the number of each record's bucket."""
    return (records["hash"] % np.uint64(buckets)).astype(np.int64)


def drop_duplicates(
    parts: list[tuple[Path, Path]], records: list[Path], outputs: tuple[Path, Path]
) -> dict[str, list[int]]:
    """Join the shards' source and target lines without the pairs that came before.

    Returns:
        Pairs, source words and target words, "duplicate" and "kept".
    """
    keep = first_occurrences(records, outputs[0].parent)
    counts = count(keep, records)
    with open_together(*outputs) as files:
        for side, file in enumerate(files):
            flags = bits(keep)
            for part in parts:
                with part[side].open("rb") as lines:
                    while block := list(islice(lines, LINES)):
                        file.writelines(compress(block, islice(flags, len(block))))
    return counts


def bits(packed: np.ndarray) -> Iterator[int]:
    """Stream the bits, in order."""
    for start in range(0, len(packed), READ):
        yield from np.unpackbits(packed[start : start + READ], bitorder="little").tolist()


def count(keep: np.ndarray, records: list[Path]) -> dict[str, list[int]]:
    """Count pairs and words of those kept and those dropped."""
    totals = np.zeros((2, 3), np.int64)
    flags = bits(keep)
    for _, block in read_records(records):
        kept = np.fromiter(islice(flags, len(block)), bool, len(block))
        for row, chosen in enumerate((~kept, kept)):
            words = block["words"][chosen].sum(0, dtype=np.int64)
            totals[row] += (chosen.sum(), *words)
    return dict(zip(("duplicate", "kept"), totals.tolist(), strict=True))
