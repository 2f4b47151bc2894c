"""Tokenises as Moses' tokenizer.perl -a does, by sacremoses, several times faster.

What the tokenizer does to a word depends on little: a word of letters and digits alone is left as
it is, and a run of other words is cut the same wherever it stands, but for whether the line begins
before it, ends after it, or goes on with a small letter or a digit (which decide about full stops).
So each run is tokenised once for each such surrounding, by the library, and remembered.
"""

import re
from functools import lru_cache

from sacremoses import MosesTokenizer

REMEMBERED = 16_000  # runs
# Lines that go to the library whole: what Normaliser never gives, and words of its own inner use.
UNUSUAL = re.compile("[^\\S ]| {2}|[\x00-\x1f]|^ | $|DOTMULTI")


class FastMoses:
    """The Moses tokenizer of one language, with aggressive hyphen splitting and XML escapes."""

    def __init__(self, language: str):
        self.library = MosesTokenizer(language)
        alnum = re.escape(self.library.IsAlnum)
        # Runs of words that hold something besides letters and digits.
        word = f"[{alnum}]*[^{alnum} ][^ ]*"
        self.runs = re.compile(f"(?<![^ ]){word}(?: {word})*").finditer
        self.small = frozenset(self.library.IsLower)
        self.known = lru_cache(REMEMBERED)(self.cut)

    def by_library(self, line: str) -> str:
        """Return the library's tokens of a line, separated by single spaces."""
        return " ".join(self.library.tokenize(line, aggressive_dash_splits=True))

    def __call__(self, line: str) -> str:
        """Return a normalised line's tokens, separated by single spaces."""
        if UNUSUAL.search(line):
            return self.by_library(line)
        parts, end, last = [], 0, len(line)
        for match in self.runs(line):
            start, stop = match.span()
            parts.append(line[end:start])
            follower = self.follower(line[stop + 1]) if stop < last else ""
            parts.append(self.known(match.group(), start == 0, follower))
            end = stop
        parts.append(line[end:])
        return "".join(parts)

    def follower(self, first: str) -> str:
        """Return the word that stands for all that begin as this character does."""
        if first in self.small:
            return "z"
        return "1" if first in "0123456789" else "Z"

    def cut(self, run: str, first: bool, follower: str) -> str:
        """Tokenise a run: its text, whether the line begins with it, and what follows it."""
        text = run if first else f"Z {run}"
        tokens = self.by_library(f"{text} {follower}" if follower else text)
        return tokens[0 if first else 2 : len(tokens) - (2 if follower else 0)]
