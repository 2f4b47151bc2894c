"""Read the tokenizer of a folder from all its files together.

A folder of transformers becomes what its AutoTokenizer builds (release 4.46): the vocabulary's file, then settings of
tokenizer_config.json, then names of special_tokens_map.json, then added tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.reading import read_json, read_text, reading
from relpos_fairseq.text.dictionary import MASK, UNKNOWN
from relpos_fairseq.text.sentencepiece_model import add_tokens, added_token, replacement, sentencepiece_state
from relpos_fairseq.text.tokenizer import (
    SENTENCEPIECE_MODEL,
    SPELLINGS,
    Pairs,
    State,
    Tokenizer,
    byte_bpe,
    import_tokenizers,
    spelled,
    vocabulary_of,
    wordpiece,
)

TOKENIZER_JSON, SETTINGS = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
GENERIC = "PreTrainedTokenizerFast"  # transformers' class that takes tokenizer.json as it stands
# What transformers calls fairseq's special symbols, in the order in which it adds them.
ROLES = {"bos": "<s>", "eos": "</s>", "unk": UNKNOWN, "sep": "</s>", "pad": "<pad>", "cls": "<s>", "mask": MASK}
CARRIED = ("padding_side", "truncation_side", "chat_template", "pad_to_multiple_of", "model_max_length")
_ANY_LENGTH = 1e20  # from which on transformers takes a length for none
_BERT, _ALBERT = SPELLINGS[1:]


@dataclass(frozen=True)
class _Class:
    """A tokenizer class of transformers: its file, how it spells special symbols, and the step that it sets anew."""

    name: str
    file: str
    spelling: tuple[str, ...] = SPELLINGS[0]
    sets: str = ""  # type of the normalizer or pre-tokenizer whose options tokenizer_config.json decides
    pairs: Pairs = Pairs(1, False)  # how it joins two texts, where tokenizer.json does not say
    types: bool = False  # whether it gives its model token types, where tokenizer_config.json does not say


def _classes() -> dict[str, _Class]:
    """Return the classes whose vocabulary file is read here, by their names without case and signs."""
    bert = "Bert DistilBert Electra MobileBert ConvBert SqueezeBert LayoutLM Lxmert"
    mpnet = ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")
    types, own = Pairs(0, True), Pairs(0, False, usual=False, alone=False)
    rows = [_Class(name, "vocab.txt", _BERT, "BertNormalizer", types, name != "DistilBert") for name in bert.split()]
    rows += [_Class(name, "vocab.json", sets="ByteLevel") for name in "Roberta Bart Longformer LED".split()]
    rows += [
        _Class("MPNet", "vocab.txt", mpnet, "BertNormalizer"),
        _Class("GPT2", "vocab.json", (), "ByteLevel", own),
        _Class("Deberta", "vocab.json", _BERT, "ByteLevel", types, True),
        _Class("DebertaV2", "spm.model", _BERT, "", types, True),
        _Class("XLMRoberta", "sentencepiece.bpe.model"),
        _Class("Albert", "spiece.model", _ALBERT, "", types, True),
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
    kind = f"a tokenizer that tokenizers {import_tokenizers().__version__} reads"
    with reading(folder, kind, "a newer release may: pip install -U tokenizers"):
        settings = _Settings(folder)
        names = settings.choose(_present(folder))
        paths = [folder / name for name in names]
        state = _READERS[names](paths, settings)
        named = settings.complete(state)
        pairs = partial(settings.pairs, paths[0] if state.get("post_processor") else None, named)
        files = {path.name: path for path in tokenizer_paths(folder)}
        return Tokenizer(
            state, files, named, ids_as_symbols=names[0] == "encoder.json", carried=settings.carried(), pairs=pairs
        )


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
        self.config = _object(folder / SETTINGS)
        model = _object(folder / "config.json")
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
            special = {role: default[ROLES[role]] for role in own if ROLES[role] in default} | special
        never = self._flag("split_special_tokens", False)
        add_tokens(state, added, [*map(added_token, special.values()), *self._more_special()])
        if never:
            for token in state["added_tokens"]:
                token["never"] = token["special"]
        named: dict[str, str] = {}
        for role in ("cls", "sep", "unk", "pad", "mask", "bos", "eos"):  # a token has one role: the first
            if role in special and (name := added_token(special[role])["content"]) not in named.values():
                named.setdefault(ROLES[role], name)
        if self.cls:
            return named
        found = spelled(vocabulary_of(state))
        return {ours: name for ours, name in found.items() if ours not in named and name not in named.values()} | named

    def pairs(self, template: Path | None, named: Mapping[str, str]) -> Pairs | None:
        """Return how the folder's tokenizer joins two texts, by the template of its tokenizer.json or by its class."""
        types = self.cls.types if self.cls else True
        if inputs := self.config.get("model_input_names"):
            types = "token_type_ids" in inputs
        if template is None:
            own = self.cls.pairs if self.cls else None
            return own and own._replace(segments=own.segments and types)
        model = import_tokenizers().Tokenizer.from_file(str(template))
        model.no_padding()  # which transformers does where it is not asked for it
        model.no_truncation()
        text = next((one for one in ("a", *model.get_vocab()) if model.encode(one, add_special_tokens=False).ids), "")
        found = model.encode(text, text)
        parts = "".join("_" if part is None else str(part) for part in found.sequence_ids)
        special = [token for token, part in zip(found.tokens, parts, strict=True) if part == "_"]
        first = parts.rfind("0") + 2  # with its </s>
        by_part = [int(number >= first) for number in range(len(parts))]
        joined = re.fullmatch("_0+(__?)1+_", parts)
        ends = special == [named.get("<s>"), *[named.get("</s>")] * (len(special) - 1)]
        segments = any(found.type_ids) and types
        usual = joined and ends and (not segments or found.type_ids == by_part)
        single, plain = model.encode(text), model.encode(text, add_special_tokens=False)
        alone = single.tokens == [named.get("<s>"), *plain.tokens, named.get("</s>")]
        alone = alone and not (types and any(single.type_ids))
        return Pairs(len(joined.group(1)) - 1 if joined else 0, segments, bool(usual), alone)

    def carried(self) -> dict[str, Any]:
        """Return the settings that change no id; a `model_max_length` as large as transformers' own default is none."""
        found = {key: self.config[key] for key in CARRIED if self.config.get(key) is not None}
        for key in ("padding_side", "truncation_side"):
            if found.get(key, "left") not in ("left", "right"):
                raise UserError(f"{self.folder / SETTINGS}: {key} must be left or right, got {found[key]!r}")
        longest = found.pop("model_max_length", _ANY_LENGTH)
        if type(longest) not in (int, float) or not longest >= 1:
            raise UserError(f"{self.folder / SETTINGS}: model_max_length must be a number from 1 on, got {longest!r}")
        return found | ({"model_max_length": int(longest)} if longest < _ANY_LENGTH else {})

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
        return [self.config, *([_object(self.folder / SPECIAL_TOKENS)] if legacy else [])]

    def _special(self) -> dict[str, Any]:
        """Return the special tokens by their roles."""
        return {role: one[f"{role}_token"] for one in self._files for role in ROLES if one.get(f"{role}_token")}

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
        return [added_token(value) | {"special": True} for value in found]

    def _added(self) -> list[dict[str, Any]]:
        """Return the added tokens in the order of their numbers."""
        decoder, path = self.config.get("added_tokens_decoder"), self.folder / SETTINGS
        if decoder is None:
            path = self.folder / ADDED_TOKENS
            special = {
                token["content"] for token in [*map(added_token, self._special().values()), *self._more_special()]
            }
            numbers = read_json(path, dict[str, int], {})
            decoder = {str(n): {"content": one, "special": one in special} for one, n in numbers.items()}
            if len(decoder) < len(numbers):
                raise UserError(f"{path}: {len(numbers)} added tokens have {len(decoder)} numbers")
        if wrong := [number for number in decoder if not str(number).isdecimal()]:
            raise UserError(f"{path}: an added token has the number {wrong[0]!r}: a whole number is needed")
        if len(numbers := {int(number) for number in decoder}) < len(decoder):
            raise UserError(f"{path}: {len(decoder)} added tokens have {len(numbers)} numbers")
        return [added_token(token) for _, token in sorted(decoder.items(), key=lambda item: int(item[0]))]

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
    normalizer = _object(folder / TOKENIZER_JSON).get("normalizer")
    return isinstance(normalizer, dict) and normalizer.get("type") == "BertNormalizer"


# The files of vocabularies


class _AnyModel(TypedDict):
    """The part of a tokenizer.json that every model has."""

    vocab: dict[str, int] | list[tuple[str, float]]


class _Model(_AnyModel, total=False):
    type: str
    merges: list[str] | list[tuple[str, str]]
    unk_id: int | None


class _Added(TypedDict):
    """A token that was added to a vocabulary."""

    id: int
    content: str


class _AnyWhole(TypedDict):
    """What is read of a tokenizer.json before the library reads it."""

    model: _Model


class _Whole(_AnyWhole, total=False):
    added_tokens: list[_Added] | None


def _object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one if there is no file."""
    return read_json(path, dict[str, object], {})


def _read_whole(paths: list[Path], settings: _Settings) -> State:
    state = read_json(paths[0], _Whole)
    model = state["model"]
    model.setdefault(
        "type", "BPE" if "merges" in model else "Unigram" if isinstance(model["vocab"], list) else "WordPiece"
    )
    if "dropout" in model:  # of training alone
        model["dropout"] = None
    for name in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        state.setdefault(name, None)
    state["added_tokens"] = [{"id": one["id"]} | added_token(one) for one in state.get("added_tokens") or []]
    return state


def _lines(path: Path) -> list[str]:
    """Return the lines of a file, which only line feeds end (and carriage returns): U+2028 may be a piece."""
    text = read_text(path, "a vocabulary").replace("\r\n", "\n").replace("\r", "\n")
    return text.rstrip("\n").split("\n")


def _read_byte_bpe(paths: list[Path], settings: _Settings) -> State:
    lines = _lines(paths[1])
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    vocab = read_json(paths[0], dict[str, int])
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
    unknown = added_token(settings._special().get("unk", "[UNK]"))["content"]
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
        if isinstance(vocab := state["model"]["vocab"], list):  # of a unigram model: a comma leaves its digit
            vocab = [(one, score - 100 * (one[-1:] == "," and one[-2:-1].isdigit())) for one, score in vocab]
            state["model"]["vocab"] = vocab
        before += [replacement({"String": sign}, '"') for sign in ("``", "''")]
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


_READERS: dict[tuple[str, ...], Callable[[list[Path], _Settings], State]] = {
    (TOKENIZER_JSON,): _read_whole,
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
