"""Marian's models as transformers has them (`MarianMTModel`), from a folder.

Their tensors have fairseq's names.  Layer norm comes after each block; positions are sinusoids,
sines before cosines: the wave of channel j is p / 10000^(2j / E).  A target begins with padding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion.external_model import ACTIVATIONS, Architecture, ExternalModel, words_of
from relpos_fairseq.conversion.layouts import State
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.conversion.weight_files import read_json, read_weights

MARIAN = "marian"  # model_type
THEIRS = {"silu": "swish", "gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate"}
SPECIAL = {"<s>": "<s>", "<pad>": "<pad>", "</s>": "</s>", "<unk>": "<unk>"}
PIECES = ("source.spm", "target.spm")


def read(folder: Path, config: dict[str, Any], length: int | None) -> ExternalModel:
    """Read a folder of save_pretrained, with `length` positions; None: those of the config.

    Raises:
        ConversionError: a file is missing, or what fairseq's layers cannot express.
    """
    activation = config.get("activation_function", "gelu")
    activation = THEIRS.get(activation, activation)
    if activation not in ACTIVATIONS:
        raise ConversionError(
            f"{folder}/config.json: activation_function {activation!r} is none of {', '.join(ACTIVATIONS)}"
        )
    weights = _named(read_weights(folder), config, folder)
    width = weights["encoder.embed_tokens.weight"].size(1)
    for side in ("encoder", "decoder"):
        reach = length or config.get("max_position_embeddings", 1024)
        weights[f"{side}.positions"] = sinusoids(reach, width)
    form = Architecture(
        heads=tuple(config[f"{side}_attention_heads"] for side in ("encoder", "decoder")),
        layers=tuple(config[f"{side}_layers"] for side in ("encoder", "decoder")),
        pre_norm=False,
        activation=activation,
        scale=width**0.5 if config.get("scale_embedding") else 1.0,
        eps=1e-5,
        start=config["decoder_start_token_id"],
        pad=config["pad_token_id"],
        source_ends=True,
        dropout=tuple(config.get(name, 0.0) for name in ("dropout", "attention_dropout", "activation_dropout")),
    )
    vocabularies = ["vocab.json"] * 2
    if (folder / "target_vocab.json").is_file():
        vocabularies[1] = "target_vocab.json"
    source, target = (
        words_of(_symbols(folder / name, len(weights[table])), SPECIAL, str(folder / name))
        for name, table in zip(vocabularies, ("encoder.embed_tokens.weight", "output.weight"), strict=True)
    )
    model = ExternalModel("Marian of transformers", folder, weights, form, source, target, ("", ""))
    _add_text(model)
    return model


def sinusoids(count: int, width: int) -> Tensor:
    """(count, width) sines, then cosines."""
    wave = torch.arange((width + 1) // 2, dtype=torch.float64) * 2 / width
    angle = torch.arange(count, dtype=torch.float64)[:, None] / 10000**wave
    return torch.cat([angle.sin(), angle.cos()[:, : width // 2]], dim=1).float()


def _named(weights: State, config: dict[str, Any], folder: Path) -> State:
    """Rename tensors; those that are shared are saved once."""
    weights = {name.removeprefix("model."): value for name, value in weights.items()}
    shared = next(
        (weights[n] for n in ("shared.weight", "lm_head.weight", "decoder.embed_tokens.weight") if n in weights), None
    )
    if shared is None:
        raise ConversionError(f"{folder} has no embedding: copy the whole folder again")
    own = config.get("share_encoder_decoder_embeddings", True)
    for side in ("encoder", "decoder"):
        if own:
            weights.setdefault(f"{side}.embed_tokens.weight", shared)
        elif f"{side}.embed_tokens.weight" not in weights:
            raise ConversionError(f"{folder} has no {side}.embed_tokens.weight")
    output = weights.pop("lm_head.weight", weights["decoder.embed_tokens.weight"])
    weights["output.weight"] = output
    weights["output.bias"] = weights.pop("final_logits_bias", torch.zeros(len(output)))
    left = ("shared.weight", "encoder.embed_positions.weight", "decoder.embed_positions.weight")
    return {name: value for name, value in weights.items() if name not in left}


def _symbols(path: Path, rows: int) -> list[str]:
    """The symbols of a vocabulary by number; rows without one get names of fairseq's."""
    numbers = read_json(path)
    symbols = [f"madeupword{number:04d}" for number in range(rows)]
    for symbol, number in numbers.items():
        if not isinstance(number, int) or not 0 <= number < rows:
            raise ConversionError(f"{path}: {symbol!r} has number {number}, the model {rows} rows")
        symbols[number] = symbol
    return symbols


def _add_text(model: ExternalModel) -> None:
    path = model.path / "tokenizer_config.json"
    facts = read_json(path) if path.is_file() else {}
    found = tuple(str(facts.get(f"{side}_lang") or side) for side in ("source", "target"))
    model.languages = found if found[0] != found[1] else ("source", "target")
    missing = [name for name in PIECES if not (model.path / name).is_file()]
    if missing:
        model.notes.append(f"no {' and '.join(missing)}: text is pieces joined by spaces")
        return
    for language, name in zip(model.languages, PIECES, strict=True):
        model.files[f"sentencepiece.{language}.model"] = model.path / name
