"""Measure how long the two sides of parallel text are, in a unit that both have: words, or characters.

Where a language writes no spaces between words, its side is counted in characters, and these are scaled by the ratio
of the two sides' sums over the text's first pairs: characters are the better measure of length, and their ratio is
nearly constant (Gale & Church 1993, "A Program for Aligning Sentences in Bilingual Corpora").
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import regex

from relpos_fairseq.preparation.parallel_text import Text
from relpos_fairseq.text.languages import find_language

WORDS, CHARACTERS = "words", "characters"
MEASURED = 10_000  # pairs, the first of the training text
LONGEST = 3000  # characters of a measured line; a longer one is no sentence
SEGMENTED = 5  # letters for each space between two letters, at most, where text was cut into words
SLACK = {WORDS: 3, CHARACTERS: 6}  # by which short sentences may differ whatever their ratio; a word of Chinese has two


@dataclass(frozen=True)
class Lengths:
    """How lengths are counted, and compared between the sides."""

    units: tuple[str, str] = (WORDS, WORDS)  # of the source and of the target
    # of each side: how many of its units are as long as one of the unit that both are compared in
    scales: tuple[float, float] = (1.0, 1.0)

    @cached_property
    def compared_in(self) -> str:
        """The unit that both sides are compared in: words of the side that has words, else the source's characters."""
        return WORDS if WORDS in self.units else CHARACTERS

    @cached_property
    def spaced(self) -> bool:
        """Whether both sides are counted in words."""
        return self.units == (WORDS, WORDS)

    def counts(self, source: str, target: str) -> tuple[int, int]:
        """Return the numbers of words or characters of two normalized lines."""
        if self.spaced and source and target:  # most text; a call for each side takes longer than its work
            return source.count(" ") + 1, target.count(" ") + 1
        return count_units(source, self.units[0]), count_units(target, self.units[1])

    def compared(self, source: str, target: str) -> tuple[float, float]:
        """Return the lengths of two normalized lines in the unit that both are compared in."""
        one, other = self.counts(source, target)
        return one / self.scales[0], other / self.scales[1]


def count_units(line: str, unit: str) -> int:
    """Count the words of a normalized line, or its characters without spaces."""
    spaces = line.count(" ")
    return len(line) - spaces if unit == CHARACTERS else spaces + 1 if line else 0


def measure_lengths(
    texts: Iterable[Text], languages: tuple[str, str], normalisers: tuple[Callable, Callable]
) -> Lengths:
    """Return how the lengths of these languages' lines are counted, and their scale in the first pairs of the texts.

    A language without spaces is counted in words all the same where its text was cut into words before: where letters
    of its scripts have a space between two of them for every SEGMENTED or fewer. Words of Chinese and Japanese have two
    letters or so, those of Thai three to four (and marks); phrases, which spaces may end without such a cut, have ten.
    """
    patterns = [None if find_language(one).has_spaces else find_language(one).letters() for one in languages]
    if not any(patterns):
        return Lengths()
    sums = [dict.fromkeys((WORDS, CHARACTERS, "letters", "gaps"), 0) for _ in languages]
    gaps = [one and regex.compile(rf"(?<={one.pattern}\p{{M}}*) (?={one.pattern})", regex.VERSION1) for one in patterns]
    for pair in first_pairs(texts, normalisers):
        for line, total, letter, gap in zip(pair, sums, patterns, gaps, strict=True):
            for unit in (WORDS, CHARACTERS):
                total[unit] += count_units(line, unit)
            if letter:
                total["letters"] += len(letter.findall(line))
                total["gaps"] += len(gap.findall(line))
    units = tuple(
        CHARACTERS if letter and not 0 < total["letters"] <= SEGMENTED * total["gaps"] else WORDS
        for letter, total in zip(patterns, sums, strict=True)
    )
    source, target = (total[unit] or 1 for total, unit in zip(sums, units, strict=True))
    if units == (WORDS, WORDS):
        return Lengths()
    return Lengths(units, (source / target, 1.0) if units[1] == WORDS else (1.0, target / source))


def first_pairs(texts: Iterable[Text], normalisers: tuple[Callable, Callable]) -> Iterator[tuple[str, str]]:
    """Yield the normalized first pairs of texts, but those of which a side is empty, very long, or not UTF-8."""
    for row in islice((row for text in texts for row in text.rows()), MEASURED):
        try:
            source, target = (normalise(line.decode()) for normalise, line in zip(normalisers, row or (), strict=True))
        except ValueError:  # not UTF-8, or too few columns
            continue
        if source and target and max(len(source), len(target)) <= LONGEST:
            yield source, target
