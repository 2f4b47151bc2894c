"""Normalize, tokenize and detokenize lines as Moses' scripts do, by sacremoses."""

import re
import unicodedata
from functools import lru_cache

from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer

# ---- Normalises a line: Unicode form, control characters, punctuation, spaces.
# Punctuation is Moses' normalize-punctuation.perl as sacremoses ports it: the same substitutions in
# the same order. Most lines need none of them, so each substitution runs only where the character
# that it cannot match without is in the line; the result is the library's.


# Separators that Python or C take for a line's or a word's end become spaces; the rest is removed.
SEPARATOR = re.compile("[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]")
INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u200b\u200e\u200f\u061c\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)
UNPRINTABLE = re.compile(f"{SEPARATOR.pattern}|{INVISIBLE.pattern}")

# Where a pattern holds one of these, it cannot match a line without it. Earlier ones are sought
# first: parentheses and full stops are also regular expressions' own signs.
LITERALS = (
    "„",
    "“",
    "”",
    "–",
    "—",
    "´",
    "‘",
    "’",
    "‚",
    "…",
    "«",
    "»",
    "\u00a0",
    '"',
    "%",
    "`",
    "'",
    "\\(",
    "\\)",
    ":",
    ";",
    "\\r",
)


class Normaliser:
    """Normalises lines of one language (ISO 639-1), which has its own quotation marks."""

    def __init__(self, language: str):
        self.rules = []
        for pattern, replacement in MosesPunctNormalizer(lang=language).substitutions:
            needed = next((mark[-1] for mark in LITERALS if mark in pattern), None)
            if needed == "r":
                needed = "\r"
            if pattern == " +":
                needed = "  "
            self.rules.append((needed, re.compile(pattern).sub, replacement))

    def punctuation(self, line: str) -> str:
        """Return the line as sacremoses' MosesPunctNormalizer gives it, without its strip."""
        for needed, substitute, replacement in self.rules:
            if needed is None or needed in line:
                line = substitute(replacement, line)
        return line

    def __call__(self, line: str) -> str:
        """Return the line in NFC, on one line, with single spaces and plain punctuation."""
        if UNPRINTABLE.search(line):
            line = INVISIBLE.sub("", SEPARATOR.sub(" ", line))
        if not line.isascii():  # after that: a letter and its accent may have been kept apart
            line = unicodedata.normalize("NFC", line)
        return " ".join(self.punctuation(line).split())


# ---- Tokenises as Moses' tokenizer.perl -a does, by sacremoses, several times faster.
# What the tokenizer does to a word depends on little: a word of letters and digits alone is left as
# it is, and a run of other words is cut the same wherever it stands, but for whether the line begins
# before it, ends after it, or goes on with a small letter or a digit (which decide about full stops).
# So each run is tokenised once for each such surrounding, by the library, and remembered.


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


# ---- Tokens and units back to plain text.


CONTINUES, SPACE = "@@", "▁"


class Detokeniser:
    """Turn a system's line into plain text, of a language by its ISO 639-1 code.

    `tokenizer` is "moses" or "none"; `units` as in `join_units`.
    """

    def __init__(self, language: str, tokenizer: str, units: str = "auto"):
        self.moses = MosesDetokenizer(lang=language) if tokenizer == "moses" else None
        self.units = units

    def __call__(self, line: str) -> str:
        """Return the plain text; of plain text, itself."""
        line = join_subwords(line, self.units)
        if self.moses is not None:
            line = self.moses.detokenize(line.split())
        return line


def join_subwords(line: str, units: str) -> str:
    """Join subword units, separated by spaces, to words; words stay as they are.

    `units`: "subword-nmt", "sentencepiece", "none", or "auto" to look at the line.
    """
    if units == "sentencepiece" or (units == "auto" and line.startswith(SPACE)):
        return line.replace(" ", "").replace(SPACE, " ").strip() if SPACE in line else line
    if units in ("subword-nmt", "auto"):
        return f"{line} ".replace(f"{CONTINUES} ", "").rstrip(" ")
    return line
