"""Train a tokenizer on files that are streamed, never held."""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from relpos_fairseq.data.tokenizers import library, pieces
from relpos_fairseq.data.tokenizers.base import UNKNOWN, Tokenizer
from relpos_fairseq.data.tokenizers.library import LibraryTokenizer
from relpos_fairseq.data.tokenizers.pieces import SentencePieceTokenizer
from relpos_fairseq.data.tokenizers.texts import Counted, Files, Spool

logger = logging.getLogger(__name__)
KINDS = ("bpe", "wordpiece", "sentencepiece")


def train_tokenizer(
    kind: str,
    folder: str | Path,
    *,
    vocab_size: int,
    files: Iterable[str | Path] | None = None,
    texts: Iterable[str] | None = None,
    lowercase: bool = False,
    **options: Any,
) -> Tokenizer:
    """Train a tokenizer and write it, with its dict.txt, into a folder.

    The same text gives the same files.

    Args:
        kind: `bpe` (byte-level), `wordpiece` (BERT's) or `sentencepiece`.
        folder: where tokenizer.json or sentencepiece.model and dict.txt go.
        vocab_size: pieces at most; small text may give fewer.
        files: text files, plain, .gz, .bz2 or .xz, UTF-8, a text a line; or
        texts: the texts themselves, any iterable (wordpiece reads it twice, and keeps what an
            iterator gives in a temporary file).
        lowercase: wordpiece: BERT's uncased normalisation, which removes accents too.
        options: sentencepiece's trainer's own (`model_type`, `character_coverage`,
            `byte_fallback`, `input_sentence_size`, `normalization_rule_name`, ...); `min_frequency`
            for the others, and for wordpiece `limit_alphabet`, how many characters at most.

    Raises:
        ValueError: unknown kind, a size that is too small, an option of another kind, or no text.
    """
    if kind not in KINDS:
        raise ValueError(f"tokenizer must be one of {', '.join(KINDS)}, got {kind!r}")
    if (files is None) == (texts is None):
        raise ValueError("give either files or texts to train a tokenizer on")
    if lowercase and kind != "wordpiece":
        raise ValueError(f"lowercase is wordpiece's; {kind} takes no lowercase")
    if files is not None:
        texts = Files(list(files))
    train = {"bpe": _train_bpe, "wordpiece": _train_wordpiece, "sentencepiece": _train_pieces}
    if kind == "wordpiece":
        options["lowercase"] = lowercase
    tokenizer = train[kind](Counted(texts), vocab_size, options)
    tokenizer.save(folder)
    logger.info("%s tokenizer of %d pieces in %s", kind, len(tokenizer.symbols), folder)
    return tokenizer


def _train_library(model: Any, texts: Counted, trainer: Any) -> LibraryTokenizer:
    model.train_from_iterator(texts, trainer=trainer)
    texts.require_some()
    return LibraryTokenizer(model)


def _train_bpe(texts: Counted, vocab_size: int, options: dict[str, Any]) -> LibraryTokenizer:
    tokenizers = library.import_library()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet):
        raise ValueError(f"byte-level BPE needs a vocab_size of {len(alphabet)} (bytes) or more, got {vocab_size}")
    trainer = _trainer(tokenizers.trainers.BpeTrainer, vocab_size, options, initial_alphabet=sorted(alphabet))
    return _train_library(library.byte_bpe(prefix_space=True), texts, trainer)


def _train_wordpiece(texts: Counted, vocab_size: int, options: dict[str, Any]) -> LibraryTokenizer:
    """Train, with the alphabet in a fixed order: the library's own order differs every time."""
    lowercase = options.pop("lowercase")
    tokenizers = library.import_library()
    with contextlib.ExitStack() as stack:
        if iter(texts.texts) is texts.texts:
            texts = Counted(stack.enter_context(Spool(texts)))
        model = library.wordpiece(lowercase=lowercase)
        alphabet, rare = _wordpiece_alphabet(model, texts, options.pop("limit_alphabet", None))
        fixed = ["[UNK]", *alphabet]
        if vocab_size < len(fixed):
            raise ValueError(
                f"wordpiece needs a vocab_size of {len(fixed):,} (characters) or more for this "
                f"text, got {vocab_size:,}; limit_alphabet leaves the rarest out"
            )
        trainer = _trainer(tokenizers.trainers.WordPieceTrainer, vocab_size, options, special_tokens=fixed)
        known = Counted(text.translate(rare) for text in texts)
        _train_library(model, known, trainer)
    # The model anew, without the trainer's notion that the alphabet is special.
    return LibraryTokenizer(library.wordpiece(model.get_vocab(), lowercase))


def _wordpiece_alphabet(model: Any, texts: Iterable[str], limit: int | None) -> tuple[list[str], dict[int, str]]:
    """Characters as first and as later pieces, and a table that blanks those beyond the limit."""
    counts, later = collections.Counter(), set()
    for text in texts:
        for word, _ in model.pre_tokenizer.pre_tokenize_str(model.normalizer.normalize_str(text)):
            counts.update(word)
            later.update(word[1:])
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    kept = set(ranked[:limit])
    pieces = sorted(kept) + sorted(f"##{character}" for character in later & kept)
    return pieces, {ord(character): " " for character in ranked[len(kept) :]}


def _trainer(kind: Any, vocab_size: int, options: dict[str, Any], **more: Any) -> Any:
    unknown = set(options) - {"min_frequency"}
    if unknown:
        raise ValueError(f"{kind.__name__} takes no {', '.join(sorted(unknown))}")
    if vocab_size < 2:
        raise ValueError(f"vocab_size must be 2 or more, got {vocab_size}")
    return kind(vocab_size=vocab_size, show_progress=sys.stderr.isatty(), **options, **more)


def _train_pieces(texts: Counted, vocab_size: int, options: dict[str, Any]) -> SentencePieceTokenizer:
    trainer = pieces.import_library().SentencePieceTrainer
    settings = {
        "model_type": "unigram",
        "character_coverage": 0.9995,
        "normalization_rule_name": "nmt_nfkc",
        "max_sentence_length": 1 << 16,
        "num_threads": 4,  # fixed: the sums of a unigram model depend on it in their last digits
        "minloglevel": 2,
        "hard_vocab_limit": False,
    } | options
    if settings["model_type"] == "bpe":
        settings.pop("hard_vocab_limit")
    ids = {"unk_id": 0, "bos_id": -1, "eos_id": -1, "pad_id": -1}
    written = io.BytesIO()
    try:
        trainer.train(
            # A literal <unk> would be taken out of the text, and < and > be unknown for ever.
            sentence_iterator=(text.replace(UNKNOWN, f"{UNKNOWN[:-1]} >") for text in texts),
            model_writer=written,
            vocab_size=vocab_size,
            **ids,
            **settings,
        )
    except (RuntimeError, OSError, TypeError) as error:
        texts.require_some()
        reason = str(error).strip().splitlines()[-1]
        raise ValueError(f"sentencepiece could not be trained with vocab_size {vocab_size}: {reason}") from None
    texts.require_some()
    return SentencePieceTokenizer(written.getvalue())
