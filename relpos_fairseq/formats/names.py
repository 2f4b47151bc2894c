"""Names of tensors in other libraries and here: one table a library, read in both directions.

`#` stands for a number, `*` for weight or bias, `**` for anything, on both sides in the same order. Where several of a
library's names become one of ours, the first row is the one that is written. `positions`, `token_types` and `distances`
are no tensors of a model here: its schemes' tables are made of them, and they of its tables.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Mapping

from relpos_fairseq.conversion.layouts import ENCODER
from relpos_fairseq.heads import CLASSIFIER, SPANS, TOKENS

_STANDS = {"#": r"(\d+)", "*": "(weight|bias)", "**": "(.+)"}


@functools.cache
def pattern(template: str) -> re.Pattern[str]:
    """Return the regular expression of a name with `#`, `*` or `**` in it."""
    return re.compile("".join(_STANDS.get(part) or re.escape(part) for part in re.split(r"(#|\*\*?)", template)))


class Names:
    """A library's names of tensors and ours.

    Args:
        rows: our name, by the library's.
    """

    def __init__(self, rows: Mapping[str, str]) -> None:
        self.rows = dict(rows)
        self._ours = [(pattern(theirs), _groups(ours)) for theirs, ours in rows.items()]
        self._theirs = [(pattern(ours), _groups(theirs)) for theirs, ours in rows.items()]

    def ours(self, theirs: str) -> str | None:
        """Return our name of a tensor; None: it has none."""
        return _renamed(theirs, self._ours)

    def theirs(self, ours: str) -> str | None:
        """Return the library's name of a tensor of ours; None: it has none."""
        return _renamed(ours, self._theirs)

    def every(self, layers: int) -> Iterable[str]:
        """Return our names of all tensors of so many layers."""
        for ours in self.rows.values():
            numbered = (ours.replace("#", str(layer)) for layer in range(layers)) if "#" in ours else (ours,)
            for name in numbered:
                yield from (name.replace("*", part) for part in ("weight", "bias")) if "*" in name else (name,)


def _groups(template: str) -> str:
    """Return a name with references to the groups of the other name's pattern."""
    numbers = itertools.count(1)
    return re.sub("[#*]", lambda _: rf"\g<{next(numbers)}>", template)


def _renamed(name: str, rows: Iterable[tuple[re.Pattern[str], str]]) -> str | None:
    return next((match.expand(other) for found, other in rows if (match := found.fullmatch(name))), None)


# BERT, RoBERTa, XLM-R, DeBERTa of transformers; names without the prefix of a model with a head.

_THEIRS, _OURS = "encoder.layer.#", f"{ENCODER}.layers.#"
_LAYER = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj", "self_attn_layer_norm")
_LAYER += ("fc1", "fc2", "final_layer_norm")
_LM = ("dense.*", "layer_norm.*", "bias", "weight")
_SPANS = {"qa_outputs.*": f"{SPANS.prefix}out_proj.*"}


def _encoder(layer: str, parts: str) -> dict[str, str]:
    """Return the names of embeddings and layers; `parts` of a layer, in the order of ours (`_LAYER`)."""
    return {
        "embeddings.word_embeddings.weight": f"{ENCODER}.embed_tokens.weight",
        "embeddings.LayerNorm.*": f"{ENCODER}.layernorm_embedding.*",
        **{f"{layer}.{theirs}.*": f"{_OURS}.{ours}.*" for theirs, ours in zip(parts.split(), _LAYER, strict=True)},
    }


def _lm(stem: str, *parts: str) -> dict[str, str]:
    """Return the names of a masked LM's head; `parts` in the order of ours (`_LM`), of which the last may be absent."""
    return {stem + theirs: f"encoder.lm_head.{ours}" for theirs, ours in zip(parts, _LM, strict=False)}


_BERTS = _SPANS | _encoder(  # of any BERT
    _THEIRS,
    "attention.self.query attention.self.key attention.self.value attention.output.dense attention.output.LayerNorm "
    "intermediate.dense output.dense output.LayerNorm",
)
BERT = _BERTS | _lm("cls.predictions.", "transform.dense.*", "transform.LayerNorm.*", "bias", "decoder.weight")
ROBERTA = _BERTS | _lm("lm_head.", "dense.*", "layer_norm.*", "bias", "decoder.weight")
TABLES = {  # of positions and token types
    "embeddings.position_embeddings.weight": "positions",
    "embeddings.token_type_embeddings.weight": "token_types",
    f"{_THEIRS}.attention.self.distance_embedding.weight": "distances.#",
}
# v2 and v3, and where v1 differs; v1 keeps queries, keys and values of a head side by side (`hf_deberta.parts`).
_ATTENTION, _POSITION = f"{_THEIRS}.attention.self", f"{_OURS}.self_attn.position.0"
DEBERTA = {f"{_ATTENTION}.{one}_proj.*": f"{_OURS}.self_attn.{one[0]}_proj.*" for one in ("query", "key", "value")}
DEBERTA = BERT | DEBERTA | {f"{_ATTENTION}.{one}_bias": f"{_OURS}.self_attn.{one}_proj.bias" for one in "qv"}
DEBERTA_TABLES = TABLES | {
    f"{_ATTENTION}.pos_key_proj.weight": f"{_POSITION}.query_projection",
    f"{_ATTENTION}.pos_proj.weight": f"{_POSITION}.query_projection",
    f"{_ATTENTION}.pos_query_proj.weight": f"{_POSITION}.key_projection",
    f"{_ATTENTION}.pos_q_proj.weight": f"{_POSITION}.key_projection",
    f"{_ATTENTION}.pos_query_proj.bias": f"{_POSITION}.key_bias",
    f"{_ATTENTION}.pos_q_proj.bias": f"{_POSITION}.key_bias",
    "encoder.rel_embeddings.weight": "distances",
    "encoder.LayerNorm.*": "distances.norm.*",
}
# DeBERTa's own masked LM, which the library reads where config.json says `legacy: false`.
DEBERTA_LM = _lm("lm_predictions.lm_head.", "dense.*", "LayerNorm.*", "bias")
# DistilBERT, whose classifier has a dense layer of its own.
DISTILBERT = _SPANS | _lm("vocab_", "transform.*", "layer_norm.*", "projector.bias", "projector.weight")
DISTILBERT |= _encoder(
    "transformer.layer.#",
    "attention.q_lin attention.k_lin attention.v_lin attention.out_lin sa_layer_norm ffn.lin1 ffn.lin2 "
    "output_layer_norm",
)
PRE_CLASSIFIER = {"pre_classifier.*": f"{CLASSIFIER.prefix}dense.*", "classifier.*": f"{CLASSIFIER.prefix}out_proj.*"}
# A classifier of the pooler (BERT's, and everyone's of multiple choices), and one with a dense layer of its own.
POOLED = {"pooler.dense.*": f"{CLASSIFIER.prefix}dense.*", "classifier.*": f"{CLASSIFIER.prefix}out_proj.*"}
DENSE = {"classifier.dense.*": f"{CLASSIFIER.prefix}dense.*", "classifier.out_proj.*": f"{CLASSIFIER.prefix}out_proj.*"}
TOKEN_CLASSIFIER = {"classifier.*": f"{TOKENS.prefix}out_proj.*"}
# Copies of a tensor under a second name.
COPIES = dict.fromkeys(("cls.predictions.decoder.bias", "lm_head.decoder.bias"), "encoder.lm_head.bias")
POSITIONS = "embeddings.position_embeddings.weight"
POOLER, NEXT_SENTENCE = "pooler.dense.*", "cls.seq_relationship.*"
KEPT = (POOLER, NEXT_SENTENCE)  # what no model here reads, and a conversion keeps for the way back
# What says nothing, and why.
NEUTRAL = {
    "embeddings.position_ids": "a buffer of 0, 1, 2, ...",
    "embeddings.token_type_ids": "a buffer of zeros",
    f"{_ATTENTION}.pos_key_proj.bias": "adds the same to all logits of a query",
}
PRE_TRAINING = ("lm_predictions.**", "mask_predictions.**")  # DeBERTa's own, as far as the library does not read them


# OpenNMT-py 3; `table` of a layer is that of its relative positions.


def _opennmt(side: str, stack: str) -> dict[str, str]:
    theirs, ours = f"{side}.{stack}.#", f"{side}.layers.#"
    parts = {
        "layer_norm": "self_attn_layer_norm",
        "layer_norm_1": "self_attn_layer_norm",
        "layer_norm_2": "encoder_attn_layer_norm",
        "feed_forward.layer_norm": "final_layer_norm",
        "feed_forward.w_1": "fc1",
        "feed_forward.w_2": "fc2",
    }
    for own, name in (("self_attn", "self_attn"), ("context_attn", "encoder_attn")):
        linear = {"linear_query": "q_proj", "linear_keys": "k_proj", "linear_values": "v_proj"}
        parts |= {f"{own}.{one}": f"{name}.{other}" for one, other in linear.items()}
        parts[f"{own}.final_linear"] = f"{name}.out_proj"
    return {f"{theirs}.{one}.*": f"{ours}.{other}.*" for one, other in parts.items()} | {
        f"{theirs}.self_attn.relative_positions_embeddings.weight": f"{ours}.table",
        f"{side}.embeddings.make_embedding.emb_luts.0.weight": f"{side}.embed_tokens.weight",
        f"{side}.layer_norm.*": f"{side}.layer_norm.*",
    }


OPENNMT = Names(
    _opennmt("encoder", "transformer")
    | _opennmt("decoder", "transformer_layers")
    | {"generator.*": "output.*", "generator.0.*": "output.*"}
)


# The layers of the original Transformer-XL; queries, keys and values are one matrix there.
TRANSFORMER_XL = Names(
    {
        "layers.#.dec_attn.o_net.weight": "decoder.layers.#.self_attn.out_proj.weight",
        "layers.#.dec_attn.layer_norm.*": "decoder.layers.#.self_attn_layer_norm.*",
        "layers.#.pos_ff.CoreNet.0.*": "decoder.layers.#.fc1.*",
        "layers.#.pos_ff.CoreNet.3.*": "decoder.layers.#.fc2.*",
        "layers.#.pos_ff.layer_norm.*": "decoder.layers.#.final_layer_norm.*",
    }
)


def matching(name: str, templates: Iterable[str]) -> str | None:
    """Return the first of some templates that a name fits; None: there is none."""
    return next((template for template in templates if pattern(template).fullmatch(name)), None)
