"""What becomes of the keys of config.json and of the files of a transformers folder, and why."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from relpos_fairseq.saved.ledger import KEPT, NEUTRAL, Ledger

# Keys of config.json that say nothing of the model, by the reason why.
NEUTRAL_KEYS = {
    "the library's own record": "_name_or_path transformers_version torch_dtype dtype auto_map _attn_implementation "
    "_attn_implementation_autoset attn_implementation architectures finetuning_task xla_device output_past model_type",
    "of training from nothing": "initializer_range initializer_factor",
    "of memory and speed": "gradient_checkpointing chunk_size_feed_forward use_cache torchscript use_bfloat16",
    "of what the library returns": "output_hidden_states output_attentions return_dict",
    "the tokenizer says it": "pad_token_id bos_token_id eos_token_id sep_token_id cls_token_id mask_token_id "
    "unk_token_id",
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


def begin(folder: Path, keys: dict[str, Any], tensors: Iterable[str]) -> Ledger:
    """Return the ledger of a folder, in which its files and the keys that say nothing are marked."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() or path.is_symlink())
    files = [path.relative_to(folder).as_posix() for path in found]
    ledger = Ledger(tensors, keys, files)
    for verdict, reason, pattern in FILES:
        ledger.mark("files", verdict, filter(re.compile(pattern).fullmatch, files), reason)
    for reason, names in NEUTRAL_KEYS.items():
        ledger.mark("keys", NEUTRAL, names.split(), reason)
    unset = [key for key, value in keys.items() if value is None or value is False or value in ([], {}, "")]
    ledger.mark("keys", NEUTRAL, unset, "not set")
    return ledger
