"""Read the tokenizer of a folder from all its files together, and write one as transformers reads it.

A folder of transformers becomes what its AutoTokenizer builds (release 4.46): the vocabulary's file, then settings of
tokenizer_config.json, then names of special_tokens_map.json, then added tokens.  A tokenizer is written as one
tokenizer.json, which every release reads as it stands.

Models of sentencepiece are run by the `tokenizers` library too, so that a model's ids are the same here and wherever it
is exported to; it gives sentencepiece's own ids but where a character that the normalization replaces carries a
combining mark (the library drops the mark).
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.text.dictionary import MASK, SPECIAL, UNK, UNKNOWN, WORD_START
from relpos_fairseq.text.tokenizer import (
    SENTENCEPIECE_MODEL,
    SPELLINGS,
    Tokenizer,
    byte_bpe,
    continues_after_mask,
    import_tokenizers,
    load_sentencepiece,
    spelled,
    vocabulary_of,
    wordpiece,
)

State = dict[str, Any]  # the content of a tokenizer.json
TOKENIZER_JSON, SETTINGS = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
GENERIC = "PreTrainedTokenizerFast"  # transformers' class that takes tokenizer.json as it stands
# What transformers calls fairseq's special symbols, in the order in which it adds them.
_ROLES = {"bos": "<s>", "eos": "</s>", "unk": UNKNOWN, "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": MASK}
_BERT, _ALBERT = SPELLINGS[1:]


@dataclass(frozen=True)
class _Class:
    """A tokenizer class of transformers: its file, how it spells special symbols, and the step that it sets anew."""

    name: str
    file: str
    spelling: tuple[str, ...] = SPELLINGS[0]
    sets: str = ""  # type of the normalizer or pre-tokenizer whose options tokenizer_config.json decides


def _classes() -> dict[str, _Class]:
    """Return the classes whose vocabulary file is read here, by their names without case and signs."""
    bert = "Bert DistilBert Electra MobileBert ConvBert SqueezeBert LayoutLM Lxmert"
    mpnet = ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")
    rows = [_Class(name, "vocab.txt", _BERT, "BertNormalizer") for name in bert.split()]
    rows += [_Class(name, "vocab.json", sets="ByteLevel") for name in "Roberta Bart Longformer LED".split()]
    rows += [
        _Class("MPNet", "vocab.txt", mpnet, "BertNormalizer"),
        _Class("GPT2", "vocab.json", (), "ByteLevel"),
        _Class("Deberta", "vocab.json", _BERT, "ByteLevel"),
        _Class("DebertaV2", "spm.model", _BERT),
        _Class("XLMRoberta", "sentencepiece.bpe.model"),
        _Class("Albert", "spiece.model", _ALBERT),
    ]
    return {row.name.lower(): row for row in rows}


_CLASSES = _classes()


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the tokenizer that a folder holds.

    Raises:
        UserError: the folder is absent or holds none, a file is broken, or it is of a class that is not read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no tokenizer folder {folder}: give a folder that holds {_EXPECTED}")
    if not holds_tokenizer(folder):
        raise UserError(f"no tokenizer in {folder}: expected {_EXPECTED}")
    try:
        settings = _Settings(folder)
        names = settings.choose(_present(folder))
        paths = [folder / name for name in names]
        state = _READERS[names](paths, settings)
        named = settings.complete(state)
        files = {path.name: path for path in tokenizer_paths(folder)}
        return Tokenizer(state, files, named, ids_as_symbols=names[0] == "encoder.json")
    except UserError:
        raise
    except Exception as error:  # the library raises bare Exceptions, and a file may hold anything
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        release = import_tokenizers().__version__
        raise UserError(
            f"{folder}: its tokenizer is none that tokenizers {release} reads ({what}); a newer release may: "
            f"pip install -U tokenizers"
        ) from None


def holds_tokenizer(folder: Path) -> bool:
    """Return True if a folder holds the files of a tokenizer."""
    return bool(_present(folder))


def tokenizer_paths(folder: Path) -> list[Path]:
    """Return the files of a folder that a tokenizer may consist of."""
    return [path for path in (folder / name for name in FILES) if path.is_file()]


def class_of(folder: Path) -> str:
    """Return the name of transformers' class that reads a folder's tokenizer, as its JSON files say."""
    settings = _Settings(folder)
    return f"{settings.cls.name}Tokenizer" if settings.cls else str(settings.named if settings.is_class else GENERIC)


def _present(folder: Path) -> list[tuple[str, ...]]:
    return [names for names in _READERS if all((folder / name).is_file() for name in names)]


class _Settings:
    """What the JSON files of a folder say of its tokenizer.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = _read_object(folder / SETTINGS)
        model = _read_object(folder / "config.json")
        self.named = self.config.get("tokenizer_class") or model.get("tokenizer_class") or model.get("model_type")
        if not isinstance(self.named, str | None):
            raise UserError(f"{folder}: tokenizer_class must be a name, got {self.named!r}")
        stem, self.is_class = re.subn("Tokenizer(Fast)?$", "", self.named or "")
        key = re.sub("[-_]", "", stem).lower()
        generic = key in ("pretrained", "") or "TokenizersBackend" in (self.named or "")
        if self.named is None and (folder / SETTINGS).is_file():
            generic, key = False, "bert" if (folder / "vocab.txt").is_file() or _is_bert(folder) else ""
        self.cls = None if generic else _CLASSES.get(key)
        # What no class of transformers changes: its file is taken as it stands.
        self.plain = generic or (self.cls is None and not self.named)

    def choose(self, present: list[tuple[str, ...]]) -> tuple[str, ...]:
        """Return the files that are read: tokenizer.json, those of the folder's class, or the first of them.

        Raises:
            UserError: the folder's class is one of which it is not known what it makes of them.
        """
        own = [names for names in present if self.cls and names[0] in (TOKENIZER_JSON, self.cls.file)]
        if own or self.plain or self.named is None:
            return (own or present)[0]
        if present[0] == (TOKENIZER_JSON,):
            return present[0]
        raise UserError(
            f"{self.folder} is of {self.named}, and what that makes of {present[0][0]} is not known here: save the "
            f"tokenizer with a {TOKENIZER_JSON}, by its fast class"
        )

    def complete(self, state: State) -> dict[str, str]:
        """Set what the files say in the content of a tokenizer.json; return its names of fairseq's special symbols."""
        special, added = self._special(), self._added()
        if self.cls:
            self._override(state)
            spelling = self.cls.spelling
            # A mask is added where there is none; other special symbols belong to a vocabulary.
            known = {*vocabulary_of(state), *spelling[-1:]}
            default = {ours: name for ours, name in zip(SPELLINGS[0], spelling, strict=False) if name in known}
            own = ("unk", "sep", "pad", "cls", "mask")
            special = {role: default[_ROLES[role]] for role in own if _ROLES[role] in default} | special
        never = self._flag("split_special_tokens", False)
        _add(state, added, [*map(_token, special.values()), *self._more_special()])
        if never:
            for token in state["added_tokens"]:
                token["never"] = token["special"]
        named: dict[str, str] = {}
        for role in ("cls", "sep", "unk", "pad", "mask", "bos", "eos"):  # a token has one role: the first
            if role in special and (name := _token(special[role])["content"]) not in named.values():
                named.setdefault(_ROLES[role], name)
        if self.cls:
            return named
        found = spelled(vocabulary_of(state))
        return {ours: name for ours, name in found.items() if ours not in named and name not in named.values()} | named

    def _flag(self, name: str, default: bool | None) -> bool | None:
        """Return a setting that is true or false, and null where that is its default."""
        value = self.config.get(name, default)
        value = default if value is None else value
        if not isinstance(value, bool | None):
            raise UserError(f"{self.folder / SETTINGS}: {name} must be true or false, got {value!r}")
        return value

    @property
    def _files(self) -> list[dict[str, Any]]:
        """The files that name special tokens, the stronger one last."""
        legacy = "added_tokens_decoder" not in self.config
        return [self.config, *([_read_object(self.folder / SPECIAL_TOKENS)] if legacy else [])]

    def _special(self) -> dict[str, Any]:
        """Return the special tokens by their roles."""
        return {role: one[f"{role}_token"] for one in self._files for role in _ROLES if one.get(f"{role}_token")}

    def _more_special(self) -> list[dict[str, Any]]:
        """Return the special tokens that have no role."""
        found: list[Any] = []
        for one in self._files:
            for name in ("additional_special_tokens", "extra_special_tokens"):
                values = one.get(name) or []
                values = list(values.values()) if isinstance(values, dict) else values
                if not isinstance(values, list):
                    raise UserError(f"{self.folder}: {name} must be a list of tokens, got {values!r}")
                found += values
        return [_token(value) | {"special": True} for value in found]

    def _added(self) -> list[dict[str, Any]]:
        """Return the added tokens in the order of their numbers."""
        decoder, path = self.config.get("added_tokens_decoder"), self.folder / SETTINGS
        if decoder is None:
            path = self.folder / ADDED_TOKENS
            special = {token["content"] for token in [*map(_token, self._special().values()), *self._more_special()]}
            decoder = {n: {"content": one, "special": one in special} for one, n in _read_object(path).items()}
        if wrong := [number for number in decoder if not str(number).isdecimal()]:
            raise UserError(f"{path}: an added token has the number {wrong[0]!r}: a whole number is needed")
        if len(numbers := {int(number) for number in decoder}) < len(decoder):
            raise UserError(f"{path}: {len(decoder)} added tokens have {len(numbers)} numbers")
        return [_token(token) for _, token in sorted(decoder.items(), key=lambda item: int(item[0]))]

    def _override(self, state: State) -> None:
        """Set the options that transformers' classes set anew, whatever tokenizer.json says."""
        if self.cls is None or not self.cls.sets:
            return
        if self.cls.sets == (state["normalizer"] or {}).get("type"):
            state["normalizer"] |= {
                "lowercase": self._flag("do_lower_case", True),
                "strip_accents": self._flag("strip_accents", None),
                "handle_chinese_chars": self._flag("tokenize_chinese_chars", True),
            }
        if self.cls.sets == (state["pre_tokenizer"] or {}).get("type"):
            state["pre_tokenizer"] |= {"add_prefix_space": self._flag("add_prefix_space", False)}


def _is_bert(folder: Path) -> bool:
    """Return True if tokenizer.json normalizes as BERT's classes do, whose settings then decide."""
    normalizer = _read_object(folder / TOKENIZER_JSON).get("normalizer")
    return isinstance(normalizer, dict) and normalizer.get("type") == "BertNormalizer"


def _token(value: Any) -> dict[str, Any]:
    """Return an added token with all its flags, from its name or its description.

    Raises:
        UserError: it is neither.
    """
    given = value if isinstance(value, Mapping) else {"content": value, "special": True}
    if not isinstance(given.get("content"), str):
        raise UserError(f"a special or added token must be a text or an object with its content, got {value!r}")
    flags = {name: bool(given.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "special")}
    return {"content": given["content"]} | flags | {"normalized": bool(given.get("normalized", not flags["special"]))}


def _add(state: State, added: list[dict[str, Any]], special: list[dict[str, Any]]) -> None:
    """Add tokens as the library does: one that the vocabulary has keeps its number, another gets the next one."""
    entries = {token["content"]: token for token in state["added_tokens"]}
    vocabulary, size = vocabulary_of(state), len(state["model"]["vocab"])
    for token in [*added, *special]:
        content = token["content"]
        if not content or (content in entries and not any(token is one for one in added)):
            continue
        following = max([size, *(one["id"] + 1 for one in entries.values())])
        entries[content] = {"id": vocabulary.get(content, following)} | token
        vocabulary[content] = entries[content]["id"]
    state["added_tokens"] = sorted(entries.values(), key=lambda token: token["id"])


# The files of vocabularies


def _read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one if there is no file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold an object, got {str(found)[:40]!r}")
    return found


def json_of(model: Any) -> str:
    """Return the text of a model's tokenizer.json."""
    return text_of(json.loads(model.to_str()))


def text_of(state: State) -> str:
    """Return the text of a tokenizer.json; merges are texts, which every release of the library reads."""
    model = state["model"]
    if "merges" in model and not any(" " in piece for piece in model["vocab"]):
        model = model | {"merges": [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]}
    return json.dumps(state | {"model": model}, ensure_ascii=False, indent=2)


def _read_json(paths: list[Path], settings: _Settings) -> State:
    state = _read_object(paths[0])
    if not isinstance(model := state.get("model"), dict):
        raise UserError(f"{paths[0]} is no {TOKENIZER_JSON}: it has no model")
    model.setdefault(
        "type", "BPE" if "merges" in model else "Unigram" if isinstance(model["vocab"], list) else "WordPiece"
    )
    if "dropout" in model:  # of training alone
        model["dropout"] = None
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        state.setdefault(name, None)
    state["added_tokens"] = [{"id": one["id"]} | _token(one) for one in state.get("added_tokens") or []]
    return state


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, which only line feeds end (and carriage returns): U+2028 may be a piece."""
    try:
        return path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no UTF-8 at byte {error.start}: convert it, or copy it again") from None


def _read_byte_bpe(paths: list[Path], settings: _Settings) -> State:
    lines = _lines(paths[1])
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    vocab = _read_object(paths[0])
    wrong = next((pair for pair in merges if len(pair) != 2 or "".join(pair) not in vocab), None)
    if wrong is not None:
        raise UserError(f"{paths[1]}: {' '.join(wrong)!r} is no merge of two pieces to one of {paths[0].name}")
    state = json.loads(byte_bpe().to_str())
    state["model"] |= {"vocab": vocab, "merges": [list(pair) for pair in dict.fromkeys(merges)]}
    return state


def _read_wordpiece(paths: list[Path], settings: _Settings) -> State:
    pieces = _lines(paths[0])
    if len(set(pieces)) != len(pieces):
        raise UserError(f"{paths[0]} names {len(pieces) - len(set(pieces))} pieces twice")
    unknown = _token(settings._special().get("unk", "[UNK]"))["content"]
    if unknown not in pieces:
        raise UserError(f"{paths[0]} is no BERT vocabulary: it lacks {unknown}")
    state = json.loads(wordpiece({unknown: 0}, lowercase=True, unknown=unknown).to_str())
    state["model"]["vocab"] = {piece: number for number, piece in enumerate(pieces)}
    return state


def _read_sentencepiece(paths: list[Path], settings: _Settings) -> State:
    """Build a model of sentencepiece as fairseq numbers it, or as transformers' class of the file's name does."""
    cls = settings.cls.name if settings.cls else ""
    if cls in ("", "XLMRoberta"):
        return sentencepiece_state(paths[0], released=bool(cls))
    state, albert = sentencepiece_state(paths[0], numbered=False), cls == "Albert"
    before: list[State] = []
    if albert:
        before += [_replace({"String": sign}, '"') for sign in ("``", "''")]
        if not settings._flag("keep_accents", False):
            before += [{"type": "NFKD"}, {"type": "StripAccents"}]
    if settings._flag("do_lower_case", albert):
        before.append({"type": "Lowercase"})
    if not albert:
        before.append({"type": "Strip", "strip_left": True, "strip_right": True})
        if settings._flag("split_by_punct", False):
            steps = [{"type": "Punctuation", "behavior": "Isolated"}, state["pre_tokenizer"]]
            state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    state["normalizer"]["normalizers"][:0] = before
    return state


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


_UNUSED, _CONTROL, _USER = 2, 3, 4  # kinds of pieces: unknown, control, and found whole in text


def sentencepiece_state(model: Path | bytes, numbered: bool = True, released: bool = False) -> State:
    """Return the content of a tokenizer.json of a sentencepiece model, from its file or the file's content.

    Args:
        model: a unigram, BPE or character model.
        numbered: by fairseq, its special symbols first and `<mask>` last; else as the file numbers its pieces.
        released: of a number for each piece but the first three (`<unk>`, `<s>`, `</s>`), as XLM-R's.

    Raises:
        UserError: no model, or of a kind that the tokenizers library has not.
    """
    name = "this" if isinstance(model, bytes) else model
    content = load_sentencepiece(model).serialized_model_proto()
    try:
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]
    except ImportError:
        raise UserError("sentencepiece models need the library protobuf: pip install protobuf") from None
    proto = ModelProto.FromString(content)
    trained, normal = proto.trainer_spec, proto.normalizer_spec
    if trained.model_type == trained.WORD or trained.treat_whitespace_as_suffix:
        raise UserError(f"{name}: no unigram or BPE model of sentencepiece's, with spaces before words: train one")
    pieces = list(proto.pieces)
    unknown = trained.unk_id
    if numbered:
        kept = pieces[3:] if released else [one for one in pieces if one.type not in (_UNUSED, _CONTROL)]
        kept = [one for one in kept if one.piece not in SPELLINGS[0]]
        vocab = [*((symbol, 0.0) for symbol in SPECIAL), *((one.piece, one.score) for one in kept), (MASK, 0.0)]
        unknown = UNK
    else:
        vocab = [(one.piece, one.score) for one in pieces]
    found = {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": trained.byte_fallback}
    if trained.model_type == trained.BPE:
        numbers = {piece: number for number, (piece, _) in enumerate(vocab)}
        found |= {"type": "BPE", "vocab": numbers, "merges": _merges(dict(vocab)), "fuse_unk": True}
        found |= {"unk_token": vocab[found.pop("unk_id")][0]}
    steps: list[dict[str, Any]] = []
    if normal.precompiled_charsmap:
        charsmap = base64.b64encode(normal.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    theirs = released or not numbered  # transformers' classes do not ask for the following
    if normal.remove_extra_whitespaces or theirs:
        steps += [{"type": "Strip", "strip_left": False, "strip_right": True}] * numbered
        steps.append(_replace({"Regex": " {2,}"}, " "))
    start = "always" if normal.add_dummy_prefix or theirs else "never"
    space: dict[str, Any] = {"type": "Metaspace", "replacement": WORD_START, "prepend_scheme": start}
    space["split"] = trained.split_by_whitespace or theirs
    decoders = [{"type": "ByteFallback"}] * trained.byte_fallback + [space]
    more = [(one.piece, one.type == _CONTROL) for one in pieces if one.type in (_CONTROL, _USER)]
    state: State = {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None},
        **{"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": space},
        **{"decoder": {"type": "Sequence", "decoders": decoders}, "model": found},
    }
    known = vocabulary_of(state)
    flags = {"normalized": False}
    _add(state, [_token({"content": one, "special": control} | flags) for one, control in more if one in known], [])
    return state


def _merges(scores: Mapping[str, float]) -> list[list[str]]:
    """Return the merges of a BPE vocabulary of sentencepiece: each cut of each piece into two, the best piece first."""
    numbers = {piece: number for number, piece in enumerate(scores)}
    cuts = (
        (score, piece[:n], piece[n:])
        for piece, score in scores.items()
        for n in range(1, len(piece))
        if piece[:n] in numbers and piece[n:] in numbers
    )
    ordered = sorted(cuts, key=lambda cut: (-cut[0], -len(cut[1]), -len(cut[2]), numbers[cut[1]], numbers[cut[2]]))
    return [[first, second] for _, first, second in ordered]


_READERS: dict[tuple[str, ...], Callable[[list[Path], _Settings], State]] = {
    (TOKENIZER_JSON,): _read_json,
    (SENTENCEPIECE_MODEL,): _read_sentencepiece,
    ("sentencepiece.bpe.model",): _read_sentencepiece,
    ("spm.model",): _read_sentencepiece,
    ("spiece.model",): _read_sentencepiece,
    ("encoder.json", "vocab.bpe"): _read_byte_bpe,  # GPT-2's as fairseq's RoBERTa uses them: dict.txt names numbers
    ("vocab.json", "merges.txt"): _read_byte_bpe,
    ("vocab.txt",): _read_wordpiece,
}
_EXPECTED = ", ".join(" and ".join(names) for names in _READERS)

# All files that a tokenizer may consist of; those of MODEL_FILES hold more than settings.
MODEL_FILES = tuple(name for names in _READERS for name in names)
FILES = (*MODEL_FILES, SETTINGS, SPECIAL_TOKENS, ADDED_TOKENS)


# Written for transformers

_NEVER = -1e4  # the score of a piece that no text gives


def transformers_files(
    tokenizer: Tokenizer, numbers: Mapping[str, int], separators: int, segments: bool, longest: int | None = None
) -> dict[str, str]:
    """Return the texts of tokenizer.json and tokenizer_config.json by which AutoTokenizer numbers symbols so.

    Args:
        tokenizer: the tokenizer.
        numbers: the number of every symbol, from 0 on.
        separators: `</s>` between two texts, beside the first text's own.
        segments: whether the model reads token types.
        longest: longest input of the model in tokens; None: any.
    """
    state = tokenizer.content()
    names = {symbol: tokenizer.names.get(symbol, symbol) for symbol in SPELLINGS[0] if symbol in numbers}
    pieces = {
        n: names.get(symbol) or tokenizer.pieces.get(symbol, symbol)
        for n, symbol in sorted((n, s) for s, n in numbers.items())
    }
    added = {
        content: token
        for content, token in tokenizer.added.items()
        if content not in tokenizer.names.values() and not token.get("never")
    }
    model = state["model"]
    # Tokens that no text gives but whole need no piece of the model, where they stand behind all that do.
    whole = {*added, *names.values()}
    size = 1 + max((n for n, piece in pieces.items() if piece not in whole or piece == names[UNKNOWN]), default=-1)
    if model["type"] == "Unigram":
        old = dict(model["vocab"])
        model["vocab"] = [[pieces.get(n, f"madeupword{n}"), old.get(pieces.get(n), _NEVER)] for n in range(size)]
        model["unk_id"] = numbers[UNKNOWN]
    else:
        model["vocab"] = {piece: number for number, piece in pieces.items() if number < size}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    special = {name: {"special": True, "lstrip": symbol == MASK} for symbol, name in names.items()}
    state["added_tokens"] = [
        plain | added.get(piece, {}) | special.get(piece, {}) | {"id": number, "content": piece}
        for number, piece in pieces.items()
        if piece in special or piece in added or number >= size
    ]
    state = state if added else continues_after_mask(state)
    state["post_processor"] = _single_and_pair(names, numbers, separators, segments)
    import_tokenizers().Tokenizer.from_str(json.dumps(state))
    settings: dict[str, Any] = {"tokenizer_class": GENERIC, "clean_up_tokenization_spaces": False}
    settings |= {f"{role}_token": names[ours] for role, ours in _ROLES.items() if ours in names}
    settings["model_input_names"] = ["input_ids", *["token_type_ids"] * segments, "attention_mask"]
    if longest is not None:
        settings["model_max_length"] = longest
    return {TOKENIZER_JSON: text_of(state), SETTINGS: json.dumps(settings, indent=2) + "\n"}


def _single_and_pair(
    names: Mapping[str, str], numbers: Mapping[str, int], separators: int, segments: bool
) -> dict[str, Any]:
    """Return the post-processor that puts <s> and </s> around one text and around a pair."""

    def special(symbol: str, segment: int = 0) -> dict[str, Any]:
        return {"SpecialToken": {"id": names[symbol], "type_id": segment}}

    first, second = ({"Sequence": {"id": name, "type_id": int(segments and name == "B")}} for name in "AB")
    single = [special("<s>"), first, special("</s>")]
    end = special("</s>", int(segments))
    found = {
        symbol: {"id": names[symbol], "ids": [numbers[symbol]], "tokens": [names[symbol]]} for symbol in ("<s>", "</s>")
    }
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *[end] * separators, second, end],
        "special_tokens": {names[symbol]: value for symbol, value in found.items()},
    }
