"""Choose how BLEU cuts text into words: as sacrebleu does for the target's language."""

from __future__ import annotations

import logging
from typing import Any

from sacrebleu.metrics import BLEU

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.text.languages import find_language

logger = logging.getLogger(__name__)
USUAL = BLEU.TOKENIZER_DEFAULT  # 13a: of all languages that are cut by spaces and punctuation
EXTRAS = {"ja-mecab": "ja", "ko-mecab": "ko"}  # of sacrebleu, by the tokenizers that need them


def tokenizer_of(language: str) -> str:
    """Return sacrebleu's name of the tokenizer of a language, which is given by any code of it."""
    return BLEU._TOKENIZER_MAP.get(find_language(language).scored_as, USUAL)


def bleu_of(language: str, tokenize: str | None, otherwise: str, **more: Any) -> BLEU:
    """Return sacrebleu's BLEU for a language.

    Args:
        language: of the target; Chinese, Japanese and Korean have tokenizers of their own, as in sacrebleu.
        tokenize: sacrebleu's name of the tokenizer; None: by the language.
        otherwise: what to give where the tokenizer is not installed.
        more: other options of sacrebleu's BLEU.

    Raises:
        UserError: the tokenizer's package, or a model that it downloads, is not here.
    """
    name = tokenize or tokenizer_of(language)
    if name == USUAL and not find_language(language).has_spaces:
        logger.warning(
            "BLEU cuts %s by %s, at spaces, which it has not between words: give %s", language, USUAL, otherwise
        )
    try:
        return BLEU(tokenize=tokenize, trg_lang=find_language(language).scored_as, **more)
    except (ImportError, RuntimeError, OSError) as error:
        # MeCab's message ends in the command without the quotes that shells need.
        said = " ".join(str(error).partition("Please install")[0].split())
        needed = f'pip install "sacrebleu[{EXTRAS[name]}]"' if name in EXTRAS else "get what it names"
        raise UserError(f"sacrebleu cannot cut {language} by {name} ({said}): {needed}, or give {otherwise}") from error
