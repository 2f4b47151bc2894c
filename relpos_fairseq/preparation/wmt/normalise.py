"""Normalises a line: Unicode form, control characters, punctuation, spaces.

Punctuation is Moses' normalize-punctuation.perl as sacremoses ports it: the same substitutions in
the same order. Most lines need none of them, so each substitution runs only where the character
that it cannot match without is in the line; the result is the library's.
"""

import re
import unicodedata

from sacremoses import MosesPunctNormalizer

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
