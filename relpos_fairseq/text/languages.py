"""Say of a language, by any code of it, its scripts, whether words are written with spaces, and libraries' names.

Codes are those of ISO 639-1 and -3, locales and NLLB: `pt-BR`, `pt_BR`, `rus_Cyrl`, `zho_Hans`, `sr-Latn`, `yue`.
Scripts are Unicode CLDR's likely subtags (read by langcodes); spaces follow from Unicode's line breaking classes: where
a line may end between any two letters, words are written without; and marks of a script follow from its terminal
punctuation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import langcodes
import regex
from langcodes.data_dicts import LIKELY_SUBTAGS

# ISO 15924's codes of several scripts together and of styles of one, which no property of a character names.
COMPOSED = {
    **{"Hans": ("Hani",), "Hant": ("Hani",), "Hanb": ("Bopo", "Hani"), "Hrkt": ("Hira", "Kana")},
    **{"Jpan": ("Hani", "Hira", "Kana"), "Kore": ("Hang", "Hani"), "Jamo": ("Hang",)},
    **{"Aran": ("Arab",), "Cyrs": ("Cyrl",), "Latf": ("Latn",), "Latg": ("Latn",), "Geok": ("Geor",)},
    **{"Syre": ("Syrc",), "Syrj": ("Syrc",), "Syrn": ("Syrc",)},
}
BREAKABLE = regex.compile(r"[\p{Line_Break=SA}\p{Line_Break=ID}\p{Line_Break=CJ}\p{Line_Break=AK}\p{Line_Break=AS}]")
CHARACTERS = range(0x20000)  # the two planes in which scripts have their letters and marks
SIDES = ("src", "tgt")  # what fairseq's examples call the sides of a pair, whatever their languages
SYLLABIC = "Tibt"  # a mark ends each syllable, and a space a phrase
# Scripts whose text sacrebleu does not cut by spaces, the more telling first: Japanese and Korean have Han letters too.
SCORED_AS = {"Hang": "ko", "Hira": "ja", "Kana": "ja", "Hani": "zh"}


@dataclass(frozen=True)
class Language:
    """What is known of a language.

    Attributes:
        code: the language alone, as libraries name it: `pt` of pt_BR, `ru` of rus_Cyrl; else the text that was given.
        scripts: ISO 15924's names of the scripts of its letters; those of all countries where the code names neither
            script nor country; none where they are not known.
        has_spaces: whether there are spaces between words; True where the scripts are not known.
        likely: the scripts in which it is written where the code does not say otherwise.
    """

    code: str
    scripts: tuple[str, ...] = ()
    has_spaces: bool = True
    likely: tuple[str, ...] = ()

    @property
    def scored_as(self) -> str:
        """The language by whose name sacrebleu and Moses choose their rules: `zh` of yue and cmn_Hant too."""
        return next((name for script, name in SCORED_AS.items() if script in self.scripts), self.code)

    @property
    def comes_back_from_moses(self) -> bool:
        """Whether Moses' detokenizer takes back what its tokenizer did: it knows spaces, and Latin's marks alone."""
        return self.has_spaces and not any(map(_has_own_marks, self.likely))

    def letters(self) -> regex.Pattern | None:
        """Return a pattern of a letter of one of the scripts, or None where they are not known."""
        return _letters(*self.scripts) if self.scripts else None

    def all_letters(self) -> regex.Pattern:
        """Return a pattern of any letter; beside letters without spaces a whole run of others is one, a word too."""
        if self.has_spaces or not self.scripts:
            return regex.compile(r"\p{L}")
        own = "".join(rf"\p{{Script={script}}}" for script in self.scripts)
        return regex.compile(rf"[[{own}]&&\p{{L}}]|[\p{{L}}--[{own}]]+", regex.VERSION1)


@cache
def find_language(code: str) -> Language:
    """Return what is known of the language of a code, which may be a locale's (`de_DE.UTF-8`) or none at all."""
    if code in SIDES:
        return Language(code)
    try:
        tag = langcodes.Language.get(code.partition(".")[0].partition("@")[0])
        whole = langcodes.Language.get(langcodes.standardize_tag(tag, macro=True))
    except langcodes.LanguageTagError:
        return Language(code)
    written = {tag.script} if tag.script else _written(tag.language, tag.territory)
    written = written or _written(whole.language, tag.territory)
    parts = {part for script in written for part in COMPOSED.get(script, (script,))}
    scripts = tuple(sorted(filter(_letters, parts)))
    breaks = (_breaks_anywhere(script) for script in scripts)
    script = (scripts and whole.maximize().script) or ""
    likely = tuple(one for one in COMPOSED.get(script, (script,)) if one in scripts)
    return Language(whole.language or code, scripts, not (scripts and all(breaks)), likely)


def _written(language: str | None, territory: str | None) -> set[str]:
    """Return the scripts that a language is written in: in a territory where CLDR names it, else in all."""
    likely: dict[tuple[Any, ...], str] = {
        tuple(tag.split("-")): whole.split("-")[1] for tag, whole in LIKELY_SUBTAGS.items()
    }
    if (language, territory) in likely:
        return {likely[language, territory]}
    # A second part of four letters is a script, which is asked for by name alone.
    return {script for (first, *more), script in likely.items() if first == language and all(len(p) < 4 for p in more)}


@cache
def _letters(*scripts: str) -> regex.Pattern | None:
    """Return a pattern of a letter of scripts; None where Unicode's characters have no such script."""
    names = "".join(rf"\p{{Script={script}}}" for script in scripts)
    try:
        return regex.compile(rf"[[{names}]&&\p{{L}}]", regex.VERSION1)
    except regex.error:
        return None


@cache
def _has_own_marks(script: str) -> bool:
    """Return whether a script has marks that end sentences or their parts and are not Latin's, as the danda."""
    marks = regex.compile(rf"[\p{{Script_Extensions={script}}}&&\p{{Terminal_Punctuation}}]", regex.VERSION1)
    return any(map(marks.match, map(chr, CHARACTERS)))


@cache
def _breaks_anywhere(script: str) -> bool:
    """Return whether a line may end between any two letters of a script."""
    pattern = _letters(script)
    found = [letter for letter in map(chr, CHARACTERS) if pattern is not None and pattern.match(letter)]
    return script == SYLLABIC or 2 * len(list(filter(BREAKABLE.match, found))) > len(found)
