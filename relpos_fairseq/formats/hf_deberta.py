"""Read the config and the positions of Hugging Face's DeBERTa (v1, v2 and v3), whose tensors `names.DEBERTA` names.

Layers, embeddings and heads are BERT's; the positions become one scheme (`positions`):

    rel_embeddings, LayerNorm   the table of all layers (i - j in the file, j - i here), its norm
    pos_proj, pos_key_proj      W_K; its bias adds the same to a query's whole row: left out
    pos_q_proj, pos_query_proj  W_Q and b
    share_att_key               W_K and W_Q are those of the content

v1 keeps q, k and v of a head side by side (in_proj), and k has no bias.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from relpos_fairseq.conversion.layouts import ENCODER, State
from relpos_fairseq.conversion.report import ConversionError

KIND = "disentangled"  # as `position_embedding_type`, which these models have not
EPSILON = 1e-7  # of layer norms, in every released model


def read_config(config: dict[str, Any]) -> None:
    """Set what a DeBERTa's config leaves to the library, in place, and its kind of positions.

    Raises:
        ConversionError: names the option of config.json by which it has a part that relpos_roberta does not have.
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
    config.setdefault("layer_norm_eps", EPSILON)
    mask = min(128000, config.get("vocab_size", 0) - 1)  # v2 and v3 have rows beyond it
    config["special_ids"] = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, "<mask>": mask}
    relative = config.get("relative_attention") and _terms(config)
    config["position_embedding_type"] = KIND if relative else "absolute"


def parts(name: str, value: Tensor, heads: int) -> dict[str, Tensor]:
    """Return v1's in_proj as the queries', keys' and values' projections that it holds."""
    stem = name.partition(".in_proj.")[0]
    split = value.unflatten(0, (heads, 3, -1))  # (H, 3, D, E)
    made = {f"{stem}.{ours}.weight": split[:, n].flatten(0, 1) for n, ours in enumerate(("query", "key", "value"))}
    return made | {f"{stem}.key.bias": value.new_zeros(len(value) // 3)}


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


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Map our names of the position tensors to their shapes."""
    width, found = config["hidden_size"], {}
    found["distances"] = (2 * (buckets(config) or reach(config)), width)
    if _norm(config):
        found |= {f"distances.norm.{part}": (width,) for part in ("weight", "bias")}
    if _on_input(config):
        found["positions"] = (config["max_position_embeddings"], width)
    if not config.get("share_att_key"):
        own = {"c2p": {"query_projection": (width, width)}}
        own["p2c"] = {"key_projection": (width, width), "key_bias": (width,)}
        for layer in range(config["num_hidden_layers"]):
            place = f"{ENCODER}.layers.{layer}.self_attn.position.0"
            found |= {f"{place}.{name}": shape for term in _terms(config) for name, shape in own[term].items()}
    return found


def head_dropout(config: dict[str, Any], notes: list[str]) -> float:
    """Return the one dropout of our classifier's two layers; a note says where DeBERTa has two.

    Its pooler has `pooler_dropout`, 0 by default, and its last layer `cls_dropout`, that of the model by default.
    """
    pooler, last = config.get("pooler_dropout", 0), config.get("cls_dropout")
    last = config.get("hidden_dropout_prob", 0.1) if last is None else last
    if pooler and pooler != last:
        notes.append(f"both layers of a classifier train with the pooler's dropout {pooler}; DeBERTa's last has {last}")
    return pooler or last


def positions(state: State, config: dict[str, Any], scheme: str, on_input: str) -> dict[str, Any]:
    """Make a model's position tables in `state`; return the values of RelPosRobertaConfig that they need.

    Args:
        state: the folder's tensors by our names.
        config: its config.
        scheme: name of the scheme of DeBERTa's positions.
        on_input: name of the scheme of positions that are added to the input.
    """
    biased, terms = _on_input(config), _terms(config)
    absolute = state.pop("positions", None)
    if biased:
        state[f"{ENCODER}.positions.shared.0.table"] = absolute
    table = state.pop("distances").flip(0)[None]  # i - j to j - i
    norms = {part: state.pop(f"distances.norm.{part}", None) for part in ("weight", "bias")}
    for layer in range(config["num_hidden_layers"]):
        place = f"{ENCODER}.layers.{layer}.self_attn.position.0"
        state[f"{place}.table"] = table
        if _norm(config):
            state |= {f"{place}.norm_{part}": value for part, value in norms.items()}
    return {
        "position_scheme": f"{on_input}+{scheme}" if biased else scheme,
        "position_clip_distance": str(reach(config)),
        "position_log_buckets": str(buckets(config)),
        "position_terms": "both" if len(set(terms)) == 2 else terms[0],
        "position_norm": "on" if _norm(config) else "off",
        "position_projections": "content" if config.get("share_att_key") else "own",
    }
