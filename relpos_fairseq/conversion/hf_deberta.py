"""Rename DeBERTa of Hugging Face's library (v1, v2 and v3) as a BERT with other positions.

Layers, embeddings and heads are BERT's under other names, which `as_bert` changes; the positions become one scheme
(`positions`):

    rel_embeddings, LayerNorm   the table of all layers (i - j in the file, j - i here), its norm
    pos_proj, pos_key_proj      W_K; its bias adds the same to a query's whole row: left out
    pos_q_proj, pos_query_proj  W_Q and b
    share_att_key               W_K and W_Q are those of the content

v1 keeps q, k and v of a head side by side (in_proj), and k has no bias.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion.layouts import ENCODER, State
from relpos_fairseq.conversion.report import ConversionError

KIND = "disentangled"  # as `position_embedding_type`, which these models have not
EPSILON = 1e-7  # of layer norms, in every released model
_RENAMED = {
    "query_proj": "query",
    "key_proj": "key",
    "value_proj": "value",
    "pos_proj": "pos_key_proj",
    "pos_q_proj": "pos_query_proj",
}
# The pre-training's own heads: the library reads the first where config.json says `legacy: false`, never the second.
_LM, _MASK = "lm_predictions.lm_head.", "mask_predictions."
_LM_AS_BERT = {"dense.": "transform.dense.", "LayerNorm.": "transform.LayerNorm.", "bias": "bias"}


def as_bert(config: dict[str, Any], weights: dict[str, Tensor], prefix: str) -> list[str]:
    """Rename config and weights, in place, as a BERT's with positions of the kind `disentangled`.

    Returns:
        Notes for the user.

    Raises:
        ConversionError: the model has a part that relpos_roberta does not have.
    """
    _check(config)
    config.setdefault("layer_norm_eps", EPSILON)
    config["special_ids"] = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
    size = config.get("vocab_size", 0)
    config["special_ids"]["<mask>"] = min(128000, size - 1)  # v2 and v3 have rows beyond it
    if config.get("relative_attention") and _terms(config):
        config["position_embedding_type"] = KIND
    legacy = config.get("legacy", True)
    heads = [name for name in weights if name.startswith((_LM, _MASK))]
    for name in heads:
        value = weights.pop(name)
        for theirs, ours in _LM_AS_BERT.items():
            if not legacy and name.startswith(_LM + theirs):
                weights[f"cls.predictions.{ours}{name.removeprefix(_LM + theirs)}"] = value
    heads = [name for name in heads if legacy or name.startswith(_MASK)]
    for name in [name for name in weights if ".attention.self." in name]:
        _rename(name, weights, config)
    width = config.get("hidden_size", 1)
    if not config.get("type_vocab_size"):
        config["type_vocab_size"] = 1
        weights[f"{prefix}embeddings.token_type_embeddings.weight"] = torch.zeros(1, width)
    return ["the mask decoder that it was pre-trained with is left out"] if heads else []


def _check(config: dict[str, Any]) -> None:
    """Raise an error for parts of DeBERTa that relpos_roberta does not have.

    Raises:
        ConversionError: names the option of config.json.
    """
    width = config.get("hidden_size")
    wrong = {
        "talking_head": config.get("talking_head"),
        "conv_kernel_size": config.get("conv_kernel_size", 0) > 0,
        "embedding_size": config.get("embedding_size", width) != width,
        "attention_head_size": "attention_head_size" in config
        and config["attention_head_size"] * config["num_attention_heads"] != width,
        "pos_att_type": not set(_terms(config)) <= {"c2p", "p2c"},
        "norm_rel_ebd": config.get("norm_rel_ebd", "none") not in ("none", "layer_norm"),
        "layer_norm_eps": _norm(config) and config.get("layer_norm_eps", EPSILON) != EPSILON,
        "relative_attention": not config.get("relative_attention") and not _on_input(config),
    }
    for key, is_wrong in wrong.items():
        if is_wrong:
            raise ConversionError(
                f"config.json: {key} {config.get(key)!r} is a part of DeBERTa that our RoBERTa has not"
            )


def _terms(config: dict[str, Any]) -> list[str]:
    """Return the terms of attention with positions: c2p, p2c or both."""
    terms = config.get("pos_att_type") or []
    return [part.strip() for part in terms.lower().split("|")] if isinstance(terms, str) else terms


def _norm(config: dict[str, Any]) -> bool:
    return config.get("norm_rel_ebd", "none") == "layer_norm"


def _on_input(config: dict[str, Any]) -> bool:
    return config.get("position_biased_input", True)


def reach(config: dict[str, Any]) -> int:
    """Return the largest distance that positions tell apart, before it is put into a bucket."""
    given = config.get("max_relative_positions", -1)
    return given if given > 0 else config["max_position_embeddings"]


def buckets(config: dict[str, Any]) -> int:
    """Return the number of buckets per direction; 0: distances are not put into buckets."""
    return max(config.get("position_buckets", -1), 0)


def _rename(name: str, weights: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Rename or split one tensor of a layer's attention, in place."""
    stem, part, kind = (name.rsplit(".", 2) + [""])[:3]
    if name.endswith(("q_bias", "v_bias")):
        stem, part = name.rsplit(".", 1)
        weights[f"{stem}.{'query' if part == 'q_bias' else 'value'}.bias"] = weights.pop(name)
    elif part == "in_proj":
        heads = config["num_attention_heads"]
        split = weights.pop(name).unflatten(0, (heads, 3, -1))  # (H, 3, D, E)
        for number, ours in enumerate(("query", "key", "value")):
            weights[f"{stem}.{ours}.weight"] = split[:, number].flatten(0, 1)
        weights[f"{stem}.key.bias"] = split.new_zeros(split.size(0) * split.size(2))
    elif part in _RENAMED:
        weights[f"{stem}.{_RENAMED[part]}.{kind}"] = weights.pop(name)


def names(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Map the names of the position tensors, without the prefix, to their shapes."""
    width, found = config["hidden_size"], {}
    found["encoder.rel_embeddings.weight"] = (2 * (buckets(config) or reach(config)), width)
    if _norm(config):
        found |= {f"encoder.LayerNorm.{part}": (width,) for part in ("weight", "bias")}
    if _on_input(config):
        length = config["max_position_embeddings"]
        found["embeddings.position_embeddings.weight"] = (length, width)
    if not config.get("share_att_key"):
        parts = {"c2p": ["pos_key_proj.weight"]}
        parts["p2c"] = ["pos_query_proj.weight", "pos_query_proj.bias"]
        for layer in range(config["num_hidden_layers"]):
            for name in (name for term in _terms(config) for name in parts[term]):
                shape = (width, width) if name.endswith("weight") else (width,)
                found[f"encoder.layer.{layer}.attention.self.{name}"] = shape
    return found


def unread(config: dict[str, Any]) -> set[str]:
    """Return the names, without the prefix, of biases that softmax cancels, which are therefore left out."""
    stem = "attention.self.pos_key_proj.bias"
    return {f"encoder.layer.{layer}.{stem}" for layer in range(config["num_hidden_layers"])}


def positions(model: Any, state: State, scheme: str, on_input: str) -> dict[str, Any]:
    """Write the position tables into `state`; return the values of RelPosRobertaConfig that they need.

    Args:
        model: the HuggingFaceModel.
        state: tensors of the result.
        scheme: name of the scheme of DeBERTa's positions.
        on_input: name of the scheme of positions that are added to the input.
    """
    config = model.config
    biased, terms = _on_input(config), _terms(config)
    if biased:
        table = model.encoder("embeddings.position_embeddings.weight")
        state[f"{ENCODER}.positions.shared.0.table"] = table
    for layer in range(model.layers):
        ours = f"{ENCODER}.layers.{layer}.self_attn.position.0"
        theirs = f"encoder.layer.{layer}.attention.self"
        table = model.encoder("encoder.rel_embeddings.weight")
        state[f"{ours}.table"] = table.flip(0)[None]  # i - j to j - i
        if _norm(config):
            for part in ("weight", "bias"):
                state[f"{ours}.norm_{part}"] = model.encoder(f"encoder.LayerNorm.{part}")
        if config.get("share_att_key"):
            continue
        if "c2p" in terms:
            state[f"{ours}.query_projection"] = model.encoder(f"{theirs}.pos_key_proj.weight")
        if "p2c" in terms:
            state[f"{ours}.key_projection"] = model.encoder(f"{theirs}.pos_query_proj.weight")
            state[f"{ours}.key_bias"] = model.encoder(f"{theirs}.pos_query_proj.bias")
    return {
        "position_scheme": f"{on_input}+{scheme}" if biased else scheme,
        "position_clip_distance": str(reach(config)),
        "position_log_buckets": str(buckets(config)),
        "position_terms": "both" if len(set(terms)) == 2 else terms[0],
        "position_norm": "on" if _norm(config) else "off",
        "position_projections": "content" if config.get("share_att_key") else "own",
        "pooler_activation_fn": config.get("pooler_hidden_act", "gelu"),
    }
