"""Patch how fairseq's `--bpe` reads merges and models: one that is broken is named, in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fairseq import file_utils

from relpos_fairseq.io.reading import read_json, read_text
from relpos_fairseq.text.subwords import load_merges
from relpos_fairseq.text.tokenizer import load_sentencepiece


def subword_nmt(original: Callable, bpe: Any, cfg: Any) -> None:
    """Read merges as `relpos` does: the library ends the program at broken ones, and takes a mark of bytes for one."""
    if not cfg.bpe_codes:
        original(bpe, cfg)
        return
    bpe.bpe = load_merges(file_utils.cached_path(cfg.bpe_codes), separator=cfg.bpe_separator)
    bpe.bpe_symbol = f"{cfg.bpe_separator} "


def sentencepiece(original: Callable, bpe: Any, cfg: Any) -> None:
    """Refuse a file that is no model of sentencepiece's."""
    load_sentencepiece(Path(file_utils.cached_path(cfg.sentencepiece_model)))
    original(bpe, cfg)


def gpt2(original: Callable, bpe: Any, cfg: Any) -> None:
    """Refuse files that are no vocabulary and merges of GPT-2's."""
    read_json(file_utils.cached_path(cfg.gpt2_encoder_json), dict[str, int])
    read_text(file_utils.cached_path(cfg.gpt2_vocab_bpe), "a file of merges")
    original(bpe, cfg)
