"""The stage that normalises and filters training pairs, several chunks at a time."""

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path

import numpy as np

from relpos_fairseq.engine.errors import PreparationError
from relpos_fairseq.engine.files import open_together
from relpos_fairseq.engine.pool import ordered_map
from relpos_fairseq.engine.progress import progress
from relpos_fairseq.preparation.wmt.filters import REASONS, Filter
from relpos_fairseq.preparation.wmt.normalise import Normaliser
from relpos_fairseq.preparation.wmt.parallel import LONGEST_SIDE, MALFORMED, Chunk, Text, read_chunks

INVALID = "invalid UTF-8"
DROPPED = (INVALID, MALFORMED, *REASONS)
# What is kept of every pair for finding duplicates: its hash and the words of both sides.
RECORD = np.dtype([("hash", "<u8"), ("words", "<u4", 2)])


@dataclass(frozen=True)
class Cleaned:
    """What is left of a chunk."""

    # bytes for the three outputs: source lines, target lines, RECORDs
    files: tuple[bytes, bytes, bytes]
    # pairs, source words and target words by reason, and "kept" and "read"
    counts: dict[str, list[int]]
    pairs: int  # how many the chunk had


class Cleaner:
    """Normalises and filters chunks; the same chunk always gives the same result.

    `on_bad_line` is "drop" or "fail" where a line is not UTF-8.
    """

    def __init__(self, normalisers: tuple[Normaliser, Normaliser], filter: Filter, on_bad_line: str):
        self.normalisers = normalisers
        self.filter = filter
        self.on_bad_line = on_bad_line

    def __call__(self, chunk: Chunk) -> Cleaned:
        counts: dict[str, list[int]] = {}
        kept: tuple[list[str], list[str]] = ([], [])
        records = []
        for source, target in self.decoded(chunk, counts):
            source, target = self.normalisers[0](source), self.normalisers[1](target)
            words = words_of(source), words_of(target)
            count_pair(counts, "read", *words)
            reason = self.filter(source, target)
            if reason is not None:
                count_pair(counts, reason, *words)
                continue
            count_pair(counts, "kept", *words)
            kept[0].append(source)
            kept[1].append(target)
            digest = hashlib.blake2b(f"{source}\n{target}".encode(), digest_size=8).digest()
            records.append((int.from_bytes(digest, "little"), words))
        sides = ("".join([f"{line}\n" for line in lines]).encode() for lines in kept)
        return Cleaned((*sides, np.array(records, RECORD).tobytes()), counts, len(chunk.numbers))

    def decoded(self, chunk: Chunk, counts: dict) -> Iterator[tuple[str, str]]:
        """Yield a chunk's pairs; those that are not UTF-8 are counted or an error."""
        try:
            sides = [blob.decode("utf-8").split("\n") for blob in (chunk.source, chunk.target)]
        except UnicodeDecodeError:
            pass
        else:
            yield from zip(*sides, strict=True)
            return
        blobs = (chunk.source.split(b"\n"), chunk.target.split(b"\n"))
        for number, row in zip(chunk.numbers, zip(*blobs, strict=True), strict=True):
            try:
                yield tuple(decode_cut(line) for line in row)
            except UnicodeDecodeError as error:
                if self.on_bad_line == "fail":
                    path = chunk.text.paths[row.index(error.object)]
                    value = error.object[error.start : error.start + 4].hex(" ")
                    raise PreparationError(
                        f"{path}, line {number}: invalid UTF-8 at byte "
                        f"{error.start + 1} ({value}); mend it or use --on-bad-line drop"
                    ) from error
                count_pair(counts, "read", 0, 0)
                count_pair(counts, INVALID, 0, 0)


def decode_cut(line: bytes) -> str:
    """Decode a line; one that was cut for its length, perhaps inside a character, is dropped."""
    return line.decode("utf-8", "ignore" if len(line) > LONGEST_SIDE else "strict")


def words_of(line: str) -> int:
    """Count the words of a normalised line."""
    return line.count(" ") + 1 if line else 0


def count_pair(counts: dict[str, list[int]], key: str, source: int, target: int) -> None:
    """Count a pair and its words."""
    entry = counts.setdefault(key, [0, 0, 0])
    entry[0] += 1
    entry[1] += source
    entry[2] += target


def sampled(total: int, size: int | None, seed: int) -> Iterator[bool]:
    """Yield for each of `total` pairs whether it is in the seeded sample of exactly `size`.

    Selection sampling (Knuth, The Art of Computer Programming 2, section 3.4.2, algorithm S):
    every subset is equally likely, and nothing is remembered.
    """
    if size is None or size >= total:
        yield from repeat(True, total)
        return
    draw = random.Random(seed).random
    left = size
    for remaining in range(total, 0, -1):
        chosen = draw() * remaining < left
        left -= chosen
        yield chosen


def clean(
    texts: list[tuple[Text, int]],
    cleaner: Cleaner,
    outputs: list[Path],
    *,
    workers: int,
    sample: int | None,
    seed: int,
    shard: tuple[int, int],
) -> dict[str, dict[str, list[int]]]:
    """Clean a shard of the training text.

    Args:
        texts: The corpora and their numbers of pairs.
        cleaner: What does it.
        outputs: Source lines, target lines and RECORDs.
        workers: How many processes.
        sample: How many pairs of all shards together; None for all.
        seed: Of the sample.
        shard: Its number from 1 and the number of shards: contiguous parts of equal length.

    Returns:
        Each corpus' counts, by reason.
    """
    total = sum(pairs for _, pairs in texts)
    first, last = (total * (shard[0] + side) // shard[1] for side in (-1, 0))
    chosen = (asked and first <= number < last for number, asked in enumerate(sampled(total, sample, seed)))
    counts = {text.name: {} for text, _ in texts}
    malformed = {text.name: Counter() for text, _ in texts}

    def chunks() -> Iterator[Chunk]:
        for text, pairs in texts:
            wanted = islice(chosen, pairs)
            yield from read_chunks(text, wanted, malformed[text.name], cleaner.on_bad_line)

    def labelled(chunk: Chunk) -> tuple[str, Cleaned]:
        return chunk.text.name, cleaner(chunk)

    asked = min(sample or total, total) * (last - first) // max(total, 1)
    with open_together(*outputs) as files, progress(total=asked, description="clean", unit="pairs") as bar:
        for name, result in ordered_map(labelled, chunks(), workers):
            for file, content in zip(files, result.files, strict=True):
                file.write(content)
            add_counts(counts[name], result.counts)
            bar.update(result.pairs)
    for name, found in malformed.items():
        for reason, pairs in found.items():
            add_counts(counts[name], {reason: [pairs, 0, 0], "read": [pairs, 0, 0]})
    return counts


def add_counts(into: dict[str, list[int]], more: dict[str, list[int]]) -> None:
    """Add counts to counts."""
    for key, values in more.items():
        have = into.setdefault(key, [0, 0, 0])
        into[key] = [a + b for a, b in zip(have, values, strict=True)]
