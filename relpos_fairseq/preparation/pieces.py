"""Trains sentencepiece models: the same text and options give the same model, wherever it lies."""

import io
import re
from collections.abc import Iterable

from relpos_fairseq.engine.errors import PreparationError

LONGEST_SENTENCE = 1 << 16  # bytes; sentencepiece leaves longer lines out of its training
TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
TOO_LARGE = re.compile(r"Vocabulary size too high \(\d+\)\. .*<= (\d+)")


def train_pieces(lines: Iterable[str], size: int, option: str, **options: object) -> bytes:
    """Train a sentencepiece model.

    Args:
        lines: The text; read once, as it is needed, so that no path gets into the model.
        size: How many pieces.
        option: What the user calls the number of pieces, for errors.
        **options: sentencepiece's own. Whatever depends on the machine needs a fixed value: the
            sums of a unigram model depend on num_threads in their last digits.

    Raises:
        PreparationError: The text allows no model of that size; the message says whether the size
            must be larger or smaller.
    """
    import sentencepiece

    settings = {"character_coverage": 1.0, "max_sentence_length": LONGEST_SENTENCE, "minloglevel": 2}
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=size, **settings | options
        )
    except RuntimeError as error:
        raise PreparationError(
            f"sentencepiece cannot make {size} pieces of this text: {remedy(str(error), option)}"
        ) from error
    return model.getvalue()


def remedy(reason: str, option: str) -> str:
    """Say what to do about an error of sentencepiece's trainer."""
    if found := TOO_SMALL.search(reason):
        return (
            f"its characters alone are {found[1]} with the special pieces, so {option} must be "
            f"larger: at least {found[1]}"
        )
    if found := TOO_LARGE.search(reason):
        return f"it has not so many, so {option} must be smaller: at most {found[1]}"
    if "sentences_.empty()" in reason or "all_chars_count" in reason:
        return "it is empty"
    return reason.split("] ", 1)[-1]
