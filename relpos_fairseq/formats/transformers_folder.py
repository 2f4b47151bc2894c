"""Open a folder of transformers, whatever its model: its config.json, its tensors, and what becomes of what it holds.

config.json is checked by one table of the keys that are read here, with the type and range that transformers gives
each: where transformers computes with a value, it is taken; where its models end in an error, key and value are named.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.io.tensor_files import read_tensors
from relpos_fairseq.saved.ledger import KEPT, NEUTRAL, USED, Ledger, Recorded

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
    ("encoder_ffn_dim decoder_ffn_dim", _SIZE),
    ("dim n_layers n_heads hidden_dim", _SIZE),
    ("attention_head_size embedding_size", _whole(1)),
    ("type_vocab_size pair_separators", _whole(0)),
    ("position_buckets max_relative_positions conv_kernel_size", _whole()),
    ("pad_token_id decoder_start_token_id", _or_null(_whole())),
    ("layer_norm_eps hidden_dropout_prob attention_probs_dropout_prob pooler_dropout", _RATE),
    ("dropout attention_dropout activation_dropout seq_classif_dropout", _RATE),
    ("classifier_dropout cls_dropout", _or_null(_RATE)),
    (
        "model_type hidden_act position_embedding_type pooler_hidden_act norm_rel_ebd activation_function activation",
        _TEXT,
    ),
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


def read_config(folder: Path) -> Recorded:
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
    return Recorded(config)


def _check(table: Mapping[str, Rule], given: Mapping[str, Any], place: str) -> None:
    for key, (needed, holds) in table.items():
        if key in given and not holds(given[key]):
            raise ConversionError(f"{place}{key} {given[key]!r}: {needed} is needed")


# Tensors

_COMPUTED = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_BUFFERS = ("_ids", "version")  # ends of names of tensors that hold whole numbers
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Read every tensor of a Hugging Face folder, by name.

    Raises:
        ConversionError: no file of weights, a part of several is missing, or one is truncated.
    """
    path, *parts = weight_files(folder)
    if path.suffix != ".json":
        return _read(path)
    if lost := [part.name for part in parts if not part.is_file()]:
        raise ConversionError(
            f"{folder} lacks {', '.join(lost)} of the {len(parts)} files of weights that "
            f"{path.name} lists: copy the whole folder"
        )
    state = {name: value for part in parts for name, value in _read(part).items()}
    if absent := sorted(_weight_map(path).keys() - state):
        raise ConversionError(
            f"{path.name} lists {len(absent)} tensors that no file holds ({absent[0]}): the folder mixes two models"
        )
    return state


def weight_files(folder: Path) -> list[Path]:
    """Return the files from which `read_weights` reads a folder's tensors: one, or an index and those that it lists.

    Raises:
        ConversionError: there is none, or an index lists no files.
    """
    path = next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise ConversionError(f"{folder} holds no weights: one of {', '.join(_WEIGHTS)} is needed")
    if path.suffix != ".json":
        return [path]
    return [path, *(folder / part for part in sorted(set(_weight_map(path).values())))]


class _Index(TypedDict):
    """What model.safetensors.index.json says."""

    weight_map: dict[str, str]


def _weight_map(path: Path) -> dict[str, str]:
    """Return the file of every tensor, of an index of files that lie beside it."""
    found = read_json(path, _Index, error=ConversionError)["weight_map"]
    if wrong := [name for name in found.values() if not name or "/" in name or name.startswith(".")]:
        raise ConversionError(f"{path} names {wrong[0]!r}, and not a file beside it: copy it again")
    return found


def _read(path: Path) -> dict[str, Tensor]:
    return {n: _computable(value, n, path) for n, value in read_tensors(path, error=ConversionError).items()}


def _computable(value: Tensor, name: str, path: Path) -> Tensor:
    """Return a tensor that models compute with, or a buffer of whole numbers; 8-bit floats become float32, exactly.

    Raises:
        ConversionError: names a tensor of another type.
    """
    kind = value.dtype if value.layout is torch.strided else value.layout
    small = str(kind).startswith("torch.float8")
    whole = kind in (torch.int64, torch.int32, torch.uint8) and name.endswith(_BUFFERS)
    if value.is_quantized or not (small or whole or kind in _COMPUTED):
        raise ConversionError(
            f"{path}: {name} is of the type {kind}, and weights are {', '.join(map(str, _COMPUTED))}: save it so"
        )
    return value.float() if small else value


# What becomes of it

# Keys of config.json that say nothing of the model, by the reason why.
NEUTRAL_KEYS = {
    "the library's own record": "_name_or_path transformers_version torch_dtype dtype auto_map _attn_implementation "
    "_attn_implementation_autoset attn_implementation architectures finetuning_task xla_device output_past model_type",
    "of training": "initializer_range initializer_factor qa_dropout",
    "the tensors say it": "sinusoidal_pos_embds tie_weights_",
    "of memory and speed": "gradient_checkpointing chunk_size_feed_forward use_cache torchscript use_bfloat16",
    "of what the library returns": "output_hidden_states output_attentions return_dict",
    "the tokenizer says it": "pad_token_id bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id "
    "unk_token_id tokenizer_class",
    "id2label says it": "num_labels _num_labels",
    "of generation, which an encoder has not": "top_k top_p temperature repetition_penalty length_penalty "
    "num_return_sequences num_beam_groups diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size "
    "eos_token_ids max_length min_length do_sample num_beams typical_p exponential_decay_length_penalty",
    "of another architecture under the same config": "directionality pooler_fc_size pooler_num_attention_heads "
    "pooler_num_fc_layers pooler_size_per_head pooler_type pooler_hidden_size pooler_dropout tie_encoder_decoder "
    "cross_attention_hidden_size",
}
AS_TIED = "tied, as its library ties it"
# Files by patterns of their places: what becomes of them, and why.
FILES = (
    (NEUTRAL, "a description", r"(?i)(.*/)?(readme|license|notice|model_card)[^/]*|.*\.(md|png|jpg|svg)"),
    (NEUTRAL, "of a version control or a download", r"(.*/)?\..*"),
    (
        NEUTRAL,
        "weights in another format, which are not compared with those that are read",
        r"(pytorch_model|model|tf_model|flax_model|rust_model)([-.].*)?\.(bin|safetensors|h5|msgpack|ot)(\.index\.json)?"
        r"|(onnx|openvino|coreml)/.*",
    ),
    (NEUTRAL, "of generation, which an encoder has not", r"generation_config\.json"),
    (
        NEUTRAL,
        "of training",
        r"(data_config\.json|training_args\.bin|trainer_state\.json|(optimizer|scheduler|rng_state)[^/]*\.(pt|pth|bin))",
    ),
    (
        KEPT,
        "of sentence-transformers",
        r"modules\.json|sentence_bert_config\.json|config_sentence_transformers\.json|\d+_[A-Za-z]+/[^/]+",
    ),
)


def kept_places(names: Iterable[str]) -> list[str]:
    """Return those of some files' places in which a conversion keeps files."""
    patterns = [re.compile(pattern) for verdict, _, pattern in FILES if verdict == KEPT]
    return [str(name) for name in names if any(pattern.fullmatch(str(name)) for pattern in patterns)]


def ledger_of(
    folder: Path, config: Recorded, tensors: Iterable[str], neutral: Mapping[str, str] = {}, files: Iterable[str] = ()
) -> Ledger:
    """Return the ledger of a folder, in which config.json and weights are used, and what says nothing is marked.

    Args:
        folder: the folder.
        config: its config.json.
        tensors: names of its tensors.
        neutral: keys of the model's config that say nothing, by the reason why.
        files: others that are used.
    """
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() or path.is_symlink())
    names = [path.relative_to(folder).as_posix() for path in found]
    ledger = Ledger(tensors, config, names)
    for verdict, reason, pattern in FILES:
        ledger.mark("files", verdict, filter(re.compile(pattern).fullmatch, names), reason)
    ledger.mark("files", USED, ["config.json", *(file.name for file in weight_files(folder)), *files])
    ledger.mark_neutral(NEUTRAL_KEYS)
    unset = [key for key, value in ledger.keys.items() if value is None or value is False or value in ([], {}, "")]
    ledger.mark("keys", NEUTRAL, unset, "not set")
    ledger.mark_neutral(neutral)
    return ledger
