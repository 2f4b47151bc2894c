"""Check a config.json: one table of the keys that are read here, with the type and range that transformers gives each.

Where transformers computes with a value, it is taken; where its models end in an error, the key and value are named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.io.reading import read_json

Rule = tuple[str, Callable[[Any], bool]]  # what is needed, in words, and whether a value is it


def _whole(least: int | None = None) -> Rule:
    words = "a whole number" if least is None else f"a whole number from {least} on"
    return words, lambda value: type(value) is int and (least is None or value >= least)


def _or_null(rule: Rule) -> Rule:
    return f"{rule[0]} or null", lambda value: value is None or rule[1](value)


def _counted(value: Any) -> bool:
    if not isinstance(value, dict):
        return value is None
    return {*value} == {str(number) for number in range(len(value))} and all(isinstance(v, str) for v in value.values())


def _terms(value: Any) -> bool:
    return all(isinstance(one, str) for one in value) if isinstance(value, list) else isinstance(value, str | None)


_SIZE, _RATE = (
    _or_null(_whole(1)),
    ("a number from 0 to 1", lambda value: type(value) in (int, float) and 0 <= value <= 1),
)
_TEXT = ("a name", lambda value: isinstance(value, str) and bool(value))
_SWITCH = _or_null(("true or false", lambda value: isinstance(value, bool)))
_OBJECT = ("an object", lambda value: isinstance(value, dict))


def _table(*rows: tuple[str, Rule]) -> dict[str, Rule]:
    return {key: rule for keys, rule in rows for key in keys.split()}


_KEYS = _table(
    ("vocab_size hidden_size num_hidden_layers num_attention_heads intermediate_size max_position_embeddings", _SIZE),
    ("source_rows encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads", _SIZE),
    ("attention_head_size embedding_size", _whole(1)),
    ("type_vocab_size pair_separators", _whole(0)),
    ("position_buckets max_relative_positions conv_kernel_size", _whole()),
    ("pad_token_id decoder_start_token_id", _or_null(_whole())),
    ("layer_norm_eps hidden_dropout_prob attention_probs_dropout_prob pooler_dropout", _RATE),
    ("dropout attention_dropout activation_dropout", _RATE),
    ("classifier_dropout cls_dropout", _or_null(_RATE)),
    ("model_type hidden_act position_embedding_type pooler_hidden_act norm_rel_ebd activation_function", _TEXT),
    ("relative_attention position_biased_input share_att_key talking_head legacy tie_word_embeddings", _SWITCH),
    ("is_decoder add_cross_attention scale_embedding share_encoder_decoder_embeddings", _SWITCH),
    ("pos_att_type", ("a name, a list of names or null", _terms)),
    ("id2label", ("a name of each class by its number, from 0 on without a gap,", _counted)),
    ("label2id task", _or_null(_OBJECT)),
    ("values", _OBJECT),
)
_SIDES = ("encoder", "decoder")
# Of the `values` of `relpos export transformers`: fairseq's options.
_VALUES = _table(
    *((f"{side}_layers {side}_embed_dim {side}_ffn_embed_dim {side}_attention_heads", _SIZE) for side in _SIDES),
    ("max_positions", _SIZE),
    ("dropout attention_dropout activation_dropout pooler_dropout layer_norm_eps", _RATE),
    ("activation_fn pooler_activation_fn position_scheme", _TEXT),
    ("untie_weights_roberta no_layernorm_embedding encoder_normalize_before decoder_normalize_before", _SWITCH),
)


def read_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a folder of transformers, of any model, and check the keys that are read here.

    Raises:
        ConversionError: the file is absent or truncated, or names the first key whose value is of another type.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ConversionError(f"{path} is missing: give a whole Hugging Face folder")
    config = read_json(path, dict[str, object], error=ConversionError)
    for table, given, place in ((_KEYS, config, ""), (_VALUES, config.get("values"), "values.")):
        _check(table, given or {}, f"{path} has {place}")
    return config


def _check(table: Mapping[str, Rule], given: Mapping[str, Any], place: str) -> None:
    for key, (needed, holds) in table.items():
        if key in given and not holds(given[key]):
            raise ConversionError(f"{place}{key} {given[key]!r}: {needed} is needed")
