"""Reads a Hugging Face folder of BERT or RoBERTa, and checks that its parts belong together."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from relpos_fairseq.conversion.huggingface import disentangled
from relpos_fairseq.conversion.huggingface import names as hf_names
from relpos_fairseq.conversion.huggingface.files import read_json, read_weights
from relpos_fairseq.conversion.huggingface.names import FAMILIES, Family
from relpos_fairseq.conversion.huggingface.vocabulary import Vocabulary, of_folder
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.schemes import named_elsewhere

SCHEMES = named_elsewhere("transformers")  # its position_embedding_type to our schemes
KINDS = SCHEMES | dict.fromkeys([disentangled.KIND], named_elsewhere("transformers' model_type")[hf_names.DISENTANGLED])
# fairseq's gelu is the exact one, and its gelu_accurate the approximation by tanh.
ACTIVATIONS = {
    "gelu": "gelu",
    "relu": "relu",
    "tanh": "tanh",
    "gelu_new": "gelu_accurate",
    "gelu_pytorch_tanh": "gelu_accurate",
}
HEAD = "sentence_classification_head"  # fairseq's name of the head of sentence_prediction
SPAN_HEAD = "question_answering"  # the default of --span-head-name, so that it is loaded


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
        """Return a tensor of the encoder, by its name without the prefix."""
        return self.weights[self.family.prefix + name]


def read_folder(folder: Path) -> HuggingFaceModel:
    """Read and check a folder.

    Raises:
        ConversionError: a file is missing or truncated, the model is no BERT or RoBERTa encoder,
            or config, weights and vocabulary contradict each other.
    """
    config = read_json(folder / "config.json")
    family, notes, weights = _family(config, folder), [], None
    if family.name.startswith(hf_names.DISENTANGLED):
        weights = _named(read_weights(folder), family)
        notes = disentangled.as_bert(config, weights, family.prefix)
    _check_config(config, folder)
    weights = weights or _named(read_weights(folder), family)
    model = HuggingFaceModel(family, config, weights, Vocabulary([], []), notes)
    _check_shapes(model, folder)
    model.vocabulary = of_folder(folder, config, model.notes)
    return model


def _family(config: dict[str, Any], folder: Path) -> Family:
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise ConversionError(
            f"{folder}/config.json says model_type {kind!r}: only {', '.join(FAMILIES)} are converted"
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
    config.setdefault("type_vocab_size", 1 if FAMILIES[config["model_type"]].padded else 2)
    for key in _NEEDED:
        if not isinstance(config.get(key), int) or config[key] < 1:
            raise ConversionError(f"{folder}/config.json has {key} {config.get(key)!r}: a whole number is needed")
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
        (kind, KINDS if "special_ids" in config else SCHEMES, "position_embedding_type"),
        (config.get("hidden_act", "gelu"), ACTIVATIONS, "hidden_act"),
    ):
        if value not in known:
            raise ConversionError(f"{folder}/config.json: {key} {value!r} is none of {', '.join(known)}")
    if FAMILIES[config["model_type"]].padded and config.get("hidden_act", "gelu") != "gelu":
        raise ConversionError(
            f"{folder}/config.json: hidden_act {config['hidden_act']!r}: RoBERTa's LM head keeps "
            f"gelu, and fairseq has one activation for layers and head"
        )


def _named(weights: dict[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Rename tensors as today's library does, those of the encoder with the family's prefix."""
    result = {}
    for name, value in weights.items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight")
        name = name.replace("LayerNorm.beta", "LayerNorm.bias")
        if name.startswith(("embeddings.", "encoder.", "pooler.")):
            name = family.prefix + name
        result[name] = value
    return result


def _check_shapes(model: HuggingFaceModel, folder: Path) -> None:
    """Check that every tensor is there, of the config's shape, and none unknown."""
    config, prefix = model.config, model.family.prefix
    width, length = config["hidden_size"], config["max_position_embeddings"]
    shapes = {
        prefix + "embeddings.word_embeddings.weight": (config["vocab_size"], width),
        prefix + hf_names.TOKEN_TYPES: (config["type_vocab_size"], width),
    }
    if model.kind == "absolute":
        shapes[prefix + hf_names.POSITIONS] = (length, width)
    elif model.kind == disentangled.KIND:
        shapes |= {prefix + name: shape for name, shape in disentangled.names(config).items()}
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
                f"{folder}: {name} is {tuple(model.weights[name].shape)}, and its config says {shape}"
            )
    known = needed | set(hf_names.head_names(model.family))
    for heads in (hf_names.classifier_names(model.family, HEAD), hf_names.span_names(SPAN_HEAD)):
        known |= set(heads)
    known |= {prefix + hf_names.POSITIONS, prefix + "pooler.dense.weight"}
    known |= {prefix + "pooler.dense.bias"}
    known |= {prefix + name for name in disentangled.unread(config)}
    known |= {*hf_names.IGNORED, *(prefix + name for name in hf_names.IGNORED)}
    unknown = sorted(set(model.weights) - known)
    if unknown:
        raise ConversionError(
            f"{folder} holds {len(unknown)} tensors that no {model.family.name} has here "
            f"({unknown[0]}): another head or architecture than is converted"
        )
