"""What a token is: a word, a part of one, a character or a byte; it decides what a loss means."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from fairseq.data import Dictionary
from torch import Tensor

LEVELS = ("auto", "word", "subword", "char", "byte")
SAME = {"sentencepiece": "subword", "bpe": "subword"}  # names of relpos prepare lm
WORD_START = "\u2581"  # sentencepiece marks a word's first piece, subword-nmt all but its last
CONTINUES = "@@"


def text_level(folder: Path, dictionary: Dictionary, wanted: str = "auto") -> str:
    """The level of a data folder's tokens: the one wanted, or for `auto` what its files say.

    `manifest.json` says it where relpos prepare lm made it; else the dictionary is looked at.
    """
    if wanted not in LEVELS:
        raise ValueError(f"text_level must be one of {', '.join(LEVELS)}, got {wanted!r}")
    if wanted != "auto":
        return wanted
    manifest = folder / "manifest.json"
    if manifest.exists():
        named = json.loads(manifest.read_text(encoding="utf-8")).get("level")
        named = SAME.get(named, named)
        if named in LEVELS:
            return named
    symbols = dictionary.symbols[dictionary.nspecial :]
    if all(len(symbol) == 1 or symbol.startswith("madeupword") for symbol in symbols):
        return "char"
    marked = any(s.startswith(WORD_START) or s.endswith(CONTINUES) for s in symbols)
    return "subword" if marked else "word"


def word_ends(dictionary: Dictionary) -> Tensor:
    """(vocabulary,) bool: tokens by which words are counted, the end of a line among them.

    The paper's perplexity on WikiText-103 counts `<eos>` as a word too.
    """
    symbols = dictionary.symbols
    if any(symbol.startswith(WORD_START) for symbol in symbols):
        ends = [symbol.startswith(WORD_START) for symbol in symbols]
    else:
        ends = [not symbol.endswith(CONTINUES) for symbol in symbols]
    counted = torch.tensor(ends)
    counted[dictionary.pad()] = False
    counted[dictionary.eos()] = True
    return counted


def refuse_unknown_characters(tokens: np.ndarray, dictionary: Dictionary, source: str) -> None:
    """Characters outside the dictionary make bits per character meaningless."""
    unknown = int(np.count_nonzero(tokens == dictionary.unk()))
    if unknown:
        raise ValueError(
            f"{source}: {unknown:,} of {len(tokens):,} characters are outside the dictionary "
            f"({len(dictionary) - dictionary.nspecial} characters): binarise all splits with one "
            f"dictionary of every character, or give --text-level word to accept <unk>"
        )
