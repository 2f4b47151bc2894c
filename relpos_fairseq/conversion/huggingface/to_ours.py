"""BERT and RoBERTa of Hugging Face's library as models of ours.

    absolute              learned (RoBERTa's table begins after its padding row)
    relative_key          shaw_keys, a_r = E_{-r}: transformers reads its table over i - j
    relative_key_query    m4, the same table in both terms
    token types           --segment-encoding input; a single type, the same for every token, joins
                          the position table (or stays a segment where positions are relative)
    layer_norm_eps        --layer-norm-eps
    DeBERTa               `disentangled`

transformers 4 (tested: 4.44.2 and 4.46.3) has the relative kinds, 5 no more.  Rows of the
embedding are put in fairseq's order (`vocabulary`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion.huggingface import disentangled
from relpos_fairseq.conversion.huggingface import names as hf_names
from relpos_fairseq.conversion.huggingface.folder import ACTIVATIONS, HEAD, KINDS, SPAN_HEAD, HuggingFaceModel
from relpos_fairseq.conversion.layouts import ENCODER, State
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.schemes import scheme_class


def to_ours(model: HuggingFaceModel) -> tuple[State, dict[str, Any]]:
    """Return the model under our names, and the values of our config that it needs."""
    weights, family, config = model.weights, model.family, model.config
    state: State = {}
    for theirs, ours in hf_names.encoder_names(model.layers).items():
        state[ours] = model.encoder(theirs)
    key = f"{ENCODER}.embed_tokens.weight"
    state[key] = model.vocabulary.take(state[key])
    untied = _lm_head(model, state)
    _heads(model, state)
    types, more = model.encoder(hf_names.TOKEN_TYPES), {}
    if model.kind == disentangled.KIND:
        more = disentangled.positions(model, state, KINDS[model.kind], KINDS["absolute"])
    segments = _positions(model, state)
    values = {
        "position_scheme": KINDS[model.kind],
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
    } | more
    unused = [name for name in weights if "seq_relationship" in name]
    pooled = family.prefix + "pooler.dense.weight" in weights
    if unused:
        model.notes.append("the next-sentence head is left out: nothing here reads it")
    if pooled and f"classification_heads.{HEAD}.dense.weight" not in state:
        model.notes.append("the pooler is left out: no classifier stands on it")
    return state, values


def task_of(model: HuggingFaceModel) -> dict[str, Any]:
    """Return options of the task that gives the model's head the input that it was trained on.

    RoBERTa's pairs are `<s> A </s> </s> B </s>`, BERT's `<s> A </s> B </s>`: fairseq's
    sentence_prediction writes the first with a separator token and the second without one.
    """
    if classes_of(model) == 0:
        return {}
    bert = not model.family.padded
    if bert:
        model.notes.append(
            "pairs have BERT's one </s> between them: sentence_prediction without "
            "--separator-token; with --separator-token 2, RoBERTa's two, inputs would differ"
        )
    return {
        "_name": "sentence_prediction",
        "init_token": 0,
        "separator_token": None if bert else 2,
        "classification_head_name": HEAD,
        "regression_target": classes_of(model) == 1 or model.config.get("problem_type") == "regression",
    }


def labels_of(config: dict[str, Any], classes: int) -> list[str]:
    """Return names of so many classes, where config.json gives every one its own."""
    named = config.get("id2label")
    named = named if isinstance(named, dict) else {}
    labels = [str(named.get(str(number), "")).strip() for number in range(classes)]
    own = all(labels) and len(set(labels)) == len(labels)
    return labels if own and not any(name.startswith("LABEL_") for name in labels) else []


def classes_of(model: HuggingFaceModel) -> int:
    """Return outputs of the classifier; 0: there is none."""
    names = hf_names.classifier_names(model.family, HEAD)
    key = next(theirs for theirs, ours in names.items() if ours.endswith("out_proj.weight"))
    return len(model.weights.get(key, ()))


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
    elif model.kind == disentangled.KIND:
        index = int(f"{shared}.0.table" in state)
    else:
        (name,) = scheme_class(KINDS[model.kind]).tables
        for layer in range(model.layers):
            table = model.encoder(hf_names.distances(layer)).flip(0)[None]  # i - j to j - i
            state[f"{ENCODER}.layers.{layer}.self_attn.position.0.{name}"] = table
    if single and (model.kind == "absolute" or not types.any()):
        return "none"
    state[f"{shared}.{index}.table"] = types.expand(max(len(types), 2), -1)
    return "input"
