"""Cut lines into subwords, by subword-nmt's merges or a model of sentencepiece, so that text comes back from them."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection
from contextlib import redirect_stderr
from functools import lru_cache
from pathlib import Path
from typing import Any

from relpos_fairseq.io.reading import read_text, reading
from relpos_fairseq.text.dictionary import CONTINUED, SPECIAL, WORD_START, is_text
from relpos_fairseq.text.tokenizer import SUBWORD_NMT, load_sentencepiece

IDENTITY = "identity"  # a normalization that leaves all but white space
NORMALIZATIONS = (IDENTITY, "nmt_nfkc", "nmt_nfkc_cf", "nfkc", "nfkc_cf")  # sentencepiece's names
REMEMBERED = 24_000  # words whose subword-nmt subwords are cached


def with_spaces(line: str) -> str:
    """Return a line with spaces for sentencepiece's mark of a space, which its model cannot tell from one."""
    return " ".join(line.replace(WORD_START, " ").split()) if WORD_START in line else line


def load_merges(codes: str | Path, **options: Any) -> Any:
    """Return subword-nmt's BPE of a file of merges; options are the library's."""
    from subword_nmt.apply_bpe import BPE

    with reading(codes, "a file of merges of subword-nmt"), redirect_stderr(io.StringIO()) as said:
        try:
            library = BPE(io.StringIO(read_text(codes, "a file of merges of subword-nmt")), **options)
        except SystemExit:  # the library ends the program
            raise ValueError(" ".join(said.getvalue().split())) from None
        if not library.bpe_codes:
            raise ValueError("it has no merge")
    return library


class SubwordNmt:
    """Splits the words of a line as subword-nmt does with a file of merges; caches the subwords of frequent words.

    A word's last subword has no mark; one that would be taken for a special symbol, or to go on, is split once more.

    Args:
        codes: the file of merges.
        known: symbols; subwords that are none of them are split further. None: all are whole.
    """

    def __init__(self, codes: Path, known: Collection[str] = ()):
        self.library = load_merges(codes, vocab=set(known))
        self.subwords = lru_cache(REMEMBERED)(self.split)

    def split(self, word: str) -> list[str]:
        """Split a word; the library's own cache, which is not bounded, is not used."""
        if not word:
            return []
        self.library.cache.clear()
        *found, last = self.library.segment_tokens([word])
        while not is_text(last):
            found.append(f"{last[0]}{CONTINUED}")
            last = last[1:]
        return [*found, last]

    def __call__(self, line: str) -> list[str]:
        """Return the subwords of a line's words, between which there is one space."""
        return [subword for word in line.split(" ") for subword in self.subwords(word)]


def smallest(kind: str, subwords: Collection[str]) -> set[str]:
    """Return the subwords of single characters into which every text of the subwords' characters can be split."""
    if kind != SUBWORD_NMT:
        return {character for one in subwords for character in one}
    characters = {character for one in subwords for character in one.removesuffix(CONTINUED)}
    return {f"{character}{mark}" for character in characters for mark in ("", CONTINUED)}


def load_subwords(kind: str, path: Path, known: Collection[str] = ()) -> Callable[[str], list[str]]:
    """Return a function from a line to its subwords, from a file of merges or a model.

    No subword is a special symbol, whatever the line says.

    Args:
        kind: "subword-nmt" or "sentencepiece".
        path: the file.
        known: symbols of a dictionary: what it lacks is split further, down to single characters. None: nothing is.
    """
    if kind == SUBWORD_NMT:
        return SubwordNmt(path, known)
    processor, kept = load_sentencepiece(path, known), set(known)

    def cut(line: str) -> list[str]:
        found = processor.encode(with_spaces(line), out_type=str)
        return [part for one in found for part in (one if one in SPECIAL or kept and one not in kept else [one])]

    return cut
