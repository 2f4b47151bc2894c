"""One of ours as a Hugging Face folder, where BERT's or RoBERTa's architecture can say it.

    learned        absolute             (any other scheme whose tables are neutral beside it)
    shaw_keys      relative_key         E_{i-j} = a_{-(i-j)}, as far as max_position_embeddings
    m4             relative_key_query   the same

Heads must share a table, which `convert` sees to: it refuses what is lost.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.config import OPTIONS
from relpos_fairseq.conversion import huggingface_import as hf_names
from relpos_fairseq.conversion.algebra import convert
from relpos_fairseq.conversion.huggingface_import import ACTIVATIONS, FAMILIES, SCHEMES, Family
from relpos_fairseq.conversion.layouts import ENCODER, State
from relpos_fairseq.conversion.report import ConversionError, ConversionReport, NotExactError
from relpos_fairseq.conversion.source import SourceModel, plan_of
from relpos_fairseq.conversion.vocabulary import Vocabulary
from relpos_fairseq.conversion.weight_files import import_safetensors
from relpos_fairseq.options import CLIP_DISTANCE, SHARE
from relpos_fairseq.scheme import PositionScheme
from relpos_fairseq.schemes import scheme_class
from relpos_fairseq.text import MASK, SPECIAL


def to_hf(
    source: SourceModel, family_name: str, vocabulary: Vocabulary, head: str | None
) -> tuple[dict[str, Any], dict[str, Tensor], ConversionReport]:
    """Say a model of ours in Hugging Face's words: config.json, the tensors, and what was done.

    Args:
        source: the model.
        family_name: `bert` or `roberta`.
        vocabulary: the order of rows that the folder shall have.
        head: the classification or span head that goes with it; None: the masked LM's.

    Raises:
        ConversionError: the architecture cannot express the model.
    """
    family = FAMILIES[family_name]
    _check(source, family)
    scheme, state, report = _expressible(source)
    values = source.values
    weights: dict[str, Tensor] = {}
    names = hf_names.encoder_names(values["encoder_layers"])
    for theirs, ours in names.items():
        weights[family.prefix + theirs] = state.pop(ours)
    key = family.prefix + "embeddings.word_embeddings.weight"
    weights[key] = vocabulary.put(weights[key])
    offset = vocabulary.rows[1] + 1 if family.padded else 0  # RoBERTa counts from padding's row on
    length = _positions(scheme, state, values, family, weights, offset)
    architecture = _take_head(state, family, vocabulary, head, weights, report)
    config = _config(source, family, vocabulary) | {
        "architectures": [architecture],
        "position_embedding_type": scheme.elsewhere["transformers"],
        "max_position_embeddings": length,
        "type_vocab_size": len(weights[family.prefix + hf_names.TOKEN_TYPES]),
    }
    if architecture == family.classes[1]:
        out = "classifier" if family.name == "bert" else "classifier.out_proj"
        labels = [f"LABEL_{number}" for number in range(len(weights[f"{out}.weight"]))]
        config["id2label"] = {str(number): label for number, label in enumerate(labels)}
        config["label2id"] = {label: number for number, label in enumerate(labels)}
    return config, weights, report


def _check(source: SourceModel, family: Family) -> None:
    values = source.values
    theirs = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    refusals = (
        (values.get("encoder_normalize_before"), "layer norms before each block"),
        (values.get("no_layernorm_embedding"), "no layer norm of the embeddings"),
        (values["activation_fn"] not in theirs, f"activation {values['activation_fn']}"),
        (
            family.name != "bert" and values["activation_fn"] != "gelu",
            f"activation {values['activation_fn']} in RoBERTa's LM head (--to hf-bert can)",
        ),
        (values.get("segment_encoding") == "head", "segments a head"),
    )
    for refused, what in refusals:
        if refused:
            raise ConversionError(f"Hugging Face's {family.name} cannot express {what}")


def _expressible(source: SourceModel) -> tuple[type[PositionScheme], State, ConversionReport]:
    """Find the first scheme of Hugging Face's that says all that the source does."""
    reasons, theirs = [], {CLIP_DISTANCE: "0", SHARE: "heads"}
    for scheme in map(scheme_class, SCHEMES.values()):
        values = source.values | {
            option.field: theirs.get(option) if option in scheme.takes else None for option in OPTIONS
        }
        values["position_scheme"] = scheme.name
        target = plan_of(values)
        try:
            done = convert(source.state, source.plan, target)
        except NotExactError as error:
            reasons.append(str(error).split(". Convert")[0])
            continue
        return scheme, dict(done.state), done.report
    kinds = ", ".join(f"{kind} ({name})" for kind, name in SCHEMES.items())
    raise ConversionError(f"Hugging Face's BERT and RoBERTa have {kinds} alone: {'; '.join(reasons)}")


def _positions(
    scheme: type[PositionScheme],
    state: State,
    values: dict[str, Any],
    family: Family,
    weights: dict[str, Tensor],
    offset: int,
) -> int:
    """Write position tables and token types; returns max_position_embeddings."""
    prefix, layers = family.prefix, values["encoder_layers"]
    embedding = weights[f"{prefix}embeddings.word_embeddings.weight"]
    shared = f"{ENCODER}.positions.shared"
    length = int(values["max_positions"])
    (name,) = scheme.tables
    if scheme.has_position_table():
        table = state.pop(f"{shared}.0.{name}")
        length += offset
        rows = torch.cat([table.new_zeros(offset, table.size(1)), table])
        weights[prefix + hf_names.POSITIONS] = rows
    else:
        for layer in range(layers):
            table = state.pop(f"{ENCODER}.layers.{layer}.self_attn.position.0.{name}")
            weights[prefix + hf_names.distances(layer)] = table[0].flip(0).contiguous()
        weights[prefix + hf_names.POSITIONS] = embedding.new_zeros(length, embedding.size(1))
    types = state.pop(f"{shared}.{int(scheme.has_position_table())}.table", None)
    if types is None:
        types = embedding.new_zeros(2 if family.name == "bert" else 1, embedding.size(1))
    elif family.name != "bert" and bool((types == types[:1]).all()):
        types = types[:1].clone()
    weights[prefix + hf_names.TOKEN_TYPES] = types
    return length


def _take_head(
    state: State,
    family: Family,
    vocabulary: Vocabulary,
    head: str | None,
    weights: dict[str, Tensor],
    report: ConversionReport,
) -> str:
    """Write one head; returns the class that has it."""
    heads = sorted({key.split(".")[1] for key in state if key.split(".")[0].endswith("_heads")})
    if head is None:
        for theirs, ours in hf_names.head_names(family).items():
            value = state[ours]
            by_row = ours in ("encoder.lm_head.weight", "encoder.lm_head.bias")
            weights[theirs] = vocabulary.put(value) if by_row else value
        for left in heads:
            report.step(f"head {left} left out (--head {left} exports it)")
        return family.classes[0]
    if head not in heads:
        raise ConversionError(f"--head {head}: the model has {', '.join(heads) or 'no head but the masked LM'}")
    report.step("the masked LM head is left out")
    spans = hf_names.span_names(head)
    names = spans if f"span_heads.{head}.out_proj.weight" in state else None
    if names is None:
        names = hf_names.classifier_names(family, head)
    for theirs, ours in names.items():
        weights[theirs] = state[ours]
    return family.classes[2 if names is spans else 1]


def _config(source: SourceModel, family: Family, vocabulary: Vocabulary) -> dict[str, Any]:
    values = source.values
    theirs = {ours: name for name, ours in reversed(ACTIVATIONS.items())}
    rows = dict(zip((*SPECIAL, MASK), (*vocabulary.rows[:4], vocabulary.rows[-1]), strict=True))
    return {
        "model_type": family.name,
        "vocab_size": max(vocabulary.rows) + 1,
        "hidden_size": values["encoder_embed_dim"],
        "num_hidden_layers": values["encoder_layers"],
        "num_attention_heads": values["encoder_attention_heads"],
        "intermediate_size": values["encoder_ffn_embed_dim"],
        "hidden_act": theirs[values["activation_fn"]],
        "hidden_dropout_prob": values.get("dropout", 0.1),
        "attention_probs_dropout_prob": values.get("attention_dropout", 0.1),
        "layer_norm_eps": values["layer_norm_eps"],
        "pad_token_id": rows["<pad>"],
        "bos_token_id": rows["<s>"],
        "eos_token_id": rows["</s>"],
        "tie_word_embeddings": not values.get("untie_weights_roberta"),
    }


def save_hf(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    tensors = {name: value.detach().clone().contiguous() for name, value in weights.items()}
    if config["tie_word_embeddings"]:
        for name in ("cls.predictions.decoder.weight", "lm_head.decoder.weight"):
            tensors.pop(name, None)
    for name in ("cls.predictions.bias", "lm_head.bias"):
        if name in tensors:  # transformers reads either name, by release
            tensors[name.replace("bias", "decoder.bias")] = tensors[name].clone()
    import_safetensors().save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True) + "\n"
    (folder / "config.json").write_text(text, encoding="utf-8")
