"""Split text into the symbols of a fairseq dictionary, with exact character offsets and word starts.

Byte-level BPE and WordPiece run in the `tokenizers` library, sentencepiece's models and subword-nmt's merges in their
own.  Importing this file needs none of them.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import write_bytes
from relpos_fairseq.io.reading import reading
from relpos_fairseq.text.dictionary import FILE as DICTIONARY
from relpos_fairseq.text.dictionary import MASK, SPECIAL, UNKNOWN, WORD_START, write_dictionary

State = dict[str, Any]  # the content of a tokenizer.json
_RESERVED = (*SPECIAL, MASK)
# How vocabularies spell these: fairseq's and RoBERTa's, BERT's, ALBERT's.
SPELLINGS = (_RESERVED, ("[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"), ("[CLS]", "<pad>", "[SEP]", "<unk>", "[MASK]"))
SENTENCEPIECE_MODEL = "sentencepiece.model"
SUBWORD_NMT, SENTENCEPIECE = "subword-nmt", "sentencepiece"  # kinds of subwords of `prepare wmt`
_KINDS = {"BPE": "bpe", "WordPiece": "wordpiece", "Unigram": "unigram"}
_HIDDEN = " \0"  # before the name of a special symbol that a model would find in text; no model sees a space
# `<mask>` takes the place of a word and of the space before it.
_MASK_FLAGS = {"single_word": False, "lstrip": True, "rstrip": False, "normalized": False}
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


class Pairs(NamedTuple):
    """How two texts are joined for a model: <s> first </s>, further </s>, second </s>."""

    separators: int  # further </s>: BERT's 0, RoBERTa's 1
    segments: bool  # all that follows the first </s> has token type 1, in place of 0
    usual: bool = True  # False: they are joined in another way, which no task here knows
    alone: bool = True  # False: nor is a text alone <s> text </s> of token type 0

    def joined(self, parts: Sequence[Sequence[int]], begin: int, end: int) -> tuple[list[int], list[int]]:
        """Return the ids and token types of one text or two, given the ids of each, of <s> and of </s>."""
        before = [begin, *parts[0], end]
        after = [*[end] * self.separators, *parts[1], end] if parts[1:] else []
        return before + after, [0] * len(before) + [int(self.segments)] * len(after)


class Tokenizer:
    """Splits text into the symbols of a fairseq dictionary, by a model of the `tokenizers` library.

    Text is text: what looks like a special symbol in it ("[SEP]", "<mask>") is split like any other text, and no
    special symbol is added. Tokens that were added to a vocabulary are found whole.

    Args:
        state: content of a tokenizer.json; its truncation, padding and template are not used.
        files: the files of the tokenizer by name; a path, or a new file's content.
        names: the model's own names of fairseq's special symbols; None: as its vocabulary spells them.
        ids_as_symbols: dict.txt names tokens by their numbers, as fairseq's GPT-2 dictionary does.
        carried: settings of tokenizer_config.json that change no id, and go back as they were.
        pairs: returns how its library joins two texts; None: as models with such a vocabulary do.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        files: Mapping[str, Path | bytes],
        names: Mapping[str, str] | None = None,
        ids_as_symbols: bool = False,
        carried: Mapping[str, Any] = {},
        pairs: Callable[[], Pairs | None] = lambda: None,
    ):
        self.files, self.carried = files, carried
        # The model's own name of each special symbol that it has.
        self.names = dict(spelled(vocabulary_of(state)) if names is None else names)
        self._content = json.dumps(dict(state))
        self.model = _as_text(state, self.names)
        self.ids_as_symbols = ids_as_symbols
        described = json.dumps([state["pre_tokenizer"], state["normalizer"]])
        marks = next((mark for mark in ("Metaspace", "ByteLevel") if f'"{mark}"' in described), None)
        self._bytes = marks == "ByteLevel"
        self.kind = "sentencepiece" if marks == "Metaspace" else _KINDS.get(state["model"]["type"], "wordlevel")
        self.prefix = state["model"].get("continuing_subword_prefix") or "##"
        self._pairs = pairs
        self.added = {token["content"]: token for token in state["added_tokens"]}  # with their flags
        ours = {piece: symbol for symbol, piece in self.names.items()}
        # The library's number of every symbol, and its own name of it.
        self.numbers: dict[str, int] = {}
        self.pieces: dict[str, str] = {}
        vocabulary = self.model.get_vocab()
        if len(vocabulary) != len({*vocabulary.values()}):
            raise UserError(f"{len(vocabulary)} tokens have {len({*vocabulary.values()})} numbers: two share one")
        for hidden, number in sorted(vocabulary.items(), key=lambda item: item[1]):
            piece = hidden.removeprefix(_HIDDEN)
            symbol = ours.get(piece) or (str(number) if ids_as_symbols else _as_symbol(piece, self.numbers))
            self.numbers[symbol], self.pieces[symbol] = number, piece
        # What `encode` can give, in the order of dict.txt, without special symbols.
        self.symbols = [symbol for symbol in self.numbers if symbol not in _RESERVED]
        self._symbol_of = {number: symbol for symbol, number in self.numbers.items()}
        self._text_of = self._symbol_of | {self.numbers[symbol]: UNKNOWN for symbol in self.names}

    def raw(self, texts: Sequence[str]) -> list[tuple[list[str], list[tuple[int, int]]]]:
        """Return the symbols and the library's own offsets of every text."""
        leads = [self._lead(text) for text in texts]
        try:
            begun = [text[lead:] for text, lead in zip(texts, leads, strict=True)]
            found = self.model.encode_batch(begun, add_special_tokens=False)
        except Exception as error:  # a vocabulary without its own unknown token
            place = next((one.parent for one in self.files.values() if isinstance(one, Path)), "this")
            raise UserError(f"{place}: the {self.kind} tokenizer cannot encode the text: {error}") from None
        return [
            ([self._text_of[number] for number in one.ids], [(start + lead, end + lead) for start, end in one.offsets])
            for one, lead in zip(found, leads, strict=True)
        ]

    def _lead(self, text: str) -> int:
        """Return how many control characters begin a text and are removed: the library shifts offsets by them."""
        lead, normalizer = 0, self.model.normalizer
        if self.kind == "sentencepiece" and normalizer is not None:
            while lead < len(text) and unicodedata.category(text[lead])[0] == "C":
                if text[lead] in "\t\n\v\f\r\x85" or normalizer.normalize_str(text[lead]):
                    break  # white space, which is removed alone and kept before a word
                lead += 1
        if lead and normalizer.normalize_str(text) != normalizer.normalize_str(text[lead:]):
            return 0  # a space that would then begin the text
        return lead

    def content(self) -> dict[str, Any]:
        """Return the content of its tokenizer.json, as it was given."""
        return json.loads(self._content)

    def begins_word(self, symbol: str) -> bool:
        """Return True if a symbol begins a word by its model's mark: no `##`, or the mark for a space.

        Scripts that are written without spaces have no mark: every symbol that begins with an ideograph or kana counts
        as a word.
        """
        if symbol == UNKNOWN:
            return self.kind != "sentencepiece"  # the mark for a space stands alone before a word's unknown characters
        piece = self.pieces.get(symbol, symbol)
        if not piece or symbol in _RESERVED or piece in self.added:
            return True
        if self.kind == "wordpiece":
            return not piece.startswith(self.prefix)
        if self._bytes:
            return piece.startswith(_BYTE_SPACES) or is_unspaced(self.model.decoder.decode([piece])[:1] or " ")
        return piece.startswith(WORD_START) or is_unspaced(piece[0])

    def decode(self, symbols: Iterable[str]) -> str:
        """Return the text of symbols; special ones stay as they are written."""
        pieces = [one if one in _RESERVED else self.pieces.get(one, one) for one in symbols]
        return self.model.decoder.decode(pieces).strip(" ") if self.model.decoder else " ".join(pieces)

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

    def encode_masked(self, text: str) -> list[str]:
        """Return the symbols of a text in which each `<mask>` stands for a word, as training had them with the word.

        The text is encoded with a word of the vocabulary for each `<mask>`, whose tokens are then the mask. A mask
        within a word, which no word can stand for, is one of the tokenizer's added tokens.
        """
        require_characters(text)
        if MASK not in text:
            return self.raw([text])[0][0]
        for word in self._words:
            if (found := self._by_word(text, word)) is not None:
                return found
        mask = self._masking.token_to_id(MASK)
        ids = self._masking.encode(text, add_special_tokens=False).ids
        return [MASK if number == mask else self._text_of.get(number, UNKNOWN) for number in ids]

    def _by_word(self, text: str, word: str) -> list[str] | None:
        """Return the symbols of a masked text, by a word in place of each mask; None where others reach into it."""
        places, full = [], ""
        for number, part in enumerate(text.split(MASK)):
            places += [(len(full), len(full) + len(word))] * (number > 0)
            full += word * (number > 0) + part
        symbols: list[str] = []
        place, masked = 0, -1  # the next mask, and the last one whose symbol stands
        encoding = self.encode(full)
        for symbol, (start, end) in zip(encoding.pieces, encoding.offsets, strict=True):
            while place < len(places) and places[place][1] <= start:
                place += 1
            if place == len(places) or end <= places[place][0]:
                symbols.append(symbol)
                continue
            if start < places[place][0] or end > places[place][1]:
                return None
            if masked < place:
                before = full[max(places[place][0] - 1, 0) : places[place][0]]
                marks = (WORD_START, _BYTE_SPACES[0])
                own = not self.pieces.get(symbol, symbol).startswith(marks) and before in ("", " ")
                if own and symbols and symbols[-1] in marks:
                    symbols.pop()  # the mark of the word's own space
                symbols.append(MASK)
                masked = place
        return symbols if symbols.count(MASK) == len(places) else None

    @cached_property
    def _words(self) -> list[str]:
        """Some words of the vocabulary, each a single token where there are such, of letters that nothing changes."""
        begins = (symbol for symbol in self.symbols if symbol not in self.added and self.begins_word(symbol))
        words = (self.decode([symbol]).strip() for symbol in begins)
        fit = (word for word in words if word.isascii() and word.isalpha() and word.islower() and len(word) > 1)
        fit = (word for word in fit if not any(word in content for content in self.added))
        return [*itertools.islice(fit, 5), "x"]

    @cached_property
    def _masking(self) -> Any:
        """The model with `<mask>` as one of its added tokens."""
        state = self.content()
        state["added_tokens"] = [one for one in state["added_tokens"] if one["content"] != MASK]
        free = max([*self._symbol_of, *(one["id"] for one in state["added_tokens"]), -1]) + 1
        state["added_tokens"].append({"id": free, "content": MASK, "special": False} | _MASK_FLAGS)
        return _as_text(continues_after_mask(state), {o: name for o, name in self.names.items() if o != MASK})

    def save(self, folder: str | Path) -> None:
        """Write the tokenizer's files and its fairseq dictionary, dict.txt, into a folder."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            write_bytes(folder / name, content if isinstance(content, bytes) else content.read_bytes())
        write_dictionary(folder / DICTIONARY, ((symbol, 1) for symbol in self.symbols))

    def longest(self, model: int | None) -> int | None:
        """Return the longest input in tokens, of a model and by `model_max_length`; None: any."""
        own = self.carried.get("model_max_length")
        return min((one for one in (own, model) if one is not None), default=None)

    @cached_property
    def pairs(self) -> Pairs:
        """How two texts are joined for its models."""
        bert = self.kind == "wordpiece" or self.names.get("</s>") == "[SEP]"
        return self._pairs() or Pairs(int(not bert), bert)

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


# The content of a tokenizer.json


def json_of(model: Any) -> str:
    """Return the text of a model's tokenizer.json."""
    return text_of(json.loads(model.to_str()))


def text_of(state: State) -> str:
    """Return the text of a tokenizer.json; merges are texts, which every release of the library reads."""
    model = state["model"]
    if "merges" in model and not any(" " in piece for piece in model["vocab"]):
        model = model | {"merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]}
    return json.dumps(state | {"model": model}, ensure_ascii=False, indent=2)


def vocabulary_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of every token of a tokenizer.json, added ones included."""
    vocab = state["model"]["vocab"]
    own = vocab if isinstance(vocab, dict) else {piece: number for number, (piece, _) in enumerate(vocab)}
    return own | {token["content"]: token["id"] for token in state["added_tokens"]}


def spelled(vocabulary: Collection[str]) -> dict[str, str]:
    """Return the names of fairseq's special symbols in a vocabulary, by the spelling of which it has most."""
    best = max(SPELLINGS, key=lambda names: sum(name in vocabulary for name in names))
    return {ours: name for ours, name in zip(_RESERVED, best, strict=True) if name in vocabulary}


def _as_text(state: Mapping[str, Any], names: Mapping[str, str]) -> Any:
    """Return the library's model of a tokenizer.json to which the special symbols `names` are ordinary text."""
    model, control = dict(state["model"]), set(names.values())
    # What a text may not give is special, and then not looked for.
    added = [
        {key: value for key, value in token.items() if key != "never"}
        | {"special": token["content"] in control or token.get("never", False)}
        for token in state["added_tokens"]
    ]
    if model["type"] == "Unigram":  # which would find their names in text
        model["vocab"] = [[_HIDDEN * (piece in control) + piece, score] for piece, score in model["vocab"]]
        own = {piece for piece, _ in state["model"]["vocab"]}
        added = [token for token in added if not (token["content"] in control and token["content"] in own)]
    whole = {**state, "model": model, "added_tokens": added} | dict.fromkeys(("truncation", "padding"))
    made = import_tokenizers().Tokenizer.from_str(json.dumps(whole))
    made.encode_special_tokens = True
    return made


def _as_symbol(piece: str, taken: Collection[str]) -> str:
    """Return a piece as a line of dict.txt can hold it: not empty, without a line break, no symbol that is taken."""
    symbol = piece.replace("\n", "\\n").replace("\r", "\\r") or "_"
    while symbol in taken or symbol in _RESERVED:
        symbol += "_"
    return symbol


def continues_after_mask(state: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json whose model marks the start of a text alone, and not that of what follows `<mask>`.

    Its ids of texts without added tokens are the same. Without this, the full stop of "a <mask>." were a new word.
    """
    before = _at_start(state["pre_tokenizer"])
    if before == state["pre_tokenizer"]:
        return state
    described, steps = json.dumps(state["pre_tokenizer"]), json.dumps(state["normalizer"])
    whole = [json.loads(steps)] if state["normalizer"] else []
    if '"Metaspace"' in described and '"strip_left": true' in steps:
        # A space after the mask is kept for the word that follows it, and one before a text is its mark.
        start = {"type": "Replace", "pattern": {"Regex": r"\A\s+"}, "content": " "}
        whole = [start, json.loads(steps.replace('"strip_left": true', '"strip_left": false'))]
    if '"WhitespaceSplit"' in described:
        whole += [
            {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
            {"type": "Strip", "strip_left": False, "strip_right": True},
        ]
    normalizer = {"type": "Sequence", "normalizers": whole} if whole else None
    return state | {"pre_tokenizer": before, "normalizer": normalizer}


def _at_start(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return a pre-tokenizer that puts its space before a text alone, and not before each part between added tokens."""
    if step is None:
        return None
    if step["type"] == "Sequence":
        steps = step["pretokenizers"]
        if [one["type"] for one in steps] == ["WhitespaceSplit", "Metaspace"]:
            steps = steps[1:]
        return step | {"pretokenizers": [*map(_at_start, steps[:1]), *steps[1:]]}
    if (
        step["type"] == "Metaspace"
        and step.get("prepend_scheme", "always") == "always"
        and step.get("add_prefix_space", True)
    ):
        return step | {"prepend_scheme": "first"}
    if step.get("add_prefix_space"):
        space = {"type": "Metaspace", "replacement": " ", "prepend_scheme": "first", "split": False}
        return {"type": "Sequence", "pretokenizers": [space, step | {"add_prefix_space": False}]}
    return step


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
    import tokenizers

    return tokenizers


def byte_bpe(prefix_space: bool = False) -> Any:
    """Return an untrained byte-level BPE tokenizer of GPT-2's kind.

    With `prefix_space` a space is put before every text, so that its first word is spelt as everywhere else.
    """
    library = import_tokenizers()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = library.decoders.ByteLevel()
    return tokenizer


def wordpiece(vocabulary: dict[str, int] | None = None, lowercase: bool = False, unknown: str = "[UNK]") -> Any:
    """Return a WordPiece tokenizer with BERT's normalization around a vocabulary, untrained if None.

    `lowercase` is BERT's uncased normalization: lower case, accents removed.
    """
    library = import_tokenizers()
    options = {} if vocabulary is None else {"vocab": vocabulary}
    model = library.models.WordPiece(unk_token=unknown, max_input_chars_per_word=100, **options)
    tokenizer = library.Tokenizer(model)
    tokenizer.normalizer = library.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = library.decoders.WordPiece()
    return tokenizer


# sentencepiece and subword-nmt


def load_sentencepiece(model: Path | bytes, known: Collection[str] = ()) -> Any:
    """Return the `SentencePieceProcessor` of a model file, or of a file's content.

    Args:
        model: the file or its content.
        known: what text is split into, with single characters, as by the library's SetVocabulary, which its Python
            lacks; none: all pieces.

    Raises:
        UserError: the model is none.
    """
    import sentencepiece

    with reading("this" if isinstance(model, bytes) else model, "a sentencepiece model"):
        content = model if isinstance(model, bytes) else model.read_bytes()
        if not content:
            raise ValueError("an empty file")
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        for number in range(processor.get_piece_size()):
            if not math.isfinite(processor.get_score(number)):
                raise ValueError(f"the piece {processor.id_to_piece(number)!r} has no finite score")
        if not usable_pieces(processor):
            raise ValueError("it has no piece of text")
        if known:
            from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

            proto, names = ModelProto.FromString(content), set(known)
            for one in proto.pieces:
                if one.type == one.NORMAL and one.piece not in names and len(one.piece) > 1:
                    one.type = one.UNUSED
            processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    return processor


def usable_pieces(processor: Any) -> list[str]:
    """Return the subwords of a sentencepiece model in order, without control and unknown symbols."""
    numbers = range(processor.get_piece_size())
    return [processor.id_to_piece(n) for n in numbers if not (processor.is_control(n) or processor.is_unknown(n))]
