"""Tokens and units back to plain text."""

from sacremoses import MosesDetokenizer

CONTINUES, SPACE = "@@", "▁"


class Detokeniser:
    """Turn a system's line into plain text.

    Args:
        language: The target's ISO 639-1 code.
        tokenizer: "moses" or "none".
        units: "subword-nmt", "sentencepiece", "none", or "auto" to look at the line.
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
    """Join subword units to words.

    Args:
        line: Units separated by spaces; or words, which stay as they are.
        units: As in `Detokeniser`.
    """
    if units == "sentencepiece" or (units == "auto" and line.startswith(SPACE)):
        return line.replace(" ", "").replace(SPACE, " ").strip() if SPACE in line else line
    if units in ("subword-nmt", "auto"):
        return f"{line} ".replace(f"{CONTINUES} ", "").rstrip(" ")
    return line
