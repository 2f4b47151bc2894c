"""Tell which lines of a text do not come back from symbols as they were, and why."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from relpos_fairseq.io.progress import visible
from relpos_fairseq.text.dictionary import UNKNOWN, WORD_START

if TYPE_CHECKING:
    from relpos_fairseq.text.assets import Text

LINES = 1000  # of a text, from its beginning
SHOWN = 3  # lines that are shown
LACKS = "unknown symbols"
BEFORE, AFTER = 12, 28  # characters that are shown around the first difference


def _without(*categories: str) -> Callable[[str], str]:
    """Return a function that takes the characters of some of Unicode's categories out of a text."""
    return lambda text: "".join(one for one in text if not unicodedata.category(one).startswith(categories))


# What may differ, each beside all before it: two lines that are equal without it differ by it.
DIFFERENCES: dict[str, Callable[[str], str]] = {
    "white space": lambda text: " ".join(text.split()),
    "Unicode's other forms of characters": lambda text: " ".join(unicodedata.normalize("NFKC", text).split()),
    "characters that are not seen": _without("C"),
    "spaces that came or went": lambda text: "".join(text.split()),
    "upper and lower case": str.casefold,
    "accents": lambda text: _without("M")(unicodedata.normalize("NFD", text)),
    "punctuation": _without("P", "S"),
}


@dataclass
class RoundTrip:
    """Lines that became symbols and text again.

    Attributes:
        lines: how many.
        changed: how many did not come back.
        reasons: how many of these for which reason; LACKS: they have symbols that the dictionary lacks.
        examples: the first of these: the line and what came back, around the first difference, and the reason.
    """

    lines: int = 0
    changed: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, str, str]] = field(default_factory=list)


def round_trip(text: Text, lines: Iterable[str], known: Collection[str] | None = None) -> RoundTrip:
    """Return how many of the first lines of a text do not come back.

    Args:
        text: to symbols and back.
        lines: of which the first LINES are looked at, without empty ones.
        known: symbols of the dictionary; others are unknown there.  None: all that `text` gives.
    """
    found = RoundTrip()
    for line in islice(filter(str.strip, lines), LINES):
        symbols = text.encode(line)
        symbols = [one if known is None or one in known else UNKNOWN for one in symbols]
        back = text.decode(symbols)
        found.lines += 1
        if back == line:
            continue
        reason = LACKS if UNKNOWN in symbols and UNKNOWN not in line else _reason(line, back)
        found.changed += 1
        found.reasons[reason] += 1
        if len(found.examples) < SHOWN:
            found.examples.append((*_around(line, back), reason))
    return found


def _reason(line: str, back: str) -> str:
    if WORD_START in line and WORD_START not in back:
        line = line.replace(WORD_START, " ")
        if " ".join(line.split()) == " ".join(back.split()):
            return f"{WORD_START} is sentencepiece's own space"
    for name, without in DIFFERENCES.items():
        line, back = without(line), without(back)
        if line == back:
            return name
    return "other characters"


def _around(line: str, back: str) -> tuple[str, str]:
    """Return both texts around their first difference, with escapes for what is not seen."""
    pairs = enumerate(zip(line, back, strict=False))
    first = next((place for place, (one, other) in pairs if one != other), min(len(line), len(back)))
    start = max(0, first - BEFORE)
    return visible(line[start : first + AFTER]), visible(back[start : first + AFTER])
