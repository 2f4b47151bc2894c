"""Split text into the symbols of a fairseq dictionary, with exact character offsets and word starts.

Byte-level BPE and WordPiece run in the `tokenizers` library, sentencepiece's models and subword-nmt's merges in their
own.  Importing this file needs none of them.
"""

from __future__ import annotations

import io
import json
import os
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import write_bytes
from relpos_fairseq.text.dictionary import FILE as DICTIONARY
from relpos_fairseq.text.dictionary import MASK, SPECIAL, UNKNOWN, WORD_START, write_dictionary

# How BERT's vocabularies spell the special symbols.
FROM_BERT = {"[CLS]": "<s>", "[PAD]": "<pad>", "[SEP]": "</s>", "[UNK]": UNKNOWN, "[MASK]": MASK}
TOKENIZER_JSON, SENTENCEPIECE_MODEL = "tokenizer.json", "sentencepiece.model"
SUBWORD_NMT, SENTENCEPIECE = "subword-nmt", "sentencepiece"  # kinds of subwords of `prepare wmt`
REMEMBERED = 24_000  # words whose subword-nmt subwords are cached
_KINDS = {"BPE": "bpe", "WordPiece": "wordpiece", "Unigram": "unigram", "WordLevel": "wordlevel"}
# The printable characters that byte-level BPE writes for the space and for other white space.
_BYTE_SPACES = ("Ġ", "Ċ", "ĉ", "č")
# Code points of kana and ideographs.
_UNSPACED = ((0x3040, 0x30FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF), (0x20000, 0x323AF))


@dataclass(frozen=True)
class Encoding:
    """A tokenized text of L tokens."""

    pieces: list[str]  # symbols as in dict.txt
    # for each token the half-open range of characters (Unicode code points) of the text that it covers, without the
    # space before a word.  Ranges never go back; tokens that are parts of one character all cover that character; a
    # token that only marks the start of a word covers nothing
    offsets: list[tuple[int, int]]
    word_begins: list[bool]  # True where a token begins a word, for whole-word masking

    def __len__(self) -> int:
        return len(self.pieces)


class Tokenizer(ABC):
    """Splits text into the symbols of a fairseq dictionary."""

    kind: str  # "bpe", "wordpiece" or "sentencepiece" (or a library's own name for another model)
    symbols: list[str]  # all that `encode` can give, in the order of dict.txt, without special symbols

    @abstractmethod
    def raw(self, texts: Sequence[str]) -> list[tuple[list[str], list[tuple[int, int]]]]:
        """Return the symbols and the library's own offsets of every text."""

    @abstractmethod
    def begins_word(self, piece: str) -> bool:
        """Return True if a symbol begins a word.

        Scripts that are written without spaces have no mark: every symbol that begins with an ideograph or kana counts
        as a word.
        """

    @abstractmethod
    def decode(self, pieces: Iterable[str]) -> str:
        """Return the text of symbols."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the model's own files into a folder."""

    def encode(self, text: str) -> Encoding:
        """Tokenize one text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Tokenize many texts; a text with half a surrogate pair, which is no character, is refused."""
        for text in texts:
            require_characters(text)
        return [
            Encoding(
                pieces,
                exact_offsets(text, pieces, offsets),
                [number == 0 or self.begins_word(piece) for number, piece in enumerate(pieces)],
            )
            for text, (pieces, offsets) in zip(texts, self.raw(texts), strict=True)
        ]

    def save(self, folder: str | Path) -> None:
        """Write the model and its fairseq dictionary, dict.txt, into a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.write(folder)
        write_dictionary(folder / DICTIONARY, ((symbol, 1) for symbol in self.symbols))

    def check_dictionary(self, known: Collection[str], name: str) -> None:
        """Raise an error if `known`, the dictionary of a data set or a model, lacks symbols of this tokenizer.

        `name` is what the error calls the dictionary.
        """
        missing = [symbol for symbol in self.symbols if symbol not in known]
        if missing:
            raise UserError(
                f"{name} lacks {len(missing):,} of the {len(self.symbols):,} symbols of this "
                f"{self.kind} tokenizer ({', '.join(map(repr, missing[:3]))}): give the tokenizer "
                f"that the dictionary was made with, or the dict.txt beside the tokenizer"
            )


def word_start_flags(tokenizer: Tokenizer, symbols: Iterable[str]) -> list[bool]:
    """Return for each symbol of a dictionary, special symbols included, True if it begins a word.

    Special symbols and fillers stand alone, so they begin a word.  Of `<unk>` the tokenizer decides: where it marks
    spaces, an unknown token may continue a word.
    """
    return [stands_alone(symbol) or tokenizer.begins_word(symbol) for symbol in symbols]


def stands_alone(symbol: str) -> bool:
    """Return True for a special symbol other than `<unk>`, for `<mask>` and for fairseq's fillers."""
    return symbol.startswith("madeupword") or (symbol in (*SPECIAL, MASK) and symbol != UNKNOWN)


def require_characters(text: str) -> None:
    """Raise an error if a text holds half a surrogate pair, which JSON allows."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"text holds {text[error.start]!r} at character {error.start}, half of a surrogate "
            f"pair: repair or leave out this text"
        ) from None


def exact_offsets(text: str, pieces: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Make a library's offsets exact: a half-open range of characters for each token.

    A range holds no outer space.  Combining marks that the tokenizer dropped belong to the letter before them (else
    a WordPiece model would cut the accent off an answer's last letter).  An empty range within a character, one of
    several tokens for it, becomes the character's.  Ranges never go back.
    """
    exact = []
    following = [start for start, _ in [*offsets, (len(text), 0)][1:]]
    for piece, (start, end), limit in zip(pieces, offsets, following, strict=True):
        if start == end and piece != WORD_START and end < len(text) and not text[end].isspace():
            end += 1
        covered = text[start:end]
        if covered.strip():
            start, end = start + len(covered) - len(covered.lstrip()), end - len(covered) + len(covered.rstrip())
            while end < limit and unicodedata.category(text[end]).startswith("M"):
                end += 1
        exact.append((start, end))
    return exact


def is_unspaced(character: str) -> bool:
    """Return True for a character of a script written without spaces: ideographs and kana."""
    return any(first <= ord(character) <= last for first, last in _UNSPACED)


# Models of the `tokenizers` library


def import_tokenizers() -> Any:
    """Return the `tokenizers` library, which must be installed."""
    # Its threads and a process that forks (a DataLoader's workers) do not go together.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        import tokenizers
    except ImportError:
        raise UserError("byte-level BPE and WordPiece need the library tokenizers: pip install tokenizers") from None
    return tokenizers


class LibraryTokenizer(Tokenizer):
    """A model of the `tokenizers` library.

    Text is text: what looks like a special symbol in it ("[SEP]", "<mask>") is split like any other text, and no
    special symbol is added.

    Args:
        model: a tokenizers.Tokenizer; its truncation, padding and template are not used.
        ids_as_symbols: dict.txt names tokens by their numbers, as fairseq's GPT-2 dictionary does.
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
        """Return True if a symbol begins a word by its model's mark: no `##`, or the mark for a space."""
        text = self._piece_of.get(piece, piece)
        if piece == UNKNOWN and self.kind == "unigram":
            return False  # the mark for a space stands alone before a word's unknown characters
        if not text or piece in SPECIAL or piece == MASK:
            return True
        if self.kind == "wordpiece":
            return not text.startswith(self.prefix)
        if self.kind == "bpe":
            return text.startswith(_BYTE_SPACES) or is_unspaced(self._first_character(text))
        return text.startswith(WORD_START) or is_unspaced(text[0])

    def _first_character(self, piece: str) -> str:
        decoded = self.model.decoder.decode([piece]) if self.model.decoder else piece
        return decoded[:1] or " "

    def decode(self, pieces: Iterable[str]) -> str:
        """Return the text of symbols; `<unk>` stays as it is written."""
        known = [self._piece_of.get(piece, piece) for piece in pieces]
        if self.model.decoder is None:
            return " ".join(known)
        return self.model.decoder.decode(known).strip(" ")

    def write(self, folder: Path) -> None:
        """Write tokenizer.json, which cannot say that symbols are numbers."""
        if self.ids_as_symbols:
            raise ValueError("a GPT-2 folder (encoder.json, vocab.bpe) is copied, not saved anew")
        write_bytes(folder / TOKENIZER_JSON, self.model.to_str(pretty=True).encode())


def single_and_pair(numbers: Mapping[str, int], separators: int, segment: int = 1) -> Any:
    """Return a post-processor that puts <s> and </s> around one text and around a pair.

    Args:
        numbers: ids of `<s>` and `</s>`.
        separators: `</s>` between the two texts, beside the first text's own.
        segment: of the second text, separators included.
    """
    between = f"</s>:{segment} " * separators
    return import_tokenizers().processors.TemplateProcessing(
        single="<s> $A </s>",
        pair=f"<s> $A </s> {between}$B:{segment} </s>:{segment}",
        special_tokens=[(name, numbers[name]) for name in ("<s>", "</s>")],
    )


def byte_bpe(model: Any = None, prefix_space: bool = False) -> Any:
    """Return a byte-level BPE tokenizer of GPT-2's kind around a `tokenizers.models.BPE`, untrained if None.

    With `prefix_space` a space is put before every text, so that its first word is spelt as everywhere else.
    """
    library = import_tokenizers()
    tokenizer = library.Tokenizer(model or library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def wordpiece(vocabulary: dict[str, int] | None = None, lowercase: bool = False) -> Any:
    """Return a WordPiece tokenizer with BERT's normalization around a vocabulary, untrained if None.

    `lowercase` is BERT's uncased normalization: lower case, accents removed.
    """
    library = import_tokenizers()
    options = {} if vocabulary is None else {"vocab": vocabulary}
    model = library.models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=100, **options)
    tokenizer = library.Tokenizer(model)
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    return tokenizer


# sentencepiece and subword-nmt


def load_sentencepiece(model: Path | bytes) -> Any:
    """Return the `SentencePieceProcessor` of a model file, or of a file's content.

    Raises:
        UserError: the library is not installed, or the model is none.
    """
    try:
        import sentencepiece
    except ImportError:
        raise UserError("sentencepiece models need their library: pip install sentencepiece") from None
    try:
        content = model if isinstance(model, bytes) else model.read_bytes()
        return sentencepiece.SentencePieceProcessor(model_proto=content)
    except (RuntimeError, OSError) as error:
        name = "this" if isinstance(model, bytes) else model
        raise UserError(f"{name} is not a sentencepiece model: {error}") from None


def usable_pieces(processor: Any) -> list[str]:
    """Return the subwords of a sentencepiece model in order, without control and unknown symbols."""
    numbers = range(processor.get_piece_size())
    return [processor.id_to_piece(n) for n in numbers if not (processor.is_control(n) or processor.is_unknown(n))]


class SentencePieceTokenizer(Tokenizer):
    """A unigram or BPE model of sentencepiece, from its file or the file's content."""

    kind = "sentencepiece"

    def __init__(self, model: Path | bytes):
        self.processor = load_sentencepiece(model)
        if not hasattr(self.processor, "EncodeAsOffsetMapping"):
            raise UserError("this version of sentencepiece gives no offsets: pip install 'sentencepiece>=0.2.3'")
        self.symbols = [piece for piece in usable_pieces(self.processor) if piece not in {*SPECIAL, MASK}]

    def raw(self, texts: Sequence[str]) -> list[tuple[list[str], list[tuple[int, int]]]]:
        unknown = self.processor.unk_id()
        result = []
        for one in (self.processor.encode(text, return_type="offset_mapping") for text in texts):
            named = zip(one["ids"], one["pieces"], strict=True)
            pieces = [UNKNOWN if number == unknown else piece for number, piece in named]
            result.append((pieces, [tuple(pair) for pair in one["offsets"]]))
        return result

    def begins_word(self, piece: str) -> bool:
        """Return True if a symbol begins a word: by the mark for a space, which precedes unknown characters too."""
        if piece == UNKNOWN:
            return False
        if piece in SPECIAL or piece == MASK:
            return True
        return piece.startswith(WORD_START) or is_unspaced(piece[0])

    def decode(self, pieces: Iterable[str]) -> str:
        return self.processor.decode_pieces(list(pieces))

    def write(self, folder: Path) -> None:
        write_bytes(folder / SENTENCEPIECE_MODEL, self.processor.serialized_model_proto())


class SubwordNmt:
    """Splits the words of a line as subword-nmt does with a file of merges; caches the subwords of frequent words."""

    def __init__(self, codes: Path):
        from subword_nmt.apply_bpe import BPE

        with redirect_stderr(io.StringIO()), codes.open(encoding="utf-8") as file:
            self.library = BPE(file)
        self.subwords = lru_cache(REMEMBERED)(self.split)

    def split(self, word: str) -> str:
        """Split a word; the library's own cache, which is not bounded, is not used."""
        self.library.cache.clear()
        return self.library.segment(word)

    def __call__(self, line: str) -> str:
        """Return a line's subwords, separated by spaces."""
        return " ".join(map(self.subwords, line.split(" ")))


def load_subwords(kind: str, path: Path) -> Callable[[str], str]:
    """Return a function from a line to its subwords, separated by spaces, from a file of merges or a model.

    `kind` is "subword-nmt" or "sentencepiece".
    """
    if kind == SUBWORD_NMT:
        return SubwordNmt(path)
    processor = load_sentencepiece(path)
    return lambda line: " ".join(processor.encode(line, out_type=str))


# Tokenizers in folders


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the tokenizer that a folder holds.

    Looked for in this order: sentencepiece's model (ours, XLM-R's name, ALBERT's), tokenizer.json (ours, or a Hugging
    Face folder's), GPT-2's encoder.json and vocab.bpe (as fairseq's RoBERTa uses them: dict.txt then names tokens by
    number), vocab.json and merges.txt, and BERT's vocab.txt (lower case as tokenizer_config.json's do_lower_case says;
    BERT's default, true, without it).

    Raises:
        UserError: the folder is absent or holds none of them, or a file is broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no tokenizer folder {folder}: give a folder that holds {_EXPECTED}")
    for names, read in _READERS.items():
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            return read(*paths)
    raise UserError(f"no tokenizer in {folder}: expected {_EXPECTED}")


def _read_by_library(read: Callable[..., Any], kind: str, *paths: Path) -> Any:
    try:
        return read(*map(str, paths))
    except Exception as error:  # the library raises bare Exceptions
        raise UserError(f"{' and '.join(map(str, paths))}: no {kind} of the tokenizers library: {error}") from None


def _load_json(path: Path) -> LibraryTokenizer:
    return LibraryTokenizer(_read_by_library(import_tokenizers().Tokenizer.from_file, "tokenizer.json", path))


def _load_byte_bpe(vocabulary: Path, merges: Path) -> LibraryTokenizer:
    model = _read_by_library(import_tokenizers().models.BPE.from_file, "byte-level BPE", vocabulary, merges)
    return LibraryTokenizer(byte_bpe(model), ids_as_symbols=vocabulary.name == "encoder.json")


def _load_wordpiece(path: Path) -> LibraryTokenizer:
    vocabulary = _read_by_library(import_tokenizers().models.WordPiece.read_file, "WordPiece", path)
    lines = len(path.read_text(encoding="utf-8").rstrip("\n").split("\n"))
    if len(vocabulary) != lines:
        raise UserError(f"{path} names {lines - len(vocabulary)} pieces twice")
    if "[UNK]" not in vocabulary:
        raise UserError(f"{path} is no BERT vocabulary: it lacks [UNK]")
    settings, lowercase = path.with_name("tokenizer_config.json"), True
    if settings.is_file():
        try:
            lowercase = bool(json.loads(settings.read_text(encoding="utf-8")).get("do_lower_case", True))
        except ValueError as error:
            raise UserError(f"{settings} is no JSON: {error}") from None
    return LibraryTokenizer(wordpiece(vocabulary, lowercase))


_READERS: dict[tuple[str, ...], Callable[..., Tokenizer]] = {
    (SENTENCEPIECE_MODEL,): SentencePieceTokenizer,
    ("sentencepiece.bpe.model",): SentencePieceTokenizer,
    ("spiece.model",): SentencePieceTokenizer,
    (TOKENIZER_JSON,): _load_json,
    ("encoder.json", "vocab.bpe"): _load_byte_bpe,
    ("vocab.json", "merges.txt"): _load_byte_bpe,
    ("vocab.txt",): _load_wordpiece,
}
_EXPECTED = ", ".join(" and ".join(names) for names in _READERS)

# All files that a tokenizer may consist of; those of MODEL_FILES hold more than settings.
MODEL_FILES = tuple(name for names in _READERS for name in names)
FILES = (*MODEL_FILES, "tokenizer_config.json")
