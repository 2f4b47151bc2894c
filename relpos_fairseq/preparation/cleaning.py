"""Clean parallel text: normalize pairs of lines, filter them, and drop duplicates.

`Filter` names the reason to drop a pair; `Cleaner` normalizes and filters a chunk, in a worker process;
`clean_shard` does so for a shard of the training text, and writes, besides the lines, a record of each pair that it
kept (the pair's hash and numbers of words) and examples of those that it dropped. `drop_duplicates` joins the shards by
these records.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import compress, groupby, islice, repeat
from pathlib import Path

import numpy as np
import regex

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import open_together, write_json
from relpos_fairseq.io.lines import plain_lines
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.progress import progress, visible
from relpos_fairseq.preparation.lengths import CHARACTERS, SLACK, Lengths
from relpos_fairseq.preparation.parallel_text import LONGEST_SIDE, MALFORMED, Chunk, Text, read_chunks
from relpos_fairseq.preparation.wmt_settings import DUPLICATE, FILTERS, MIN_SCRIPT, Limits
from relpos_fairseq.text.languages import find_language
from relpos_fairseq.text.moses import Normaliser

REASONS = tuple(reason for reason in FILTERS if reason != DUPLICATE)
CHARACTERS_A_WORD = 12  # the longest average, so that a line without spaces is too long as well
FEW = 20  # pairs, of which no share says that a filter takes too many


class Filter:
    """Finds the reason to drop a pair: the first of REASONS whose method, of the same name, returns True.

    Args:
        source: The source's language, any code of it; no script is asked for where its scripts are not known.
        target: The target's language.
        limits: What a pair must keep within.
        held_out: Normalised, case-folded sentences of the validation and test sets.
        lengths: How the sides' lengths are counted.
    """

    def __init__(
        self, source: str, target: str, limits: Limits, held_out: Collection[str] = (), lengths: Lengths | None = None
    ):
        languages = find_language(source), find_language(target)
        self.letters = tuple(language.letters() for language in languages)
        self.latin = tuple("Latn" in language.scripts for language in languages)
        self.all_letters = tuple(language.all_letters() for language in languages)
        self.limits = limits
        self.held_out = frozenset(held_out)
        self.lengths = lengths or Lengths()
        self.slack = SLACK[self.lengths.compared_in]
        self.tried = [(one, getattr(self, one.replace(" ", "_"))) for one in REASONS if one not in limits.kept]

    def __call__(self, source: str, target: str) -> str | None:
        """Return one of REASONS, or None for a pair to keep."""
        for reason, drops in self.tried:
            if drops(source, target):
                return reason
        return None

    def empty(self, source: str, target: str) -> bool:
        return not source or not target

    def too_long(self, source: str, target: str) -> bool:
        words, characters = self.limits.max_words, max(len(source), len(target))
        if characters > words * CHARACTERS_A_WORD:
            return True
        if self.lengths.compared_in == CHARACTERS or (self.lengths.spaced and characters <= words):
            return False
        return max(self.lengths.compared(source, target)) > words

    def length_ratio(self, source: str, target: str) -> bool:
        one, other = self.lengths.compared(source, target)
        longer, shorter = max(one, other), min(one, other)
        return longer > self.limits.max_ratio * shorter and longer - shorter > self.slack

    def identical_sides(self, source: str, target: str) -> bool:
        return source.casefold() == target.casefold()

    def wrong_script(self, source: str, target: str) -> bool:
        return not all(map(self.right_script, (source, target), self.letters, self.all_letters, self.latin))

    def in_a_test_set(self, source: str, target: str) -> bool:
        return source.casefold() in self.held_out or target.casefold() in self.held_out

    def right_script(self, line: str, letters: regex.Pattern | None, all_letters: regex.Pattern, latin: bool) -> bool:
        """Return whether enough of all letters of a line are such `letters`; a line without any is.

        `latin` says that these are Latin ones among others, so that a line of ASCII need not be looked at.
        """
        if letters is None or (latin and line.isascii()):
            return True
        return len(letters.findall(line)) >= MIN_SCRIPT * len(all_letters.findall(line))


# Cleaning

INVALID = "invalid UTF-8"
DROPPED = (INVALID, MALFORMED, *REASONS)
EXAMPLES = 3  # of the pairs that a filter drops
SHOWN = 60  # characters of a side in an example
CUT = LONGEST_SIDE // 4 - 1  # characters that a line has at least if it was cut for its length
# For finding duplicates: a pair's hash, and the numbers of words (or characters) of its sides.
RECORD = np.dtype([("hash", "<u8"), ("words", "<u4", 2)])


@dataclass(frozen=True)
class Cleaned:
    """The pairs of a chunk that were kept, and counts of all."""

    files: tuple[bytes, bytes, bytes]  # for the three outputs: source lines, target lines, RECORDs
    counts: dict[str, list[int]]  # pairs, source words and target words by reason, and "kept" and "read"
    dropped: dict[str, list]  # by reason, the first EXAMPLES: line number, source, target
    pairs: int  # pairs of the chunk


@dataclass(frozen=True)
class Cleaner:
    """Normalizes and filters a chunk; the result depends on the chunk alone."""

    normalisers: tuple[Normaliser, Normaliser]
    filter: Filter
    on_bad_line: str  # "drop" a pair with a line that is not UTF-8, or "fail"

    def __call__(self, chunk: Chunk) -> Cleaned:
        counts: dict[str, list[int]] = {}
        dropped: dict[str, list] = {}
        kept: tuple[list[str], list[str]] = ([], [])
        records = []
        for number, valid, *raw in self.decoded(chunk):
            source, target = self.normalisers[0](raw[0]), self.normalisers[1](raw[1])
            reason = self.reason(raw, source, target) if valid else INVALID
            words = self.filter.lengths.counts(source, target) if valid else (0, 0)
            count_pair(counts, "read", *words)
            count_pair(counts, reason or "kept", *words)
            if reason is not None:
                if len(dropped.get(reason, ())) < EXAMPLES:
                    add_examples(dropped, {reason: [[number, *map(shown, raw)]]})
                continue
            kept[0].append(source)
            kept[1].append(target)
            digest = hashlib.blake2b(f"{source}\n{target}".encode(), digest_size=8).digest()
            records.append((int.from_bytes(digest, "little"), words))
        sides = ("".join([f"{line}\n" for line in lines]).encode() for lines in kept)
        return Cleaned((*sides, np.array(records, RECORD).tobytes()), counts, dropped, len(chunk.numbers))

    def reason(self, raw: list[str], source: str, target: str) -> str | None:
        """Return the filter's reason; a side that was read in part is too long even where that filter is off."""
        found = self.filter(source, target)
        if found is None and "too long" in self.filter.limits.kept and max(map(len, raw)) >= CUT:
            return "too long"
        return found

    def decoded(self, chunk: Chunk) -> Iterator[tuple[int, bool, str, str]]:
        """Yield a chunk's line numbers and pairs, and whether they are UTF-8; one that is not may be an error."""
        try:
            sides = [blob.decode("utf-8").split("\n") for blob in (chunk.source, chunk.target)]
        except UnicodeDecodeError:
            pass
        else:
            yield from zip(chunk.numbers, [True] * len(chunk.numbers), *sides, strict=True)
            return
        blobs = (chunk.source.split(b"\n"), chunk.target.split(b"\n"))
        for number, row in zip(chunk.numbers, zip(*blobs, strict=True), strict=True):
            try:
                yield number, True, *(decode_cut(line) for line in row)
            except UnicodeDecodeError as error:
                if self.on_bad_line == "fail":
                    path = chunk.text.paths[row.index(error.object)]
                    value = error.object[error.start : error.start + 4].hex(" ")
                    raise UserError(
                        f"{path}, line {number}: invalid UTF-8 at byte "
                        f"{error.start + 1} ({value}); mend it or use --on-bad-line drop"
                    ) from error
                yield number, False, *(line.decode("utf-8", "backslashreplace") for line in row)


def decode_cut(line: bytes) -> str:
    """Decode a line; ignore the incomplete character at the end of a line that was cut for its length."""
    return line.decode("utf-8", "ignore" if len(line) > LONGEST_SIDE else "strict")


def shown(line: str) -> str:
    """Return the beginning of a line, at most SHOWN characters, with escapes for those that cannot be seen."""
    return visible(f"{line[: SHOWN - 1]}…" if len(line) > SHOWN else line)


def add_examples(into: dict[str, list], more: dict[str, list]) -> None:
    """Add later pairs (line number, source, target) to the first EXAMPLES that each reason drops."""
    for reason, pairs in more.items():
        found = into.setdefault(reason, [])
        found += pairs[: EXAMPLES - len(found)]


def count_pair(counts: dict[str, list[int]], key: str, source: int, target: int) -> None:
    """Count a pair and its sides' words (or characters)."""
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
            file.writelines(compress(plain_lines(path), sampled(pairs, size, seed)))
    return min(size, pairs)


def clean_shard(
    texts: list[tuple[Text, int]],
    cleaner: Cleaner,
    outputs: list[Path],
    examples: Path,
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
        examples: A file of the first pairs that each filter dropped, by corpus and reason.
        workers: How many processes.
        sample: Number of pairs to use, of all shards together; None for all.
        seed: Of the sample.
        shard: Its number from 1 and the number of shards: contiguous parts of equal length.

    Returns:
        Each corpus' counts, by reason.

    Raises:
        UserError: A filter drops more of a corpus than the limits' max_dropped.
    """
    total = sum(pairs for _, pairs in texts)
    first, last = (total * (shard[0] + side) // shard[1] for side in (-1, 0))
    chosen = (asked and first <= number < last for number, asked in enumerate(sampled(total, sample, seed)))
    counts = {text.name: {} for text, _ in texts}
    dropped: dict[str, dict] = {text.name: {} for text, _ in texts}
    malformed = {text.name: Counter() for text, _ in texts}

    def chunks() -> Iterator[Chunk]:
        for text, pairs in texts:
            wanted = islice(chosen, pairs)
            yield from read_chunks(text, wanted, malformed[text.name], cleaner.on_bad_line)

    def labelled(chunk: Chunk) -> tuple[str, Cleaned]:
        return chunk.text.name, cleaner(chunk)

    asked = min(sample or total, total) * (last - first) // max(total, 1)
    with (
        open_together(*outputs) as files,
        progress(total=asked, description="clean", unit="pairs") as bar,
        closing(ordered_map(labelled, chunks(), workers)) as cleaned,  # its workers end where a corpus is refused
    ):
        for name, results in groupby(cleaned, lambda pair: pair[0]):
            for _, result in results:
                for file, content in zip(files, result.files, strict=True):
                    file.write(content)
                add_counts(counts[name], result.counts)
                add_examples(dropped[name], result.dropped)
                bar.update(result.pairs)
            check_dropped(name, counts[name], dropped[name], cleaner.filter.limits.max_dropped)
    for name, found in malformed.items():
        for reason, pairs in found.items():
            add_counts(counts[name], {reason: [pairs, 0, 0], "read": [pairs, 0, 0]})
    write_json(examples, dropped)
    return counts


def check_dropped(corpus: str, counts: dict[str, list[int]], dropped: dict[str, list], largest: float) -> None:
    """Raise a UserError if one filter drops more than the largest share of a corpus' pairs.

    Args:
        corpus: Its name.
        counts: Its pairs by reason, and "read".
        dropped: Examples by reason.
        largest: The share; that of fewer than FEW pairs says nothing.
    """
    pairs = counts["read"][0]
    reason = max(FILTERS, key=lambda one: counts.get(one, [0])[0])
    found = counts.get(reason, [0])[0]
    if pairs < FEW or found <= largest * pairs:
        return
    number, source, target = dropped[reason][0]
    raise UserError(
        f'{corpus}: the filter "{reason}" drops {found:,} of {pairs:,} pairs, such as line {number}, "{source}" with '
        f'"{target}": {switch(reason)} keeps such pairs, --max-dropped 1 drops them all the same'
    )


def switch(reason: str) -> str:
    """Return the option that switches a filter off."""
    return f"--no-filter {reason.replace(' ', '-')}"


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
    parts: list[tuple[Path, Path]], records: list[Path], outputs: tuple[Path, Path], limits: Limits
) -> dict[str, list[int]]:
    """Join the shards' source and target lines without the pairs that came before.

    A pair is a duplicate if the 64-bit hash of both sides together came before: two different pairs
    among N share one with probability N²/2⁶⁵ (forty million pairs: 0.00004).

    Returns:
        Pairs, source words and target words, "duplicate" and "kept".

    Raises:
        UserError: More than the limits' max_dropped are duplicates.
    """
    found = [np.memmap(path, RECORD, "r") for path in records if path.stat().st_size] or [np.empty(0, RECORD)]
    hashes = np.concatenate([one["hash"] for one in found])
    keep = np.ones(len(hashes), bool) if DUPLICATE in limits.kept else first_occurrences(hashes)
    words = np.concatenate([one["words"] for one in found])
    rows = ([int(chosen.sum()), *words[chosen].sum(0, dtype=np.int64).tolist()] for chosen in (~keep, keep))
    counts = dict(zip((DUPLICATE, "kept"), rows, strict=True))
    if counts[DUPLICATE][0] > limits.max_dropped * len(keep):
        first = int(keep.argmin())
        sides = (plain_lines(*side) for side in zip(*parts, strict=True))
        pair = [next(islice(side, first, None)).decode().rstrip("\n") for side in sides]
        examples, read = {DUPLICATE: [[first + 1, *map(shown, pair)]]}, {"read": [len(keep)]}
        check_dropped("all corpora, joined", counts | read, examples, limits.max_dropped)
    with open_together(*outputs) as files:
        for file, side in zip(files, zip(*parts, strict=True), strict=True):
            file.writelines(compress(plain_lines(*side), keep))
    return counts
