"""Make the content of a tokenizer.json of a model of sentencepiece, which the `tokenizers` library then runs.

A model's ids are the same here and wherever it is exported to. They are sentencepiece's own but where a character that
the normalization replaces carries a combining mark, which the library drops.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.text.dictionary import MASK, SPECIAL, UNK, WORD_START
from relpos_fairseq.text.tokenizer import SPELLINGS, State, load_sentencepiece, vocabulary_of

_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # kinds of pieces: unknown, control, and found whole in text


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
    from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

    proto = ModelProto.FromString(content)
    trained, normal = proto.trainer_spec, proto.normalizer_spec
    if trained.model_type == trained.WORD or trained.treat_whitespace_as_suffix:
        raise UserError(f"{name}: no unigram or BPE model of sentencepiece's, with spaces before words: train one")
    pieces = list(proto.pieces)
    steps: list[dict[str, Any]] = []
    if normal.precompiled_charsmap:
        charsmap = base64.b64encode(normal.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": charsmap})
    theirs = released or not numbered  # transformers' classes do not ask for the following
    if normal.remove_extra_whitespaces or theirs:
        steps += [{"type": "Strip", "strip_left": False, "strip_right": True}] * numbered
        steps.append(replacement({"Regex": " {2,}"}, " "))
        if not (normal.add_dummy_prefix or theirs):
            steps.append(replacement({"Regex": rf"\A[ {WORD_START}]+"}, ""))
    elif normal.add_dummy_prefix:  # before a space too, where the library adds none
        steps.append(replacement({"Regex": rf"\A[ {WORD_START}]"}, 2 * WORD_START))
    start = "always" if normal.add_dummy_prefix or theirs else "never"
    space: dict[str, Any] = {"type": "Metaspace", "replacement": WORD_START, "prepend_scheme": start}
    space["split"] = trained.split_by_whitespace or theirs
    decoders = [{"type": "ByteFallback"}] * trained.byte_fallback + [space]
    users = [one.piece for one in pieces if one.type == _USER]
    more = [(one.piece, True) for one in pieces if one.type == _CONTROL]
    more += [(piece, False) for piece in users if theirs]
    state: State = {
        **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "post_processor": None},
        **{"normalizer": {"type": "Sequence", "normalizers": steps}, "pre_tokenizer": space},
        **{"decoder": {"type": "Sequence", "decoders": decoders}, "model": _model(proto, numbered, released)},
    }
    if users and not theirs:  # found after the space that is put before a text, which an added token has none of
        longest = "|".join(re.escape(piece) for piece in sorted(users, key=len, reverse=True))
        whole = {"type": "Split", "pattern": {"Regex": longest}, "behavior": "Isolated", "invert": False}
        state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [space, whole]}
        state["model"] |= {"ignore_merges": True} if state["model"]["type"] == "BPE" else {}
    known = vocabulary_of(state)
    flags = {"normalized": False}
    add_tokens(
        state, [added_token({"content": one, "special": control} | flags) for one, control in more if one in known], []
    )
    return state


def _model(proto: Any, numbered: bool, released: bool) -> State:
    """Return the model of a tokenizer.json, its pieces numbered as `sentencepiece_state` says."""
    trained, pieces = proto.trainer_spec, list(proto.pieces)
    unknown, vocab = trained.unk_id, [(one.piece, one.score) for one in pieces]
    if numbered:
        kept = pieces[3:] if released else [one for one in pieces if one.type not in (_UNKNOWN, _CONTROL)]
        scores = [(one.piece, one.score) for one in kept if one.piece not in SPELLINGS[0]]
        unknown, vocab = UNK, [*((symbol, 0.0) for symbol in SPECIAL), *scores, (MASK, 0.0)]
    found = {"type": "Unigram", "unk_id": unknown, "vocab": vocab, "byte_fallback": trained.byte_fallback}
    if trained.model_type != trained.BPE:
        return found
    numbers = {piece: number for number, (piece, _) in enumerate(vocab)}
    found |= {"type": "BPE", "vocab": numbers, "merges": _merges(dict(vocab)), "fuse_unk": True}
    return found | {"unk_token": vocab[found.pop("unk_id")][0]}


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


def replacement(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


# Tokens added to a tokenizer.json


def added_token(value: Any) -> dict[str, Any]:
    """Return an added token with all its flags, from its name or its description.

    Raises:
        UserError: it is neither.
    """
    given = value if isinstance(value, Mapping) else {"content": value, "special": True}
    if not isinstance(given.get("content"), str):
        raise UserError(f"a special or added token must be a text or an object with its content, got {value!r}")
    flags = {name: given.get(name, False) for name in ("single_word", "lstrip", "rstrip", "special")}
    flags["normalized"] = given.get("normalized", not flags["special"])
    if wrong := [name for name, value in flags.items() if not isinstance(value, bool)]:
        raise UserError(f"added token {given['content']!r}: {wrong[0]} must be true or false, got {flags[wrong[0]]!r}")
    return {"content": given["content"]} | flags


def add_tokens(state: State, added: list[dict[str, Any]], special: list[dict[str, Any]]) -> None:
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
