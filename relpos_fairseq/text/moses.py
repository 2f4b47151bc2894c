"""Normalize, tokenize and detokenize lines as Moses' scripts do, by sacremoses, several times faster.

Normalization is Moses' normalize-punctuation.perl: the same substitutions in the same order.  Most lines need none of
them, so each substitution runs only where the character that it cannot match without is in the line.

Tokenization is Moses' tokenizer.perl -a.  A word of letters and digits alone stays as it is.  A run of other words is
split in the same way wherever it stands, except that the start of the line before it, the end of the line after it and
a small letter or a digit that follows it decide about full stops.  So the library tokenizes each run once in each of
these surroundings, and the result is cached.
"""

import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer

from relpos_fairseq.text.dictionary import CONTINUED, WORD_START, word_of
from relpos_fairseq.text.languages import find_language

REMEMBERED = 16_000  # runs whose tokens are cached
# Lines that the library tokenizes whole: what Normaliser never gives, and words of the library's own inner use.
UNUSUAL = re.compile("[^\\S ]| {2}|[\x00-\x1f]|^ | $|DOTMULTI")
# Characters that Python or C take for the end of a line or a word become spaces; invisible ones are removed.
SEPARATOR = re.compile("[\t\n\v\f\r\x1c-\x1f\x85\u2028\u2029]")
INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\u00ad\u200b\u200e\u200f\u061c\u202a-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]"
)
UNPRINTABLE = re.compile(f"{SEPARATOR.pattern}|{INVISIBLE.pattern}")

# A pattern that holds one of these cannot match a line without it.  Earlier ones are sought first: parentheses and
# full stops are also syntax of regular expressions.
LITERALS = tuple("„“”–—´‘’‚…«»\u00a0\"%`'") + ("\\(", "\\)", ":", ";", "\\r")


class Normaliser:
    """Normalizes lines: Unicode form, control characters, spaces, punctuation (of a language by any code of it)."""

    def __init__(self, language: str):
        self.rules = []
        for pattern, replacement in MosesPunctNormalizer(lang=find_language(language).scored_as).substitutions:
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
        if not line.isascii():  # after the removal, which may have brought a letter and its accent together
            line = unicodedata.normalize("NFC", line)
        return " ".join(self.punctuation(line).split())


def on_one_line(line: str) -> str:
    """Return the line with single spaces for all white space and none at its ends: the normalization `identity`."""
    return " ".join(line.split())


class FastMoses:
    """The Moses tokenizer of one language, with aggressive hyphen splitting and XML escapes."""

    def __init__(self, language: str):
        self.library = MosesTokenizer(find_language(language).scored_as)
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
        """Return a word that decides about a full stop before it as all words with this first character do."""
        if first in self.small:
            return "z"
        return "1" if first in "0123456789" else "Z"

    def cut(self, run: str, first: bool, follower: str) -> str:
        """Return the tokens of a run of words.

        `first` says that the line begins with the run; `follower` stands for the word after it, "" at the line's end.
        """
        text = run if first else f"Z {run}"
        tokens = self.by_library(f"{text} {follower}" if follower else text)
        return tokens[0 if first else 2 : len(tokens) - (2 if follower else 0)]


class Detokeniser:
    """Turns a line of subwords and tokens into plain text.

    Args:
        language: any code of it.
        tokenizer: "moses" or "none".
        units: the kind of subwords, as in `join_subwords`.
    """

    def __init__(self, language: str, tokenizer: str, units: str = "auto"):
        self.moses = MosesDetokenizer(lang=find_language(language).scored_as) if tokenizer == "moses" else None
        self.units = units

    def __call__(self, line: str) -> str:
        """Return the plain text of a line of subwords."""
        return self._whole(join_subwords(line, self.units))

    def _whole(self, line: str) -> str:
        return line if self.moses is None else self.moses.detokenize(line.split())

    def lines(self, lines: Sequence[str], cut: bool = False) -> list[str]:
        """Return the plain text of a system's lines, which are in subwords or joined already.

        A line of sentencepiece's subwords may have no mark, and plain text may have one (`▁▂▃`), so that all lines
        together tell; `cut` says that they are in subwords.
        """
        units = self.units
        if units == "auto" and 2 * sum(line.startswith(WORD_START) for line in lines) > len(lines):
            units = "sentencepiece"
        if units == "sentencepiece" and not cut and 2 * sum(WORD_START in line for line in lines) < len(lines):
            return list(map(self._whole, lines))
        return [self._whole(join_subwords(line, units)) for line in lines]


def join_subwords(line: str, units: str) -> str:
    """Join subwords, separated by spaces, to words.

    `units` is "subword-nmt", "sentencepiece", "none", or "auto" to decide by the marks in the line.
    """
    if units == "sentencepiece" or (units == "auto" and line.startswith(WORD_START)):
        return line.replace(" ", "").replace(WORD_START, " ").strip()
    if units in ("subword-nmt", "auto"):
        return f"{line} ".replace(f"{CONTINUED} ", "").rstrip(" ")
    return " ".join(map(word_of, line.split(" ")))
