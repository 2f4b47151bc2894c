"""Names of BERT's and RoBERTa's tensors: Hugging Face's beside fairseq's, for both directions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from relpos_fairseq.conversion.layouts import ENCODER
from relpos_fairseq.schemes import named_elsewhere

_LAYER = {
    "attention.self.query": "self_attn.q_proj",
    "attention.self.key": "self_attn.k_proj",
    "attention.self.value": "self_attn.v_proj",
    "attention.output.dense": "self_attn.out_proj",
    "attention.output.LayerNorm": "self_attn_layer_norm",
    "intermediate.dense": "fc1",
    "output.dense": "fc2",
    "output.LayerNorm": "final_layer_norm",
}


@dataclass(frozen=True)
class Family:
    """What tells BERT from RoBERTa in Hugging Face's library.

    Args:
        name: `model_type` of its config.
        prefix: what the encoder's names begin with in a model with a head.
        padded: positions count from the row after padding's, as fairseq's do.
        lm_head: Hugging Face's names of fairseq's `encoder.lm_head.*`.
        classes: classes of a masked LM, a classifier and a span head.
    """

    name: str
    prefix: str
    padded: bool
    lm_head: dict[str, str]
    classes: tuple[str, str, str]


def _classes(stem: str) -> tuple[str, str, str]:
    kinds = ("MaskedLM", "SequenceClassification", "QuestionAnswering")
    return tuple(f"{stem}For{kind}" for kind in kinds)


_ROBERTA_HEAD = {
    "lm_head.dense": "dense",
    "lm_head.layer_norm": "layer_norm",
    "lm_head.decoder.weight": "weight",
    "lm_head.bias": "bias",
}
FAMILIES = {
    "bert": Family(
        "bert",
        "bert.",
        False,
        {
            "cls.predictions.transform.dense": "dense",
            "cls.predictions.transform.LayerNorm": "layer_norm",
            "cls.predictions.decoder.weight": "weight",
            "cls.predictions.bias": "bias",
        },
        _classes("Bert"),
    ),
    "roberta": Family("roberta", "roberta.", True, _ROBERTA_HEAD, _classes("Roberta")),
    "xlm-roberta": Family("xlm-roberta", "roberta.", True, _ROBERTA_HEAD, _classes("XLMRoberta")),
}
# DeBERTa, whose heads are BERT's (`disentangled`); v2 and v3 have names of their own.
(DISENTANGLED,) = named_elsewhere("transformers' model_type")
for _name in (DISENTANGLED, f"{DISENTANGLED}-v2"):
    FAMILIES[_name] = replace(FAMILIES["bert"], name=_name, prefix=f"{DISENTANGLED}.")
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
POSITIONS = "embeddings.position_embeddings.weight"
# Biases that repeat another tensor, buffers, and BERT's next-sentence head, which nothing reads.
IGNORED = (
    "embeddings.position_ids",
    "embeddings.token_type_ids",
    "cls.predictions.decoder.bias",
    "lm_head.decoder.bias",
    "cls.seq_relationship.weight",
    "cls.seq_relationship.bias",
)


def distances(layer: int) -> str:
    """Return Hugging Face's table over distances of a layer, without the family's prefix."""
    return f"encoder.layer.{layer}.attention.self.distance_embedding.weight"


def encoder_names(layers: int) -> dict[str, str]:
    """Return Hugging Face's names of the encoder, without the prefix, beside fairseq's."""
    modules = {"embeddings.LayerNorm": f"{ENCODER}.layernorm_embedding"}
    for layer in range(layers):
        for theirs, ours in _LAYER.items():
            modules[f"encoder.layer.{layer}.{theirs}"] = f"{ENCODER}.layers.{layer}.{ours}"
    words = {"embeddings.word_embeddings.weight": f"{ENCODER}.embed_tokens.weight"}
    return words | _parameters(modules)


def head_names(family: Family) -> dict[str, str]:
    """Return Hugging Face's names of the masked LM's head beside fairseq's."""
    return _parameters({name: f"encoder.lm_head.{ours}" for name, ours in family.lm_head.items()})


def classifier_names(family: Family, head: str) -> dict[str, str]:
    """Hugging Face's names of a classifier beside fairseq's: a dense layer, tanh, a projection.

    BERT's dense layer is its pooler.
    """
    dense, out = ("classifier.dense", "classifier.out_proj")
    if not family.padded:
        dense, out = (f"{family.prefix}pooler.dense", "classifier")
    ours = f"classification_heads.{head}"
    return _parameters({dense: f"{ours}.dense", out: f"{ours}.out_proj"})


def span_names(head: str) -> dict[str, str]:
    """Return Hugging Face's names of a span head beside ours."""
    return _parameters({"qa_outputs": f"span_heads.{head}.out_proj"})


def _parameters(modules: dict[str, str]) -> dict[str, str]:
    """Return the names of modules' weights and biases; what is a parameter already stays."""
    found = {}
    for theirs, ours in modules.items():
        alone = theirs.endswith((".weight", ".bias"))
        ends = ("",) if alone else (".weight", ".bias")
        found |= {theirs + end: ours + end for end in ends}
    return found
