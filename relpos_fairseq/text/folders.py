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
# Classes whose vocabulary file is read here; what another class makes of such a file is not known.
_CLASSES = {
    "vocab.txt": "Bert DistilBert Electra MobileBert MPNet ConvBert SqueezeBert LayoutLM Lxmert Funnel Splinter",
    "vocab.json": "Roberta GPT2 Deberta Bart Longformer LED",
    "sentencepiece.bpe.model": "XLMRoberta",
    "spm.model": "DebertaV2",
    "spiece.model": "Albert",
}
# The mask that a class adds where its vocabulary lacks one.
_MASKS = {"vocab.txt": "[MASK]", "sentencepiece.bpe.model": MASK, "spm.model": "[MASK]", "spiece.model": "[MASK]"}


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """Read the tokenizer that a folder holds.

    Raises:
        UserError: the folder is absent or holds none, a file is broken, or it is of a class that is not read.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"no tokenizer folder {folder}: give a folder that holds {_EXPECTED}")
    names = _model_files(folder)
    if names is None:
        raise UserError(f"no tokenizer in {folder}: expected {_EXPECTED}")
    settings = _Settings(folder)
    settings.check_class(names[0])
    state = _READERS[names]([folder / name for name in names], settings)
    named = settings.complete(state, names[0])
    files = {path.name: path for path in tokenizer_paths(folder)}
    return Tokenizer(state, files, named, ids_as_symbols=names[0] == "encoder.json")


def holds_tokenizer(folder: Path) -> bool:
    """Return True if a folder holds the files of a tokenizer."""
    return _model_files(folder) is not None


def tokenizer_paths(folder: Path) -> list[Path]:
    """Return the files of a folder that a tokenizer may consist of."""
    return [path for path in (folder / name for name in FILES) if path.is_file()]


def _model_files(folder: Path) -> tuple[str, ...] | None:
    return next((names for names in _READERS if all((folder / name).is_file() for name in names)), None)


class _Settings:
    """What the JSON files of a folder say of its tokenizer.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = _read_object(folder / SETTINGS)
        model = _read_object(folder / "config.json")
        # Of transformers; None: the folder does not say, and tokenizer.json is taken as it stands.
        self.named = self.config.get("tokenizer_class") or model.get("tokenizer_class") or model.get("model_type")
        self.plain = str(self.named).startswith(("PreTrainedTokenizer", "TokenizersBackend")) or (
            self.named is None and not (folder / SETTINGS).is_file()
        )

    def check_class(self, file: str) -> None:
        """Raise an error for a class of transformers of which it is not known what it makes of a vocabulary file."""
        stem, is_class = re.subn("Tokenizer(Fast)?$", "", str(self.named))
        known = _CLASSES.get(file, "").split()
        if is_class and known and stem not in known and not self.plain:
            raise UserError(
                f"{self.folder} names the class {self.named}, and {file} is read as that "
                f"of a {known[0]}Tokenizer: save the tokenizer with a {TOKENIZER_JSON}, by its fast class"
            )

    def complete(self, state: State, file: str) -> dict[str, str]:
        """Set what the files say in the content of a tokenizer.json; return its names of fairseq's special symbols."""
        special, added = self._special(), self._added()
        if not self.plain:
            self._override(state)
            vocabulary = vocabulary_of(state)
            default = spelled(vocabulary)
            if MASK not in default and file in _MASKS:
                default[MASK] = _MASKS[file]
            special = {role: default[ours] for role, ours in _ROLES.items() if ours in default} | special
        _add(state, added, [*map(_token, special.values()), *self._more_special()])
        if self.config.get("split_special_tokens"):
            state["added_tokens"] = [token for token in state["added_tokens"] if not token["special"]]
        # sep before eos, and cls before bos
        named = {_ROLES[role]: _token(special[role])["content"] for role in _ROLES if role in special}
        return spelled(vocabulary_of(state)) | named

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
                found += values.values() if isinstance(values, dict) else values
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
        return [_token(token) for _, token in sorted((int(number), token) for number, token in decoder.items())]

    def _override(self, state: State) -> None:
        """Set the options that transformers' classes set anew, whatever tokenizer.json says."""
        if (state["normalizer"] or {}).get("type") == "BertNormalizer":
            state["normalizer"] |= {
                "lowercase": bool(self.config.get("do_lower_case", True)),
                "strip_accents": self.config.get("strip_accents"),
                "handle_chinese_chars": bool(self.config.get("tokenize_chinese_chars", True)),
            }
        if (state["pre_tokenizer"] or {}).get("type") == "ByteLevel":
            state["pre_tokenizer"] |= {"add_prefix_space": bool(self.config.get("add_prefix_space", False))}


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
    except ValueError as error:
        raise UserError(f"{path} is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold an object, got {str(found)[:40]!r}")
    return found


def _by_library(read: Callable[..., Any], kind: str, *paths: Path) -> Any:
    try:
        return read(*map(str, paths))
    except Exception as error:  # the library raises bare Exceptions
        release = import_tokenizers().__version__
        raise UserError(
            f"{' and '.join(map(str, paths))}: no {kind} that tokenizers {release} reads; a newer release may: {error}"
        ) from None


def _state(model: Any) -> State:
    return json.loads(model.to_str())


def json_of(model: Any) -> str:
    """Return the text of a model's tokenizer.json; merges are texts, which every release of the library reads."""
    state = _state(model)
    if "merges" in state["model"] and not any(" " in piece for piece in state["model"]["vocab"]):
        state["model"]["merges"] = [" ".join(pair) for pair in state["model"]["merges"]]
    return json.dumps(state, ensure_ascii=False, indent=2)


def _read_json(paths: list[Path], settings: _Settings) -> State:
    return _state(_by_library(import_tokenizers().Tokenizer.from_file, TOKENIZER_JSON, *paths))


def _read_byte_bpe(paths: list[Path], settings: _Settings) -> State:
    return _state(byte_bpe(_by_library(import_tokenizers().models.BPE.from_file, "byte-level BPE", *paths)))


def _read_wordpiece(paths: list[Path], settings: _Settings) -> State:
    pieces = paths[0].read_text(encoding="utf-8").rstrip("\n").split("\n")  # only \n, \r\n: U+2028 may be a piece
    if len(set(pieces)) != len(pieces):
        raise UserError(f"{paths[0]} names {len(pieces) - len(set(pieces))} pieces twice")
    unknown = _token(settings._special().get("unk", "[UNK]"))["content"]
    if unknown not in pieces:
        raise UserError(f"{paths[0]} is no BERT vocabulary: it lacks {unknown}")
    return _state(wordpiece({piece: n for n, piece in enumerate(pieces)}, lowercase=True, unknown=unknown))


def _read_sentencepiece(paths: list[Path], settings: _Settings) -> State:
    """Build a model of sentencepiece as fairseq numbers it, or as transformers' class of the file's name does."""
    if settings.plain or paths[0].name == "sentencepiece.bpe.model":
        return sentencepiece_state(paths[0], released=not settings.plain)
    state, before = sentencepiece_state(paths[0], numbered=False), []
    albert = paths[0].name == "spiece.model"
    if albert:
        before += [_replace({"String": sign}, '"') for sign in ("``", "''")]
        if not settings.config.get("keep_accents", False):
            before += [{"type": "NFKD"}, {"type": "StripAccents"}]
    if settings.config.get("do_lower_case", albert):
        before.append({"type": "Lowercase"})
    if not albert:
        before.append({"type": "Strip", "strip_left": True, "strip_right": True})
        if settings.config.get("split_by_punct"):
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
    if normal.remove_extra_whitespaces:
        steps += [{"type": "Strip", "strip_left": False, "strip_right": True}] * numbered
        steps.append(_replace({"Regex": " {2,}"}, " "))
    start = "always" if normal.add_dummy_prefix else "never"
    space = {"type": "Metaspace", "replacement": WORD_START, "prepend_scheme": start}
    space["split"] = trained.split_by_whitespace
    decoders = [{"type": "ByteFallback"}] * trained.byte_fallback + [space]
    more = [(one.piece, one.type == _CONTROL) for one in pieces if one.type in (_CONTROL, _USER)]
    state = {
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
    state = json.loads(tokenizer.model.to_str())
    names = {symbol: tokenizer.names.get(symbol, symbol) for symbol in SPELLINGS[0] if symbol in numbers}
    ordered = sorted(((number, symbol) for symbol, number in numbers.items()))
    pieces = {number: names.get(symbol) or tokenizer.pieces.get(symbol, symbol) for number, symbol in ordered}
    added = {content: token for content, token in tokenizer.added.items() if content not in tokenizer.names.values()}
    model = state["model"]
    if model["type"] == "Unigram":
        old = model["vocab"]
        places = {number: tokenizer.numbers.get(symbol, len(old)) for symbol, number in numbers.items()}
        scores = {number: old[place][1] for number, place in places.items() if place < len(old)}
        size = max(scores, default=-1) + 1
        model["vocab"] = [[pieces.get(n, f"madeupword{n}"), scores.get(n, _NEVER)] for n in range(size)]
        model["unk_id"] = numbers[UNKNOWN]
    else:
        model["vocab"] = {piece: number for number, piece in pieces.items()}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    special = {name: {"special": True, "lstrip": symbol == MASK} for symbol, name in names.items()}
    state["added_tokens"] = [
        plain | added.get(piece, {}) | special.get(piece, {}) | {"id": number, "content": piece}
        for number, piece in pieces.items()
        if piece in special or piece in added or number >= len(model["vocab"])
    ]
    state = state if added else continues_after_mask(state)
    made = import_tokenizers().Tokenizer.from_str(json.dumps(state))
    first, last, second = names["<s>"], names["</s>"], int(segments)
    made.post_processor = import_tokenizers().processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} " + f"{last}:{second} " * separators + f"$B:{second} {last}:{second}",
        special_tokens=[(name, numbers[symbol]) for symbol, name in names.items() if name in (first, last)],
    )
    settings: dict[str, Any] = {"tokenizer_class": GENERIC, "clean_up_tokenization_spaces": False}
    settings |= {f"{role}_token": names[ours] for role, ours in _ROLES.items() if ours in names}
    settings["model_input_names"] = ["input_ids", *["token_type_ids"] * second, "attention_mask"]
    if longest is not None:
        settings["model_max_length"] = longest
    return {TOKENIZER_JSON: json_of(made), SETTINGS: json.dumps(settings, indent=2) + "\n"}
