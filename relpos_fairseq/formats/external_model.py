"""Import a translation model of another library as a `relpos_transformer`, exactly.

Rows are put into fairseq's order. fairseq begins a target with </s>: in the decoder's embedding that row becomes that
of the symbol with which the source begins a target. </s> is never another input of a decoder, but it is an output:
embeddings and output projection are therefore three matrices.

The output's bias c has no place in fairseq's projection W. With z the normalised state, whose channels add to 0,
and g, b the last layer norm, which become 1 and 1:

    W' = W diag(g) + (W b + c - W g) 1^T / E,   W' (z + 1) = W (g z + b) + c

A row that the source does not have gets the logit NEVER.

fairseq's layer norms have eps 1e-5. Where layer norms come before blocks, they alone read the residual stream, and
norm_eps(x) = norm_1e-5(x sqrt(1e-5 / eps)): embeddings, positions and what blocks add are multiplied by that factor.

Positions that are added to the input become a table of `learned` positions; the one table of OpenNMT-py's relative
positions serves as both of Shaw's.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion.layouts import State
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.formats.vocabulary import NEVER, Vocabulary, take_rows
from relpos_fairseq.models.building import build_generating
from relpos_fairseq.saved.model import Origin, SavedModel
from relpos_fairseq.schemes import named_elsewhere

ACTIVATIONS = ("relu", "gelu", "gelu_accurate", "swish", "tanh")  # fairseq's names
EPSILON = 1e-5  # of fairseq's layer norms
END = 2
NAME = "relpos_transformer"  # of the model that they become
ABSOLUTE = named_elsewhere("transformers")["absolute"]
RELATIVE = named_elsewhere("OpenNMT-py")["max_relative_positions"]
SIDES = ("encoder", "decoder")


@dataclass(kw_only=True)
class ExternalModel:
    """Hold a translation model of another library, its tensors under fairseq's names.

    Args:
        kind: whose model it is, in words.
        path: the file or folder.
        weights: tensors by fairseq's names, in the source's order of rows; `output.weight` and
            `output.bias` are the projection, `SIDE.positions` (N, E) is added to the input, and
            `SIDE.layers.N.table` (2k + 1, D) are relative positions.
        heads: number of heads of encoder and decoder.
        layers: number of layers of encoder and decoder.
        pre_norm: whether layer norm comes before each block, and after the last layer.
        activation: fairseq's name.
        scaled: whether embeddings are multiplied by the square root of their width.
        eps: epsilon of the layer norms.
        start: id of the symbol that a decoder's input begins with.
        source_ends: whether a source ends in </s>.
        dropout: fairseq's dropout, attention_dropout and activation_dropout.
        source: vocabulary of the encoder.
        target: vocabulary of the decoder.
        languages: source and target language.
        files: files of text to copy, by their names in the result.
        notes: assumptions and omissions that the user should know.
    """

    kind: str
    path: Path
    weights: State
    heads: tuple[int, int]
    layers: tuple[int, int]
    pre_norm: bool
    activation: str
    scaled: bool
    eps: float
    start: int
    source_ends: bool
    dropout: tuple[float, ...]
    source: Vocabulary
    target: Vocabulary
    languages: tuple[str, str] = ("", "")
    files: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def import_weights(
    model: ExternalModel, length: int | None, logits: Callable[[Tensor, Tensor], Tensor], library: str = ""
) -> SavedModel:
    """Return a model of another library as a `relpos_transformer`, with what its own library computes.

    Args:
        model: the model.
        length: positions of the result; None: as many as the source has.
        logits: runs the model in its own library on (B, S) sources and (B, T) beginnings of targets in our rows;
            returns (B, T, V) in the same order, or raises NotComparedError where the library cannot.
        library: the name of that library.

    Raises:
        ConversionError: a layer norm after each block whose eps is not fairseq's, or a missing tensor.
    """
    steps: list[str] = []
    length = length or len(model.weights["encoder.positions"])
    state = dict(model.weights)
    if model.eps != EPSILON:
        if not model.pre_norm:
            raise ConversionError(
                f"{model.path}: layer norms after blocks have eps {model.eps:g}, and fairseq's {EPSILON:g}"
            )
        factor = math.sqrt(EPSILON / model.eps)
        added = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias")
        for name in [name for name in state if name.endswith(("embed_tokens.weight", ".positions", *added))]:
            state[name] = state[name].double() * factor
        steps.append(f"residual streams times {factor:.4g}: layer norms' eps becomes {EPSILON:g}")
    for side, words in zip(SIDES, (model.source, model.target), strict=True):
        table = state[f"{side}.embed_tokens.weight"].float()
        state[f"{side}.embed_tokens.weight"] = words.take(table)
    state["decoder.embed_tokens.weight"][END] = table[model.start]
    steps.append("the decoder's </s> is the source's first symbol of a target")
    _fold_bias(state, model)
    steps.append("the output's bias is folded into its matrix and the last layer norm")
    values = _values(model, length) | _positions(state, length)
    if not model.source_ends:
        values["encoder_skips_end"] = True
        steps.append("the encoder takes </s> for padding, since no source had one")
    rows = (len(model.source.rows), len(model.target.rows))
    state = {name: value.float().contiguous() for name, value in state.items()}
    ours = build_generating(NAME, values, rows).state_dict()
    state |= {name: value for name, value in ours.items() if name.endswith("version")}
    missing = {name: value for name, value in ours.items() if name not in state}
    there = {re.sub(r"\d+", "#", name) for name in state}  # a bias may be absent, of every layer
    lacks = [name for name in missing if not name.endswith(".bias") or re.sub(r"\d+", "#", name) in there]
    if lacks:
        raise ConversionError(f"{model.path} has no tensor for {min(lacks)}: copy it again")
    state |= {name: torch.zeros_like(value) for name, value in missing.items()}
    task = {"_name": "translation"} | dict(zip(("source_lang", "target_lang"), model.languages, strict=True))
    task |= {name: values[name] for name in ("max_source_positions", "max_target_positions")}
    return SavedModel.of(
        model.path,
        NAME,
        values,
        state,
        task,
        kind=model.kind,
        origin=Origin(rows=model.target.rows),
        library=library,
        outputs=lambda *pair: {"logits": logits(*pair)},
        files=dict(model.files),
        texts={
            f"dict.{language}.txt": words.dictionary()
            for language, words in zip(model.languages, (model.source, model.target), strict=True)
        },
        notes=model.notes,
        steps=steps,
        longest=length if "encoder.positions" in model.weights else None,
    )


def _fold_bias(state: State, model: ExternalModel) -> None:
    """Fold the output projection's bias into its weight and the last layer norm, in place."""
    norm = "layer_norm" if model.pre_norm else f"layers.{model.layers[1] - 1}.final_layer_norm"
    gain, shift = (state[f"decoder.{norm}.{part}"].double() for part in ("weight", "bias"))
    matrix = state.pop("output.weight").double()
    bias = state.pop("output.bias", matrix.new_zeros(len(matrix))).double().reshape(len(matrix))
    column = (matrix @ (shift - gain) + bias) / len(gain)
    folded = matrix * gain + column[:, None]
    taken = take_rows(folded, model.target.rows, NEVER / len(gain))
    state["decoder.output_projection.weight"] = taken
    for part in ("weight", "bias"):
        state[f"decoder.{norm}.{part}"] = torch.ones_like(gain)


def _positions(state: State, length: int) -> dict[str, Any]:
    """Rename the position tables, in place; return the values of RelPosTransformerConfig that they need."""
    absolute = "encoder.positions" in state
    tables = [name for name in state if name.endswith(".table")]
    if absolute:
        for side in SIDES:
            table = state.pop(f"{side}.positions")
            if len(table) < length:
                raise ConversionError(f"--positions {length}: the source has {len(table)}")
            state[f"{side}.positions.shared.0.table"] = table[:length]
    clip = 0
    for name in tables:
        table, place = state.pop(name)[None], name.removesuffix(".table")
        clip = table.size(1) // 2
        for kind in ("key", "value"):
            state[f"{place}.self_attn.position.0.{kind}_table"] = table.clone()
    scheme = "+".join([ABSOLUTE] * absolute + [RELATIVE] * bool(tables))
    return {"position_scheme": scheme} | ({"position_clip_distance": str(clip)} if tables else {})


def _values(model: ExternalModel, length: int) -> dict[str, Any]:
    values: dict[str, Any] = {
        "activation_fn": model.activation,
        "no_scale_embedding": not model.scaled,
        "max_source_positions": length,
        "max_target_positions": length,
    }
    values |= zip(("dropout", "attention_dropout", "activation_dropout"), model.dropout, strict=True)
    for number, side in enumerate(SIDES):
        values |= {
            f"{side}_embed_dim": model.weights[f"{side}.embed_tokens.weight"].size(1),
            f"{side}_ffn_embed_dim": len(model.weights[f"{side}.layers.0.fc1.weight"]),
            f"{side}_attention_heads": model.heads[number],
            f"{side}_layers": model.layers[number],
            f"{side}_normalize_before": model.pre_norm,
        }
    return values
