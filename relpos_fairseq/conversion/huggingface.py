"""BERT and RoBERTa of Hugging Face's library as models of ours.

    absolute              learned (RoBERTa's table begins after its padding row)
    relative_key          shaw_keys, a_r = E_{-r}: transformers reads its table over i - j
    relative_key_query    m4, the same table in both terms
    token types           --segment-encoding input; a single type, the same for every token, joins
                          the position table (or stays a segment where positions are relative)
    layer_norm_eps        --layer-norm-eps

transformers 4.44.2 is the last release that has the relative kinds.  Rows of the embedding are put
in fairseq's order (`vocabulary`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion import hf_names
from relpos_fairseq.conversion.hf_files import read_json, read_weights
from relpos_fairseq.conversion.hf_names import FAMILIES, Family
from relpos_fairseq.conversion.layouts import ENCODER, State
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.conversion.vocabulary import Vocabulary, of_folder

SCHEMES = {"absolute": "learned", "relative_key": "shaw_keys", "relative_key_query": "m4"}
# fairseq's gelu is the exact one, and its gelu_accurate the approximation by tanh.
ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "tanh": "tanh",
    "gelu_new": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
}
HEAD = "sentence_classification_head"  # fairseq's name of the head of sentence_prediction
SPAN_HEAD = "question_answering_head"


@dataclass
class HuggingFaceModel:
    """A folder, read and checked.

    Args:
        family: BERT or RoBERTa.
        config: its config.json.
        weights: its tensors under its own names, with the family's prefix.
        vocabulary: the order of its rows in fairseq's dictionary.
        notes: what should be said of it.
    """

    family: Family
    config: dict[str, Any]
    weights: dict[str, Tensor]
    vocabulary: Vocabulary
    notes: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """`absolute`, `relative_key` or `relative_key_query`."""
        return self.config.get("position_embedding_type") or "absolute"

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.config["num_hidden_layers"]

    @property
    def max_positions(self) -> int:
        """Positions of an input that its tables cover."""
        reserved = self.offset if self.kind == "absolute" else 0
        return self.config["max_position_embeddings"] - reserved

    @property
    def offset(self) -> int:
        """Rows of the position table before position 0."""
        return self.config.get("pad_token_id", 1) + 1 if self.family.padded else 0

    def encoder(self, name: str) -> Tensor:
        """A tensor of the encoder, by its name without the prefix."""
        return self.weights[self.family.prefix + name]


def read(folder: Path) -> HuggingFaceModel:
    """Read and check a folder.

    Raises:
        ConversionError: a file is missing or truncated, the model is no BERT or RoBERTa encoder,
            or config, weights and vocabulary contradict each other.
    """
    config = read_json(folder / "config.json")
    family = _family(config, folder)
    _check_config(config, folder)
    weights = _named(read_weights(folder), family)
    model = HuggingFaceModel(family, config, weights, Vocabulary([], []))
    _check_shapes(model, folder)
    model.vocabulary = of_folder(folder, config, model.notes)
    return model


def _family(config: dict[str, Any], folder: Path) -> Family:
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ConversionError(
            f"{folder}/config.json says model_type {kind!r}: only {', '.join(FAMILIES)} are "
            f"converted"
        )
    return FAMILIES[kind]


_NEEDED = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)


def _check_config(config: dict[str, Any], folder: Path) -> None:
    config.setdefault("type_vocab_size", 2 if config["model_type"] == "bert" else 1)
    for key in _NEEDED:
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise ConversionError(
                f"{folder}/config.json has {key} {config.get(key)!r}: a whole number is needed"
            )
    if config["hidden_size"] % config["num_attention_heads"]:
        raise ConversionError(
            f"{folder}/config.json: hidden_size {config['hidden_size']} is no multiple of "
            f"num_attention_heads {config['num_attention_heads']}"
        )
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise ConversionError(f"{folder} is a decoder: only encoders are converted")
    if config.get("pruned_heads"):
        raise ConversionError(f"{folder} has pruned heads, which fairseq's layers cannot express")
    kind = config.get("position_embedding_type") or "absolute"
    for value, known, key in (
        (kind, SCHEMES, "position_embedding_type"),
        (config.get("hidden_act", "gelu"), ACTIVATIONS, "hidden_act"),
    ):
        if value not in known:
            raise ConversionError(
                f"{folder}/config.json: {key} {value!r} is none of {', '.join(known)}"
            )
    if config["model_type"] != "bert" and config.get("hidden_act", "gelu") != "gelu":
        raise ConversionError(
            f"{folder}/config.json: hidden_act {config['hidden_act']!r}: RoBERTa's LM head keeps "
            f"gelu, and fairseq has one activation for layers and head"
        )


def _named(weights: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Names as of today, each with the family's prefix where it belongs to the encoder."""
    result = {}
    for name, value in weights.items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        if name.startswith(("embeddings.", "encoder.", "pooler.")):
            name = family.prefix + name
        result[name] = value
    return result


def _check_shapes(model: HuggingFaceModel, folder: Path) -> None:
    """Every tensor is there, of the config's shape, and none is unknown."""
    config, prefix = model.config, model.family.prefix
    width, length = config["hidden_size"], config["max_position_embeddings"]
    shapes = {
        prefix + "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        prefix + hf_names.TOKEN_TYPES: (config["type_vocab_size"], width),
    }
    if model.kind == "absolute":
        shapes[prefix + hf_names.POSITIONS] = (length, width)
    else:
        head = width // config["num_attention_heads"]
        for layer in range(model.layers):
            shapes[prefix + hf_names.distances(layer)] = (2 * length - 1, head)
    needed = {prefix + name for name in hf_names.encoder_names(model.layers)} | set(shapes)
    missing = sorted(needed - set(model.weights))
    if missing:
        raise ConversionError(
            f"{folder} lacks {len(missing)} tensors of a {model.family.name} of {model.layers} "
            f"layers ({missing[0]}): its config and weights do not belong together"
        )
    for name, shape in shapes.items():
        if tuple(model.weights[name].shape) != shape:
            raise ConversionError(
                f"{folder}: {name} is {tuple(model.weights[name].shape)}, and its config says "
                f"{shape}"
            )
    known = needed | set(hf_names.head_names(model.family))
    for heads in (hf_names.classifier_names(model.family, HEAD), hf_names.span_names(SPAN_HEAD)):
        known |= set(heads)
    known |= {prefix + hf_names.POSITIONS, prefix + "pooler.dense.weight"}
    known |= {prefix + "pooler.dense.bias"}
    known |= {*hf_names.IGNORED, *(prefix + name for name in hf_names.IGNORED)}
    unknown = sorted(set(model.weights) - known)
    if unknown:
        raise ConversionError(
            f"{folder} holds {len(unknown)} tensors that no {model.family.name} has here "
            f"({unknown[0]}): another head or architecture than is converted"
        )


def to_ours(model: HuggingFaceModel) -> tuple[State, dict[str, Any]]:
    """The model under our names, and the values of our config that it needs."""
    weights, family, config = model.weights, model.family, model.config
    state: State = {}
    for theirs, ours in hf_names.encoder_names(model.layers).items():
        state[ours] = model.encoder(theirs)
    key = f"{ENCODER}.embed_tokens.weight"
    state[key] = model.vocabulary.take(state[key])
    untied = _lm_head(model, state)
    _heads(model, state)
    segments, types = _positions(model, state), model.encoder(hf_names.TOKEN_TYPES)
    values = {
        "position_scheme": SCHEMES[model.kind],
        "segment_encoding": segments,
        "encoder_layers": model.layers,
        "encoder_embed_dim": config["hidden_size"],
        "encoder_ffn_embed_dim": config["intermediate_size"],
        "encoder_attention_heads": config["num_attention_heads"],
        "activation_fn": ACTIVATIONS[config.get("hidden_act", "gelu")],
        "layer_norm_eps": config.get("layer_norm_eps", 1e-12),
        "dropout": config.get("hidden_dropout_prob", 0.1),
        "attention_dropout": config.get("attention_probs_dropout_prob", 0.1),
        "num_segments": None if segments == "none" else str(max(len(types), 2)),
        "max_positions": model.max_positions,
        "untie_weights_roberta": untied,
    }
    unused = [name for name in weights if "seq_relationship" in name]
    pooled = family.prefix + "pooler.dense.weight" in weights
    if unused:
        model.notes.append("the next-sentence head is left out: nothing here reads it")
    if pooled and f"classification_heads.{HEAD}.dense.weight" not in state:
        model.notes.append("the pooler is left out: no classifier stands on it")
    return state, values


def _lm_head(model: HuggingFaceModel, state: State) -> bool:
    """Take the masked LM's head over; returns whether its projection is its own."""
    names = hf_names.head_names(model.family)
    have = {theirs: ours for theirs, ours in names.items() if theirs in model.weights}
    bias = next(theirs for theirs, ours in names.items() if ours.endswith("lm_head.bias"))
    if bias not in have and bias.replace(".bias", ".decoder.bias") in model.weights:
        model.weights[bias] = model.weights[bias.replace(".bias", ".decoder.bias")]
        have[bias] = names[bias]
    embedding = state[f"{ENCODER}.embed_tokens.weight"]
    output = "encoder.lm_head.weight"
    if bias not in have:
        model.notes.append("no masked LM head: one is added, untrained (identity, no bias)")
        _fresh_head(state, embedding)
        return False
    for theirs, ours in have.items():
        value = model.weights[theirs]
        by_row = ours in (output, "encoder.lm_head.bias")
        state[ours] = model.vocabulary.take(value) if by_row else value
    state.setdefault(output, embedding)
    return not torch.equal(state[output], embedding)


def _fresh_head(state: State, embedding: Tensor) -> None:
    width = embedding.size(1)
    state["encoder.lm_head.dense.weight"] = torch.eye(width, dtype=embedding.dtype)
    state["encoder.lm_head.layer_norm.weight"] = embedding.new_ones(width)
    for name in ("dense", "layer_norm"):
        state[f"encoder.lm_head.{name}.bias"] = embedding.new_zeros(width)
    state["encoder.lm_head.weight"] = embedding
    state["encoder.lm_head.bias"] = embedding.new_zeros(len(embedding))


def _heads(model: HuggingFaceModel, state: State) -> None:
    """Take a classifier and a span head over, where they are."""
    for names in (hf_names.classifier_names(model.family, HEAD), hf_names.span_names(SPAN_HEAD)):
        own = [theirs for theirs in names if "pooler" not in theirs]
        if not all(theirs in model.weights for theirs in own):
            continue
        lost = [theirs for theirs in names if theirs not in model.weights]
        if lost:
            raise ConversionError(f"the classifier lacks {lost[0]}: its file is incomplete")
        for theirs, ours in names.items():
            state[ours] = model.weights[theirs]


def _positions(model: HuggingFaceModel, state: State) -> str:
    """Write the position tables; returns the segment encoding that the token types are."""
    types, shared = model.encoder(hf_names.TOKEN_TYPES), f"{ENCODER}.positions.shared"
    single, index = len(types) == 1, 0
    if model.kind == "absolute":
        table = model.encoder(hf_names.POSITIONS)[model.offset :]
        if single:
            if types.any():
                model.notes.append("the only token type is added to the position table")
            table = table + types
        state[f"{shared}.0.table"], index = table, 1
    else:
        name = "table" if model.kind == "relative_key_query" else "key_table"
        for layer in range(model.layers):
            table = model.encoder(hf_names.distances(layer)).flip(0)[None]  # i - j to j - i
            state[f"{ENCODER}.layers.{layer}.self_attn.position.0.{name}"] = table
    if single and (model.kind == "absolute" or not types.any()):
        return "none"
    state[f"{shared}.{index}.table"] = types.expand(max(len(types), 2), -1)
    return "input"
