"""Train tokenizers and sentencepiece models on text that is streamed, never held in memory."""

from __future__ import annotations

import collections
import contextlib
import io
import logging
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.text import tokenizer as library
from relpos_fairseq.text import tokenizer as pieces
from relpos_fairseq.text.tokenizer import UNKNOWN, LibraryTokenizer, SentencePieceTokenizer, Tokenizer

# ---- Texts that a tokenizer is trained on: streamed, counted, readable twice.


texts_logger = logging.getLogger(__name__)
_SECONDS_BETWEEN_LOG_LINES = 30.0


class Files:
    r"""The lines of text files that hold anything, read anew each time; only \n ends a line."""

    def __init__(self, files: list[str | Path]):
        self.files = files

    def __iter__(self) -> Iterator[str]:
        for path in self.files:
            yield from filter(str.strip, read_lines(path))


class Spool:
    """What an iterator gives, in a temporary file, so that it can be read again."""

    def __init__(self, texts: Iterable[str]):
        self.file = tempfile.TemporaryFile("w+", encoding="utf-8", newline="\n")
        for text in texts:
            self.file.write(" ".join(text.split("\n")) + "\n")

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def __iter__(self) -> Iterator[str]:
        self.file.seek(0)
        return (line[:-1] for line in self.file)


class Counted:
    """Texts with progress: a bar on a terminal, a line now and then in a log."""

    def __init__(self, texts: Iterable[str]):
        self.texts = texts
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        from tqdm import tqdm

        last = time.monotonic()
        shown = sys.stderr.isatty()
        for text in tqdm(self.texts, "texts read", unit="", disable=not shown, leave=False):
            self.count += 1
            if not shown and time.monotonic() - last > _SECONDS_BETWEEN_LOG_LINES:
                last = time.monotonic()
                texts_logger.info("tokenizer: %d texts read", self.count)
            yield text

    def require_some(self) -> None:
        """Raise a ValueError if there was no text."""
        if not self.count:
            raise ValueError("no text to train a tokenizer on: every file is empty")


# ---- Trains sentencepiece models: the same text and options give the same model, wherever it lies.


LONGEST_SENTENCE = 1 << 16  # bytes; sentencepiece leaves longer lines out of its training
TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
TOO_LARGE = re.compile(r"Vocabulary size too high \(\d+\)\. .*<= (\d+)")


def train_sentencepiece_model(lines: Iterable[str], size: int, option: str, **options: object) -> bytes:
    """Train a sentencepiece model.

    Args:
        lines: The text; read once, as it is needed, so that no path gets into the model.
        size: How many pieces.
        option: What the user calls the number of pieces, for errors.
        **options: sentencepiece's own. Whatever depends on the machine needs a fixed value: the
            sums of a unigram model depend on num_threads in their last digits.

    Raises:
        UserError: The text allows no model of that size; the message says whether the size
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
        raise UserError(
            f"sentencepiece cannot make {size} pieces of this text: {sentencepiece_remedy(str(error), option)}"
        ) from error
    return model.getvalue()


def sentencepiece_remedy(reason: str, option: str) -> str:
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


# ---- Train a tokenizer on files that are streamed, never held.


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
    tokenizers = library.import_tokenizers()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet):
        raise ValueError(f"byte-level BPE needs a vocab_size of {len(alphabet)} (bytes) or more, got {vocab_size}")
    trainer = _trainer(tokenizers.trainers.BpeTrainer, vocab_size, options, initial_alphabet=sorted(alphabet))
    return _train_library(library.byte_bpe(prefix_space=True), texts, trainer)


def _train_wordpiece(texts: Counted, vocab_size: int, options: dict[str, Any]) -> LibraryTokenizer:
    """Train, with the alphabet in a fixed order: the library's own order differs every time."""
    lowercase = options.pop("lowercase")
    tokenizers = library.import_tokenizers()
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
    trainer = pieces.import_sentencepiece().SentencePieceTrainer
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
