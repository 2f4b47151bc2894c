"""Byte-level BPE, WordPiece and other models of the `tokenizers` library."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relpos_fairseq.data.tokenizers.base import FROM_BERT, MASK, SPECIAL, UNKNOWN, Tokenizer, is_unspaced
from relpos_fairseq.engine.files import write_bytes

FILE = "tokenizer.json"
_KINDS = {"BPE": "bpe", "WordPiece": "wordpiece", "Unigram": "unigram", "WordLevel": "wordlevel"}
# The printable characters that byte-level BPE writes for the space and for the other white space.
_BYTE_SPACES = ("Ġ", "Ċ", "ĉ", "č")


def import_library() -> Any:
    """The `tokenizers` module, which must be installed."""
    # Its threads and a process that forks (a DataLoader's workers) do not go together.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers
    except ImportError:
        raise ValueError("byte-level BPE and WordPiece need the library tokenizers: pip install tokenizers") from None
    return tokenizers


class LibraryTokenizer(Tokenizer):
    """A model of the `tokenizers` library.

    Text is text: what looks like a special symbol in it ("[SEP]", "<mask>") is split like any
    other text, and no special symbol is added.

    Args:
        model: a tokenizers.Tokenizer; its truncation, padding and template are not used.
        ids_as_symbols: dict.txt names pieces by their numbers, as fairseq's GPT-2 dictionary does.
    """

    def __init__(self, model: Any, ids_as_symbols: bool = False):
        model.no_truncation()
        model.no_padding()
        model.encode_special_tokens = True
        self.model = model
        self.ids_as_symbols = ids_as_symbols
        self.kind = _KINDS.get(type(model.model).__name__, type(model.model).__name__)
        self.prefix = getattr(model.model, "continuing_subword_prefix", None) or "##"
        vocabulary = sorted(model.get_vocab().items(), key=lambda item: item[1])
        self._symbol_of = {
            number: str(number) if ids_as_symbols else FROM_BERT.get(piece, piece) for piece, number in vocabulary
        }
        self._piece_of = {self._symbol_of[number]: piece for piece, number in vocabulary}
        reserved = {*SPECIAL, MASK}
        self.symbols = [symbol for symbol in dict.fromkeys(self._symbol_of.values()) if symbol not in reserved]

    def raw(self, texts: Sequence[str]) -> list[tuple[list[str], list[tuple[int, int]]]]:
        found = self.model.encode_batch(list(texts), add_special_tokens=False)
        return [([self._symbol_of[n] for n in one.ids], one.offsets) for one in found]

    def begins_word(self, piece: str) -> bool:
        """By the mark of the model: no `##`, or the sign for a space."""
        text = self._piece_of.get(piece, piece)
        if piece == UNKNOWN and self.kind == "unigram":
            return False  # the sign for a space stands alone before a word's unknown characters
        if not text or piece in SPECIAL or piece == MASK:
            return True
        if self.kind == "wordpiece":
            return not text.startswith(self.prefix)
        if self.kind == "bpe":
            return text.startswith(_BYTE_SPACES) or is_unspaced(self._bytes_text(text))
        return text.startswith("▁") or is_unspaced(text[0])

    def _bytes_text(self, piece: str) -> str:
        decoded = self.model.decoder.decode([piece]) if self.model.decoder else piece
        return decoded[:1] or " "

    def decode(self, pieces: Iterable[str]) -> str:
        """The text of some pieces; `<unk>` stays as it is written."""
        known = [self._piece_of.get(piece, piece) for piece in pieces]
        if self.model.decoder is None:
            return " ".join(known)
        return self.model.decoder.decode(known).strip(" ")

    def write(self, folder: Path) -> None:
        """Write tokenizer.json, which cannot say that symbols are numbers."""
        if self.ids_as_symbols:
            raise ValueError("a GPT-2 folder (encoder.json, vocab.bpe) is copied, not saved anew")
        write_bytes(folder / FILE, self.model.to_str(pretty=True).encode())

    @classmethod
    def from_json(cls, path: Path) -> LibraryTokenizer:
        """Read a tokenizer.json, ours or a Hugging Face folder's."""
        library = import_library()
        try:
            return cls(library.Tokenizer.from_str(path.read_text(encoding="utf-8")))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{path} is no tokenizer.json of the tokenizers library: {error}") from None


def single_and_pair(numbers: Mapping[str, int], separators: int, segment: int = 1) -> Any:
    """Return what puts <s> and </s> around texts: the task's form of one text and of a pair.

    `separators` are </s> between the two texts beside the first text's own; `segment` is of the
    second text, separators included.
    """
    between = f"</s>:{segment} " * separators
    return import_library().processors.TemplateProcessing(
        single="<s> $A </s>",
        pair=f"<s> $A </s> {between}$B:{segment} </s>:{segment}",
        special_tokens=[(name, numbers[name]) for name in ("<s>", "</s>")],
    )


def byte_bpe(vocabulary: dict[str, int] | None = None, merges: Any = None, prefix_space=False):
    """An untrained byte-level BPE of GPT-2's kind, or the one of a vocabulary and merges.

    `merges` are pairs of pieces in their order; with `prefix_space` a space goes before every text,
    so that a text's first word is spelt as everywhere else.
    """
    library = import_library()
    if vocabulary is None:
        model = library.Tokenizer(library.models.BPE())
    else:
        model = library.Tokenizer(library.models.BPE(vocab=vocabulary, merges=merges))
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    model.decoder = library.decoders.ByteLevel()
    return model


def wordpiece(vocabulary: dict[str, int] | None = None, lowercase: bool = False) -> Any:
    """An untrained WordPiece model with BERT's normalisation, or the one of a vocabulary.

    `lowercase` is BERT's uncased normalisation: lower case, accents removed.
    """
    library = import_library()
    unknown = "[UNK]" if vocabulary is None or "[UNK]" in vocabulary else UNKNOWN
    options = {} if vocabulary is None else {"vocab": vocabulary}
    model = library.Tokenizer(library.models.WordPiece(unk_token=unknown, max_input_chars_per_word=100, **options))
    model.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
    model.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    model.decoder = library.decoders.WordPiece()
    return model
