"""Clean parallel text: normalize pairs of lines, filter them, and drop duplicates.

`Filter` names the reason to drop a pair; `Cleaner` normalizes and filters a chunk, in a worker process;
`clean_shard` does so for a shard of the training text, and writes, besides the lines, a record of each pair that it
kept: the pair's hash and numbers of words. `drop_duplicates` joins the shards by these records.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import compress, islice, repeat
from pathlib import Path

import numpy as np
import regex

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import open_together
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.progress import progress
from relpos_fairseq.preparation.parallel_text import LONGEST_SIDE, MALFORMED, Chunk, Text, read_chunks
from relpos_fairseq.preparation.settings import Limits
from relpos_fairseq.text.moses import Normaliser

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


# Cleaning

INVALID = "invalid UTF-8"
DROPPED = (INVALID, MALFORMED, *REASONS)
# For finding duplicates: a pair's hash, and the numbers of words of its sides.
RECORD = np.dtype([("hash", "<u8"), ("words", "<u4", 2)])


@dataclass(frozen=True)
class Cleaned:
    """The pairs of a chunk that were kept, and counts of all."""

    files: tuple[bytes, bytes, bytes]  # for the three outputs: source lines, target lines, RECORDs
    counts: dict[str, list[int]]  # pairs, source words and target words by reason, and "kept" and "read"
    pairs: int  # pairs of the chunk


class Cleaner:
    """Normalizes and filters a chunk; the result depends on the chunk alone.

    `on_bad_line`: "drop" a pair with a line that is not UTF-8, or "fail".
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
        """Yield a chunk's pairs; a pair that is not UTF-8 is counted and dropped, or an error."""
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
    """Decode a line; ignore the incomplete character at the end of a line that was cut for its length."""
    return line.decode("utf-8", "ignore" if len(line) > LONGEST_SIDE else "strict")


def words_of(line: str) -> int:
    """Count the words of a normalized line."""
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


def write_sample(paths: Iterable[Path], pairs: int, size: int, seed: int, output: Path) -> int:
    """Write a sample of the pairs, source lines then target lines, to one file, which subwords are learned on.

    Of so many `pairs`, at most `size` are chosen; returns their number.
    """
    with open_together(output) as (file,):
        for path in paths:
            with path.open("rb") as lines:
                file.writelines(compress(lines, sampled(pairs, size, seed)))
    return min(size, pairs)


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
        cleaner: Normalizes and filters.
        outputs: Source lines, target lines and RECORDs.
        workers: How many processes.
        sample: Number of pairs to use, of all shards together; None for all.
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


# Duplicates


def first_occurrences(hashes: np.ndarray) -> np.ndarray:
    """Return, for hashes (N,), True at the first occurrence of each (N,); uses some 24 bytes of memory for each."""
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    first = np.ones(len(hashes), bool)
    first[order[1:]] = ordered[1:] != ordered[:-1]
    return first


def drop_duplicates(
    parts: list[tuple[Path, Path]], records: list[Path], outputs: tuple[Path, Path]
) -> dict[str, list[int]]:
    """Join the shards' source and target lines without the pairs that came before.

    A pair is a duplicate if the 64-bit hash of both sides together came before: two different pairs
    among N share one with probability N²/2⁶⁵ (forty million pairs: 0.00004).

    Returns:
        Pairs, source words and target words, "duplicate" and "kept".
    """
    found = [np.memmap(path, RECORD, "r") for path in records if path.stat().st_size] or [np.empty(0, RECORD)]
    keep = first_occurrences(np.concatenate([one["hash"] for one in found]))
    with open_together(*outputs) as files:
        for side, file in enumerate(files):
            flags = iter(keep)
            for part in parts:
                with part[side].open("rb") as lines:
                    file.writelines(compress(lines, flags))
    words = np.concatenate([one["words"] for one in found])
    rows = ([int(chosen.sum()), *words[chosen].sum(0, dtype=np.int64).tolist()] for chosen in (~keep, keep))
    return dict(zip(("duplicate", "kept"), rows, strict=True))
