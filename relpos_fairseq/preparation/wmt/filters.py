"""Decides whether a normalised pair of lines is worth training on, and says why not."""

from collections.abc import Collection

import regex

from relpos_fairseq.preparation.wmt.settings import Limits

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
