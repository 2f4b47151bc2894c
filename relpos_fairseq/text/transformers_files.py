"""Write a tokenizer as transformers reads it: one tokenizer.json, which every release takes as it stands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from relpos_fairseq.text.dictionary import MASK, UNKNOWN
from relpos_fairseq.text.folders import GENERIC, ROLES, SETTINGS, TOKENIZER_JSON
from relpos_fairseq.text.tokenizer import SPELLINGS, State, Tokenizer, continues_after_mask, import_tokenizers, text_of

if TYPE_CHECKING:
    from relpos_fairseq.text.assets import Text

# Texts by which ids are compared: accents, other scripts, numbers, spaces, signs, what no model has seen.
TRIED = (
    "A man, a plan: 3.14 canals!",
    "Où est-il né ?  Zürich",
    "北京 — привет",
    "ab\u0301c 😀x",
    "İSTANBUL's ﬁne ½",
    "don't \u200bgo\u00a0there",
)
_NEVER = -1e4  # the score of a piece that no text gives


def tried_ids(text: Text, ids: Mapping[str, int], before: Sequence[int], after: Sequence[int]) -> dict[str, list[int]]:
    """Return the ids that a written tokenizer must give for each of the tried texts.

    Args:
        text: splits them as the model's training data was split.
        ids: the id of each symbol, `<unk>` among them.
        before: ids of the symbols before a text.
        after: ids of those after it.
    """
    return {line: [*before, *(ids.get(symbol, ids[UNKNOWN]) for symbol in text.encode(line)), *after] for line in TRIED}


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
    # Tokens that no text gives but whole need no piece of the model, where they stand behind all that do.
    whole = {*added, *names.values()}
    size = 1 + max((n for n, piece in pieces.items() if piece not in whole or piece == names[UNKNOWN]), default=-1)
    state["model"] = _renumbered(state["model"], pieces, size, numbers[UNKNOWN])
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
    settings: dict[str, Any] = {**tokenizer.carried, "tokenizer_class": GENERIC, "clean_up_tokenization_spaces": False}
    settings |= {f"{role}_token": names[ours] for role, ours in ROLES.items() if ours in names}
    settings["model_input_names"] = ["input_ids", *["token_type_ids"] * segments, "attention_mask"]
    if (longest := tokenizer.longest(longest)) is not None:
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


def _renumbered(model: State, pieces: Mapping[int, str], size: int, unknown: int) -> State:
    """Return a model whose vocabulary is the first `size` of `pieces`."""
    if model["type"] != "Unigram":
        return model | {"vocab": {piece: number for number, piece in pieces.items() if number < size}}
    scores = dict(model["vocab"])
    vocab = [[pieces.get(n, f"madeupword{n}"), scores.get(pieces.get(n), _NEVER)] for n in range(size)]
    return model | {"vocab": vocab, "unk_id": unknown}
