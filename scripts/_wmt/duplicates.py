"""Drops pairs that came before, in bounded memory.

Cleaning leaves one fixed record a pair on disk. Hashes are dealt with in buckets (by remainder),
one at a time, each small enough for memory; what stays in memory is one bit a pair. A pair is a
duplicate if the 64-bit hash of both sides together came before: two different pairs among N share
one with probability N²/2⁶⁵ (forty million pairs: 0.00004).
"""

from collections.abc import Iterator
from itertools import compress, islice
from pathlib import Path

import numpy as np

from .clean import RECORD
from .parallel import LINES, Outputs

BUCKET = 1 << 16  # pairs of a bucket, on average
READ = 1 << 13  # records read at a time, and bytes of bits


def read_records(paths: list[Path]) -> Iterator[tuple[int, np.ndarray]]:
    """Streams all records, with the number of the first of each block."""
    start = 0
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(READ * RECORD.itemsize):
                records = np.frombuffer(block, RECORD)
                yield start, records
                start += len(records)


def first_occurrences(paths: list[Path]) -> np.ndarray:
    """Returns one bit a pair, packed: whether no earlier pair is the same."""
    total = sum(path.stat().st_size for path in paths) // RECORD.itemsize
    keep = np.zeros(-(-total // 8), np.uint8)
    buckets = max(1, -(-total // BUCKET))
    for bucket in range(buckets):
        hashes, numbers = [], []
        for start, records in read_records(paths):
            chosen = np.flatnonzero(records["hash"] % np.uint64(buckets) == bucket)
            hashes.append(records["hash"][chosen])
            numbers.append(chosen + start)
        _, first = np.unique(np.concatenate(hashes or [[]]), return_index=True)
        kept = np.concatenate(numbers or [[]])[first].astype(np.int64)
        np.bitwise_or.at(keep, kept >> 3, (1 << (kept & 7)).astype(np.uint8))
    return keep


def drop_duplicates(
    parts: list[tuple[Path, Path]], records: list[Path], outputs: tuple[Path, Path]
) -> dict[str, list[int]]:
    """Joins the shards' files without the pairs that came before.

    Args:
        parts: Source and target lines of each shard.
        records: Records of each shard.
        outputs: Source and target lines.

    Returns:
        Pairs, source words and target words, "duplicate" and "kept".
    """
    keep = first_occurrences(records)
    counts = count(keep, records)
    with Outputs(outputs) as files:
        for side, file in enumerate(files):
            flags = bits(keep)
            for part in parts:
                with part[side].open("rb") as lines:
                    while block := list(islice(lines, LINES)):
                        file.writelines(compress(block, islice(flags, len(block))))
    return counts


def bits(packed: np.ndarray) -> Iterator[int]:
    """Streams the bits, in order."""
    for start in range(0, len(packed), READ):
        yield from np.unpackbits(packed[start : start + READ], bitorder="little").tolist()


def count(keep: np.ndarray, records: list[Path]) -> dict[str, list[int]]:
    """Counts pairs and words of those kept and those dropped."""
    totals = np.zeros((2, 3), np.int64)
    flags = bits(keep)
    for _, block in read_records(records):
        kept = np.fromiter(islice(flags, len(block)), bool, len(block))
        for row, chosen in enumerate((~kept, kept)):
            words = block["words"][chosen].sum(0, dtype=np.int64)
            totals[row] += (chosen.sum(), *words)
    return dict(zip(("duplicate", "kept"), totals.tolist(), strict=True))
