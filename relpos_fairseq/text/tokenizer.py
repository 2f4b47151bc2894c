"""Split text into the symbols of a fairseq dictionary, with exact character offsets."""

from __future__ import annotations

import json
import os
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos_fairseq.io.files import write_bytes
from relpos_fairseq.text.dictionary import SPECIAL, UNK, write_dictionary

# ---- What every tokenizer gives: pieces, where they stand in the text, and which begin a word.


UNKNOWN = SPECIAL[UNK]
MASK = "<mask>"  # what fairseq's masked_lm task adds after all pieces
# How BERT's vocabularies spell them.
FROM_BERT = {"[CLS]": "<s>", "[PAD]": "<pad>", "[SEP]": "</s>", "[UNK]": UNKNOWN, "[MASK]": MASK}


@dataclass(frozen=True)
class Encoding:
    """A tokenised text."""

    pieces: list[str]  # symbols as in dict.txt, L of them
    # for each the half-open range of characters (Unicode code points) of the text that it covers,
    # without the space before a word.  Ranges never go back; pieces that are parts of one character
    # all cover that character; a piece for nothing but the beginning of a word covers nothing
    offsets: list[tuple[int, int]]
    word_begins: list[bool]  # whether a piece begins a word, for whole-word masking

    def __len__(self) -> int:
        return len(self.pieces)


class Tokenizer(ABC):
    """Splits text into the symbols of a fairseq dictionary."""

    kind: str  # `bpe`, `wordpiece` or `sentencepiece` (or a library's own name for another model)
    # all that `encode` can give, in the order of dict.txt, special ones left out
    symbols: list[str]

    @abstractmethod
    def raw(self, texts: Sequence[str]) -> list[tuple[list[str], list[tuple[int, int]]]]:
        """Pieces and the library's own offsets of every text."""

    @abstractmethod
    def begins_word(self, piece: str) -> bool:
        """Whether a symbol begins a word.

        Scripts that are written without spaces have no mark: there every piece that begins with an
        ideograph or kana counts as a word.
        """

    @abstractmethod
    def decode(self, pieces: Iterable[str]) -> str:
        """The text of some pieces."""

    @abstractmethod
    def write(self, folder: Path) -> None:
        """Write the model's own files."""

    def encode(self, text: str) -> Encoding:
        """Tokenise one text."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Encoding]:
        """Tokenise many texts; half a surrogate pair, which is no character, is refused."""
        for text in texts:
            require_characters(text)
        found = self.raw(texts)
        return [
            Encoding(
                pieces,
                exact_offsets(text, pieces, offsets),
                [first or self.begins_word(piece) for first, piece in _mark_first(pieces)],
            )
            for text, (pieces, offsets) in zip(texts, found, strict=True)
        ]

    def save(self, folder: str | Path) -> None:
        """Write the model and its fairseq dictionary, dict.txt, into a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.write(folder)
        write_dictionary(folder / "dict.txt", ((symbol, 1) for symbol in self.symbols))

    def check_dictionary(self, known: Collection[str], name: str) -> None:
        """Refuse the dictionary of a data set or a model that lacks symbols of this tokenizer.

        `name` is the dictionary in the error's words.
        """
        missing = [symbol for symbol in self.symbols if symbol not in known]
        if missing:
            raise ValueError(
                f"{name} lacks {len(missing):,} of the {len(self.symbols):,} symbols of this "
                f"{self.kind} tokenizer ({', '.join(map(repr, missing[:3]))}): give the tokenizer "
                f"that the dictionary was made with, or the dict.txt beside the tokenizer"
            )


def require_characters(text: str) -> None:
    """Raise a ValueError if a text holds half a surrogate pair, which JSON can smuggle in."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text holds {text[error.start]!r} at character {error.start}, half of a surrogate "
            f"pair: repair or leave out this text"
        ) from None


def _mark_first(pieces: list[str]) -> Iterable[tuple[bool, str]]:
    return ((number == 0, piece) for number, piece in enumerate(pieces))


def exact_offsets(text: str, pieces: Sequence[str], offsets: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Make a library's offsets exact: half-open ranges in characters, one for each piece.

    Spaces around a piece are not the piece's.  Combining marks that the tokenizer dropped belong to
    the letter before them (else a WordPiece model would cut the accent off an answer's last
    letter).  An empty range within a character, one of several pieces for it, becomes the
    character's.  Ranges never go back.
    """
    exact = []
    following = [start for start, _ in [*offsets, (len(text), 0)][1:]]
    for piece, (start, end), limit in zip(pieces, offsets, following, strict=True):
        if start == end and piece != "▁" and end < len(text) and not text[end].isspace():
            end += 1
        inner_start, inner_end = start, end
        while inner_start < inner_end and text[inner_start].isspace():
            inner_start += 1
        while inner_end > inner_start and text[inner_end - 1].isspace():
            inner_end -= 1
        if inner_start < inner_end:
            start, end = inner_start, inner_end
            while end < limit and unicodedata.category(text[end]).startswith("M"):
                end += 1
        exact.append((start, end))
    return exact


def is_unspaced(character: str) -> bool:
    """Whether a character is of a script written without spaces: ideographs and kana."""
    code = ord(character)
    return (
        0x3040 <= code <= 0x30FF
        or 0x3400 <= code <= 0x4DBF
        or 0x4E00 <= code <= 0x9FFF
        or 0xF900 <= code <= 0xFAFF
        or 0x20000 <= code <= 0x323AF
    )


# ---- Byte-level BPE, WordPiece and other models of the `tokenizers` library.


TOKENIZER_JSON = "tokenizer.json"
_KINDS = {"BPE": "bpe", "WordPiece": "wordpiece", "Unigram": "unigram", "WordLevel": "wordlevel"}
# The printable characters that byte-level BPE writes for the space and for the other white space.
_BYTE_SPACES = ("Ġ", "Ċ", "ĉ", "č")


def import_tokenizers() -> Any:
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
        write_bytes(folder / TOKENIZER_JSON, self.model.to_str(pretty=True).encode())

    @classmethod
    def from_json(cls, path: Path) -> LibraryTokenizer:
        """Read a tokenizer.json, ours or a Hugging Face folder's."""
        library = import_tokenizers()
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
    return import_tokenizers().processors.TemplateProcessing(
        single="<s> $A </s>",
        pair=f"<s> $A </s> {between}$B:{segment} </s>:{segment}",
        special_tokens=[(name, numbers[name]) for name in ("<s>", "</s>")],
    )


def byte_bpe(vocabulary: dict[str, int] | None = None, merges: Any = None, prefix_space=False):
    """An untrained byte-level BPE of GPT-2's kind, or the one of a vocabulary and merges.

    `merges` are pairs of pieces in their order; with `prefix_space` a space goes before every text,
    so that a text's first word is spelt as everywhere else.
    """
    library = import_tokenizers()
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
    library = import_tokenizers()
    unknown = "[UNK]" if vocabulary is None or "[UNK]" in vocabulary else UNKNOWN
    options = {} if vocabulary is None else {"vocab": vocabulary}
    model = library.Tokenizer(library.models.WordPiece(unk_token=unknown, max_input_chars_per_word=100, **options))
    model.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
    model.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    model.decoder = library.decoders.WordPiece()
    return model


# ---- sentencepiece's unigram and BPE models.


SENTENCEPIECE_MODEL = "sentencepiece.model"
_SPACE = "▁"


def import_sentencepiece() -> Any:
    """The `sentencepiece` module, which must be installed, and new enough to give offsets."""
    try:
        import sentencepiece
    except ImportError:
        raise ValueError("sentencepiece models need their library: pip install sentencepiece") from None
    if not hasattr(sentencepiece.SentencePieceProcessor, "EncodeAsOffsetMapping"):
        raise ValueError(
            f"sentencepiece {sentencepiece.__version__} gives no character offsets in the form "
            f"that is read here: pip install 'sentencepiece>=0.2.3'"
        )
    return sentencepiece


class SentencePieceTokenizer(Tokenizer):
    """A sentencepiece model, out of its serialised form."""

    kind = "sentencepiece"

    def __init__(self, model: bytes):
        library = import_sentencepiece()
        try:
            self.processor = library.SentencePieceProcessor(model_proto=model)
        except (RuntimeError, OSError) as error:
            raise ValueError(f"no sentencepiece model: {error}") from None
        self._bytes = model
        self._unknown = self.processor.unk_id()
        numbers = range(self.processor.get_piece_size())
        self.symbols = [
            self.processor.id_to_piece(n)
            for n in numbers
            if not (self.processor.is_control(n) or self.processor.is_unknown(n))
        ]
        self.symbols = [one for one in self.symbols if one not in {*SPECIAL, MASK}]

    def raw(self, texts: Sequence[str]) -> list[tuple[list[str], list[tuple[int, int]]]]:
        found = [self.processor.encode(text, return_type="offset_mapping") for text in texts]
        return [
            (
                [
                    UNKNOWN if number == self._unknown else piece
                    for number, piece in zip(one["ids"], one["pieces"], strict=True)
                ],
                [tuple(pair) for pair in one["offsets"]],
            )
            for one in found
        ]

    def begins_word(self, piece: str) -> bool:
        """By the sign for a space, which stands alone before a word's unknown characters."""
        if piece == UNKNOWN:
            return False
        if piece in SPECIAL or piece == MASK:
            return True
        return piece.startswith(_SPACE) or is_unspaced(piece[0])

    def decode(self, pieces: Iterable[str]) -> str:
        return self.processor.decode_pieces(list(pieces))

    def write(self, folder: Path) -> None:
        write_bytes(folder / SENTENCEPIECE_MODEL, self._bytes)

    @classmethod
    def from_file(cls, path: Path) -> SentencePieceTokenizer:
        try:
            return cls(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None


# ---- Read a tokenizer from a folder: ours, a Hugging Face model's, or fairseq's GPT-2 files.


_EXPECTED = (
    "sentencepiece.model, sentencepiece.bpe.model, tokenizer.json, encoder.json and vocab.bpe, "
    "vocab.json and merges.txt, or vocab.txt"
)


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the tokenizer that a folder holds.

    Looked for in this order: sentencepiece's model (ours, XLM-R's name, ALBERT's), tokenizer.json
    (ours, or a Hugging Face folder's), GPT-2's encoder.json and vocab.bpe (as fairseq's RoBERTa
    uses them: dict.txt then names pieces by number), vocab.json and merges.txt, and BERT's
    vocab.txt (lower case as tokenizer_config.json's do_lower_case says; BERT's default, true,
    without it).

    Raises:
        ValueError: the folder is absent or holds none of them, or a file is broken.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"no tokenizer folder {folder}: give a folder that holds {_EXPECTED}")
    for names, read in _READERS:
        paths = [folder / name for name in names]
        if all(path.is_file() for path in paths):
            return read(*paths)
    raise ValueError(f"no tokenizer in {folder}: expected {_EXPECTED}")


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None


def _vocabulary(path: Path) -> dict[str, int]:
    found = _json(path)
    if not isinstance(found, dict) or not all(isinstance(n, int) for n in found.values()):
        raise ValueError(f"{path} is no vocabulary: expected an object of piece to number")
    return found


def _byte_bpe(vocabulary: Path, merges: Path, ids_as_symbols: bool) -> LibraryTokenizer:
    lines = merges.read_text(encoding="utf-8").split("\n")
    pairs = [tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")]
    wrong = next((pair for pair in pairs if len(pair) != 2), None)
    if wrong is not None:
        raise ValueError(f"{merges}: {' '.join(wrong)!r} is no pair of pieces")
    try:
        model = byte_bpe(_vocabulary(vocabulary), pairs)
    except ValueError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{merges} does not belong to {vocabulary.name}: {error}") from None
    return LibraryTokenizer(model, ids_as_symbols)


def _wordpiece(path: Path) -> LibraryTokenizer:
    lines = path.read_text(encoding="utf-8").split("\n")
    while lines and not lines[-1]:
        lines.pop()
    vocabulary = {line.rstrip("\r"): number for number, line in enumerate(lines)}
    if len(vocabulary) != len(lines):
        raise ValueError(f"{path} names {len(lines) - len(vocabulary)} pieces twice")
    if "[UNK]" not in vocabulary:
        raise ValueError(f"{path} is no BERT vocabulary: it lacks [UNK]")
    settings = path.with_name("tokenizer_config.json")
    lowercase = not settings.is_file() or bool(_json(settings).get("do_lower_case", True))
    return LibraryTokenizer(wordpiece(vocabulary, lowercase))


_READERS: tuple[tuple[tuple[str, ...], Callable[..., Tokenizer]], ...] = (
    *(
        ((name,), SentencePieceTokenizer.from_file)
        for name in (SENTENCEPIECE_MODEL, "sentencepiece.bpe.model", "spiece.model")
    ),
    ((TOKENIZER_JSON,), LibraryTokenizer.from_json),
    (("encoder.json", "vocab.bpe"), lambda v, m: _byte_bpe(v, m, ids_as_symbols=True)),
    (("vocab.json", "merges.txt"), lambda v, m: _byte_bpe(v, m, ids_as_symbols=False)),
    (("vocab.txt",), _wordpiece),
)

# All files that a tokenizer may consist of, and those of them that say more than settings.
MODEL_FILES = tuple(dict.fromkeys(name for names, _ in _READERS for name in names))
FILES = (*MODEL_FILES, "tokenizer_config.json")
