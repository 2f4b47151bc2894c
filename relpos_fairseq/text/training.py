"""Learn tokenizers and subwords from text that is streamed, never held in memory.

The same text and options give the same files, wherever they lie and whatever the machine.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from relpos_fairseq.io.child import command_of
from relpos_fairseq.io.command import error_line
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import atomic_path, write_bytes
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.processes import ordered_map
from relpos_fairseq.io.progress import progress
from relpos_fairseq.text.dictionary import UNKNOWN
from relpos_fairseq.text.folders import TOKENIZER_JSON
from relpos_fairseq.text.sentencepiece_model import sentencepiece_state
from relpos_fairseq.text.tokenizer import (
    SENTENCEPIECE_MODEL,
    Tokenizer,
    byte_bpe,
    import_tokenizers,
    json_of,
    wordpiece,
)

logger = logging.getLogger(__name__)
KINDS = ("bpe", "wordpiece", "sentencepiece")
LONGEST_SENTENCE = 1 << 16  # bytes; sentencepiece leaves longer lines out of its training
RESERVED = "\u2585"  # sentencepiece's own mark in training
TOO_SMALL = re.compile(r"smaller than required_chars\. \d+ vs (\d+)")
TOO_LARGE = re.compile(r"Vocabulary size too high \(\d+\)\. .*<= (\d+)")


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

    Args:
        kind: "bpe" (byte-level), "wordpiece" (BERT's) or "sentencepiece".
        folder: where tokenizer.json or sentencepiece.model and dict.txt are written.
        vocab_size: tokens at most; small text may give fewer.
        files: text files, plain, .gz, .bz2 or .xz, UTF-8, a text a line; or
        texts: the texts themselves, any iterable (wordpiece reads them twice, and keeps those of an iterator in a
            temporary file).
        lowercase: wordpiece: BERT's uncased normalization, which removes accents too.
        options: sentencepiece's trainer's own (`model_type`, `character_coverage`, `byte_fallback`,
            `input_sentence_size`, `normalization_rule_name`, ...); `min_frequency` for the others, and for wordpiece
            `limit_alphabet`, the number of characters at most.

    Raises:
        ValueError: unknown kind, a size that is too small, an option of another kind, or no text.
    """
    if kind not in KINDS:
        raise ValueError(f"tokenizer must be one of {', '.join(KINDS)}, got {kind!r}")
    if (files is None) == (texts is None):
        raise ValueError("give either files or texts to train a tokenizer on")
    if lowercase and kind != "wordpiece":
        raise ValueError(f"lowercase is wordpiece's; {kind} takes no lowercase")
    train = {"bpe": _train_bpe, "wordpiece": _train_wordpiece, "sentencepiece": _train_sentencepiece}
    if kind == "wordpiece":
        options["lowercase"] = lowercase
    tokenizer = train[kind](Counted(Files(list(files or ())) if texts is None else texts), vocab_size, options)
    tokenizer.save(folder)
    logger.info("%s tokenizer of %d tokens in %s", kind, len(tokenizer.symbols), folder)
    return tokenizer


# Texts to learn from


class Files:
    r"""The lines of text files that are not blank, read anew by each iteration; only \n ends a line."""

    def __init__(self, files: list[str | Path]):
        self.files = files

    def __iter__(self) -> Iterator[str]:
        for path in self.files:
            yield from filter(str.strip, read_lines(path))


class Spool:
    """The texts of an iterator in a temporary file, so that they can be read twice."""

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
    """Texts that are counted while they are read, with a progress bar or sparse log lines."""

    def __init__(self, texts: Iterable[str]):
        self.texts = texts
        self.count = 0

    def __iter__(self) -> Iterator[str]:
        for text in progress(self.texts, description="texts read", unit="texts"):
            self.count += 1
            yield text

    def require_some(self) -> None:
        """Raise an error if there was no text."""
        if not self.count:
            raise UserError("no text to train a tokenizer on: every file is empty")


# Models of the `tokenizers` library


def _train_library(model: Any, texts: Counted, trainer: Any) -> Tokenizer:
    model.train_from_iterator(texts, trainer=trainer)
    texts.require_some()
    return _of_library(model)


def _of_library(model: Any) -> Tokenizer:
    return Tokenizer(json.loads(model.to_str()), {TOKENIZER_JSON: json_of(model).encode()})


def _train_bpe(texts: Counted, vocab_size: int, options: dict[str, Any]) -> Tokenizer:
    library = import_tokenizers()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet):
        raise ValueError(f"byte-level BPE needs a vocab_size of {len(alphabet)} (bytes) or more, got {vocab_size}")
    trainer = _trainer(library.trainers.BpeTrainer, vocab_size, options, initial_alphabet=sorted(alphabet))
    return _train_library(byte_bpe(prefix_space=True), texts, trainer)


def _train_wordpiece(texts: Counted, vocab_size: int, options: dict[str, Any]) -> Tokenizer:
    """Train with the alphabet in a fixed order; the library's own order differs every time."""
    lowercase = options.pop("lowercase")
    library = import_tokenizers()
    with contextlib.ExitStack() as stack:
        if iter(texts.texts) is texts.texts:
            texts = Counted(stack.enter_context(Spool(texts)))
        model = wordpiece(lowercase=lowercase)
        alphabet, rare = _wordpiece_alphabet(model, texts, options.pop("limit_alphabet", None))
        fixed = ["[UNK]", *alphabet]
        if vocab_size < len(fixed):
            raise ValueError(
                f"wordpiece needs a vocab_size of {len(fixed):,} (characters) or more for this "
                f"text, got {vocab_size:,}; limit_alphabet leaves the rarest out"
            )
        trainer = _trainer(library.trainers.WordPieceTrainer, vocab_size, options, special_tokens=fixed)
        known = Counted(text.translate(rare) for text in texts)
        _train_library(model, known, trainer)
    # A new tokenizer of the vocabulary: in the trained one the alphabet is special.
    return _of_library(wordpiece(model.get_vocab(), lowercase))


def _wordpiece_alphabet(model: Any, texts: Iterable[str], limit: int | None) -> tuple[list[str], dict[int, str]]:
    """Return the characters as first and as later subwords, and a table that blanks those beyond the limit."""
    counts: Counter[str] = Counter()
    later: set[str] = set()
    for text in texts:
        for word, _ in model.pre_tokenizer.pre_tokenize_str(model.normalizer.normalize_str(text)):
            counts.update(word)
            later.update(word[1:])
    ranked = sorted(counts, key=lambda character: (-counts[character], character))
    kept = set(ranked[:limit])
    subwords = sorted(kept) + sorted(f"##{character}" for character in later & kept)
    return subwords, {ord(character): " " for character in ranked[len(kept) :]}


def _trainer(kind: Any, vocab_size: int, options: dict[str, Any], **more: Any) -> Any:
    unknown = set(options) - {"min_frequency"}
    if unknown:
        raise ValueError(f"{kind.__name__} takes no {', '.join(sorted(unknown))}")
    if vocab_size < 2:
        raise ValueError(f"vocab_size must be 2 or more, got {vocab_size}")
    return kind(vocab_size=vocab_size, show_progress=sys.stderr.isatty(), **options, **more)


# sentencepiece


def train_sentencepiece_model(lines: Iterable[str], size: int, option: str, **options: Any) -> bytes:
    """Train a sentencepiece model and return its file's content.

    Args:
        lines: the text; read once, while it is needed, so that no path gets into the model.
        size: the number of tokens.
        option: what the user calls that number, for errors.
        **options: sentencepiece's own.  Whatever depends on the machine needs a fixed value: the sums of a unigram
            model depend on num_threads in their last digits.

    Raises:
        UserError: the text allows no model of that size; the message says whether the size must be larger or smaller.
    """
    import sentencepiece

    settings: dict[str, Any] = {"character_coverage": 1.0, "max_sentence_length": LONGEST_SENTENCE, "minloglevel": 2}
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=size, **settings | options
        )
    except (RuntimeError, OSError, TypeError) as error:
        reason = sentencepiece_remedy(str(error).strip(), option)
        raise UserError(f"sentencepiece cannot make {size} pieces of this text: {reason}") from error
    return model.getvalue()


def sentencepiece_remedy(reason: str, option: str) -> str:
    """Return what to do about an error of sentencepiece's trainer."""
    if found := TOO_SMALL.search(reason):
        return (
            f"its characters alone are {found[1]} with the special pieces, so {option} must be "
            f"larger: at least {found[1]}"
        )
    if found := TOO_LARGE.search(reason):
        return f"it has not so many, so {option} must be smaller: at most {found[1]}"
    if "sentences_.empty()" in reason or "all_chars_count" in reason:
        return (
            f"it is empty, or all its lines are left out: sentencepiece reads none of more than {LONGEST_SENTENCE:,} "
            f"bytes, nor with {RESERVED} (U+2585), which it keeps for itself"
        )
    return reason.split("] ", 1)[-1]


def _without_unknown(text: str) -> str:
    """Return a text without a literal <unk>, which the trainer would take out: < and > would be unknown for ever."""
    return text.replace(UNKNOWN, f"{UNKNOWN[:-1]} >")


def _train_sentencepiece(texts: Counted, vocab_size: int, options: dict[str, Any]) -> Tokenizer:
    settings = {
        "model_type": "unigram",
        "character_coverage": 0.9995,
        "normalization_rule_name": "nmt_nfkc",
        "num_threads": 4,
        "hard_vocab_limit": False,  # small text may give fewer tokens
        **{"unk_id": 0, "bos_id": -1, "eos_id": -1, "pad_id": -1},
    }
    try:
        model = train_sentencepiece_model(map(_without_unknown, texts), vocab_size, "vocab_size", **settings | options)
    except UserError:
        texts.require_some()
        raise
    texts.require_some()
    return Tokenizer(sentencepiece_state(model), {SENTENCEPIECE_MODEL: model})


# Subwords of `prepare wmt`


def learn_sentencepiece(sample: Path, size: int, kind: str, output: Path, normalization: str = "") -> None:
    """Train a sentencepiece model on a file's lines and write it.

    Args:
        sample: the text.
        size: tokens; fewer where the text has not as many.
        kind: "bpe" or "unigram".
        output: the model's file.
        normalization: sentencepiece's name of the model's own; "": its default, nmt_nfkc.
    """
    named = {"normalization_rule_name": normalization} if normalization else {}

    def train(sample: Path) -> bytes:
        with sample.open(encoding="utf-8", newline="\n") as lines:
            return train_sentencepiece_model(
                (_without_unknown(line.removesuffix("\n")) for line in lines),
                size,
                "--vocab-size",
                model_type=kind,
                num_threads=1,
                input_sentence_size=0,  # the default, kept because the model's file records what is given
                hard_vocab_limit=False,
                shuffle_input_sentence=False,
                **named,
            )

    # In a process of its own, which gives its memory back; workers=1 would be this process.
    [model] = ordered_map(train, [sample], workers=2)
    write_bytes(output, model)


def learn_subword_nmt(sample: Path, merges: int, output: Path) -> None:
    """Learn merges with subword-nmt's learner, in a child process, so that its memory is freed afterwards."""
    with atomic_path(output) as temporary:
        learner = [*command_of("subword_nmt.learn_bpe"), "--symbols", str(merges)]
        run_learner(
            [*learner, "--input", str(sample), "--output", str(temporary)],
            "fewer words than --vocab-size asks for, or none?",
        )
        if temporary.stat().st_size <= len("#version: 0.2\n"):
            raise UserError(f"no merges were learned on {sample}: is there enough text?")


def run_learner(command: list[str], remedy: str) -> None:
    """Run a learner's command; if it fails, raise UserError with its error line and the remedy."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode:
        said = error_line(done.stderr.decode("utf-8", "replace").splitlines())
        raise UserError(f"subword units could not be learned ({said}): {remedy}")
