"""Tokens and units back to plain text."""

from sacremoses import MosesDetokenizer

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
        line = join_units(line, self.units)
        if self.moses is not None:
            line = self.moses.detokenize(line.split())
        return line


def join_units(line: str, units: str) -> str:
    """Join subword units, separated by spaces, to words; words stay as they are.

    `units`: "subword-nmt", "sentencepiece", "none", or "auto" to look at the line.
    """
    if units == "sentencepiece" or (units == "auto" and line.startswith(SPACE)):
        return line.replace(" ", "").replace(SPACE, " ").strip() if SPACE in line else line
    if units in ("subword-nmt", "auto"):
        return f"{line} ".replace(f"{CONTINUES} ", "").rstrip(" ")
    return line
