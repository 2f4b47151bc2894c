"""Clean parallel text: normalize and filter pairs, drop duplicates."""

import hashlib
import random
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import compress, islice, repeat
from pathlib import Path
from typing import BinaryIO

import numpy as np
import regex

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import named_on_disk_full, open_together
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.progress import progress
from relpos_fairseq.preparation.parallel_text import LINES, LONGEST_SIDE, MALFORMED, Chunk, Text, read_chunks
from relpos_fairseq.preparation.settings import Limits
from relpos_fairseq.text.moses import Normaliser

# ---- Decides whether a normalised pair of lines is worth training on, and says why not.


# In the order they are tried; a pair is counted under the first that applies.
REASONS = ("empty", "too long", "length ratio", "identical sides", "wrong script", "in a test set")
LATIN = "Latin"
SCRIPTS = {
    **dict.fromkeys(("be", "bg", "ru", "sr", "uk"), "Cyrillic"),
    **dict.fromkeys(("ar", "fa", "ur"), "Arabic"),
    **dict.fromkeys(("hi", "ne", "mr"), "Devanagari"),
    **{"el": "Greek", "he": "Hebrew", "th": "Thai", "ka": "Georgian", "hy": "Armenian"},
    **{"ko": "Hangul", "zh": "Han", "ja": None},
}
SLACK = 3  # words by which short sentences may differ whatever their ratio
CHARACTERS_A_WORD = 12  # the longest average, so that a line without spaces is too long as well


class Filter:
    """Finds the reason to drop a pair.

    Args:
        source: The source's language, ISO 639-1. Its script is Latin where SCRIPTS has no other;
            Japanese has several, and none is asked for.
        target: The target's language.
        limits: What a pair must keep within.
        held_out: Normalised, case-folded sentences of the validation and test sets.
    """

    def __init__(self, source: str, target: str, limits: Limits, held_out: Collection[str] = ()):
        self.scripts = tuple(SCRIPTS.get(language, LATIN) for language in (source, target))
        self.letters = {
            script: regex.compile(rf"[\p{{Script={script}}}&&\p{{L}}]", regex.VERSION1)
            for script in self.scripts
            if script
        }
        self.any_letter = regex.compile(r"\p{L}")
        self.limits = limits
        self.held_out = frozenset(held_out)

    def __call__(self, source: str, target: str) -> str | None:
        """Return one of REASONS, or None for a pair to keep."""
        if not source or not target:
            return "empty"
        words = source.count(" ") + 1, target.count(" ") + 1
        limits = self.limits
        characters = limits.max_words * CHARACTERS_A_WORD
        if max(words) > limits.max_words or max(len(source), len(target)) > characters:
            return "too long"
        if max(words) > limits.max_ratio * min(words) and abs(words[0] - words[1]) > SLACK:
            return "length ratio"
        folded = source.casefold(), target.casefold()
        if folded[0] == folded[1]:
            return "identical sides"
        if not all(map(self.right_script, (source, target), self.scripts)):
            return "wrong script"
        if folded[0] in self.held_out or folded[1] in self.held_out:
            return "in a test set"
        return None

    def right_script(self, line: str, script: str | None) -> bool:
        """Return whether enough of a line's letters are of a script; a line without letters is."""
        if script is None or (script == LATIN and line.isascii()):
            return True
        letters = len(self.any_letter.findall(line))
        return len(self.letters[script].findall(line)) >= self.limits.min_script * letters


# ---- The stage that normalises and filters training pairs, several chunks at a time.


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
                    raise UserError(
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


def clean_shard(
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


# ---- Drops pairs that came before, in bounded memory and time linear in their number.
# Cleaning leaves one fixed record a pair on disk. Hashes are sorted into buckets (by remainder) in an
# unnamed file, and the buckets dealt with one at a time, each small enough for memory; what stays in
# memory is one bit a pair. A pair is a duplicate if the 64-bit hash of both sides together came
# before: two different pairs among N share one with probability N²/2⁶⁵ (forty million pairs:
# 0.00004).


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
    counts = count_kept(keep, records)
    with open_together(*outputs) as files:
        for side, file in enumerate(files):
            flags = unpack_bits(keep)
            for part in parts:
                with part[side].open("rb") as lines:
                    while block := list(islice(lines, LINES)):
                        file.writelines(compress(block, islice(flags, len(block))))
    return counts


def unpack_bits(packed: np.ndarray) -> Iterator[int]:
    """Stream the bits, in order."""
    for start in range(0, len(packed), READ):
        yield from np.unpackbits(packed[start : start + READ], bitorder="little").tolist()


def count_kept(keep: np.ndarray, records: list[Path]) -> dict[str, list[int]]:
    """Count pairs and words of those kept and those dropped."""
    totals = np.zeros((2, 3), np.int64)
    flags = unpack_bits(keep)
    for _, block in read_records(records):
        kept = np.fromiter(islice(flags, len(block)), bool, len(block))
        for row, chosen in enumerate((~kept, kept)):
            words = block["words"][chosen].sum(0, dtype=np.int64)
            totals[row] += (chosen.sum(), *words)
    return dict(zip(("duplicate", "kept"), totals.tolist(), strict=True))
