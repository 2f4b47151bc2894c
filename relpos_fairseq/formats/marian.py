"""Read a folder of transformers' `MarianMTModel` as a translation model of relpos.

Its tensors have fairseq's names. Layer norm comes after each block; positions are sinusoids, sines before cosines:
the angle of channel j at position p is p / 10000^(2j / E). A target begins with padding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from relpos_fairseq.conversion.layouts import State
from relpos_fairseq.conversion.report import PADDING, SHORTEST, ConversionError
from relpos_fairseq.core.relations import sinusoid_of_distance
from relpos_fairseq.formats.external_model import ACTIVATIONS, EPSILON, SIDES, ExternalModel, import_weights
from relpos_fairseq.formats.in_transformers import load_in_transformers, transformers_release
from relpos_fairseq.formats.transformers_folder import AS_TIED, ledger_of, read_weights
from relpos_fairseq.formats.vocabulary import order_words
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.saved.ledger import LOST, NEUTRAL, USED, Ledger, Recorded
from relpos_fairseq.saved.model import SavedModel
from relpos_fairseq.text.tokenizer import load_sentencepiece

MARIAN = "marian"  # model_type
THEIRS = {"silu": "swish", "gelu_new": "gelu_accurate", "gelu_pytorch_tanh": "gelu_accurate"}
SPECIAL = {"<s>": "<s>", "<pad>": "<pad>", "</s>": "</s>", "<unk>": "<unk>"}
PIECES = ("source.spm", "target.spm")


def read_marian(folder: Path, config: Recorded, max_positions: int | None) -> SavedModel:
    """Read a folder of save_pretrained, with so many positions; None: those of the config.

    Raises:
        ConversionError: a file is missing, or what fairseq's layers cannot express.
    """
    activation = config.get("activation_function", "gelu")
    activation = THEIRS.get(activation, activation)
    if activation not in ACTIVATIONS:
        raise ConversionError(
            f"{folder}/config.json: activation_function {activation!r} is none of {', '.join(ACTIVATIONS)}"
        )
    read = read_weights(folder)
    weights = _named(read, config, folder)
    width = weights["encoder.embed_tokens.weight"].size(1)
    reach = config.get("max_position_embeddings", 1024)  # which is read, for the ledger, though another is wanted
    reach = max_positions or reach
    if not isinstance(reach, int) or reach < SHORTEST:
        raise ConversionError(f"{folder}/config.json has max_position_embeddings {reach!r}: give --positions")
    for side in SIDES:
        weights[f"{side}.positions"] = sinusoid_of_distance(torch.arange(reach).double(), width).float()
    vocabularies = ["vocab.json", "target_vocab.json" if (folder / "target_vocab.json").is_file() else "vocab.json"]
    source, target = (
        order_words(_symbols(folder / name, rows := len(weights[table])), rows, SPECIAL, str(folder / name))
        for name, table in zip(vocabularies, ("encoder.embed_tokens.weight", "output.weight"), strict=True)
    )
    model = ExternalModel(
        kind="Marian of transformers",
        path=folder,
        weights=weights,
        heads=tuple(config[f"{side}_attention_heads"] for side in SIDES),
        layers=tuple(config[f"{side}_layers"] for side in SIDES),
        pre_norm=False,
        activation=activation,
        scaled=bool(config.get("scale_embedding")),
        eps=EPSILON,
        start=config["decoder_start_token_id"],
        source_ends=True,
        dropout=tuple(config.get(name, 0.0) for name in ("dropout", "attention_dropout", "activation_dropout")),
        source=source,
        target=target,
    )
    _add_text(model)
    saved = import_weights(model, None, lambda *pair: _run(model, *pair), f"MarianMTModel of {transformers_release()}")
    saved.ledger = _ledger(model, config, read, vocabularies)
    return saved


# Keys of config.json, by the reason why they say nothing here.
_NEUTRAL = {
    "the tensors say it": "d_model encoder_ffn_dim decoder_ffn_dim num_hidden_layers vocab_size decoder_vocab_size",
    "of training": "encoder_layerdrop decoder_layerdrop classifier_dropout classif_dropout init_std",
    "of generation; relpos translate has options of its own": "bad_words_ids forced_eos_token_id forced_bos_token_id "
    "num_beams max_length length_penalty early_stopping",
    "the library does not read it": "normalize_before normalize_embedding static_position_embeddings "
    "add_final_layer_norm add_bias_logits extra_pos_embeddings",
    "every translation model is one": "is_encoder_decoder",
}


def _ledger(model: ExternalModel, config: Recorded, weights: State, vocabularies: list[str]) -> Ledger:
    """Return what became of a folder."""
    texts = [*vocabularies, "tokenizer_config.json", *(file.name for file in model.files.values())]
    ledger = ledger_of(model.path, config, weights, _NEUTRAL, texts)
    ledger.mark("tensors", USED, weights)
    tied = config.get("tie_word_embeddings", True) and any("shared" in n or "decoder.embed_t" in n for n in weights)
    ledger.mark("tensors", NEUTRAL, ["lm_head.weight"] * tied, AS_TIED)
    known, added = {*model.source.symbols, *SPECIAL}, _facts(model.path).get("added_tokens_decoder") or {}
    for number, token in added.items():  # which its tokenizer keeps whole
        if str(token.get("content")) not in known:
            ledger.add("keys", f"added_tokens_decoder {number}", token.get("content"))
    for name in (name for name in weights if name.endswith(".embed_positions.weight")):
        count, width = weights[name].shape
        made = sinusoid_of_distance(torch.arange(count).double(), width)
        if (weights[name] - made).abs().max() < 1e-5:
            ledger.mark("tensors", NEUTRAL, [name], "sinusoids, which are made anew")
        else:
            ledger.mark("tensors", LOST, [name], "these are no sinusoids")
    ledger.mark("files", NEUTRAL, ["special_tokens_map.json"], "special symbols are fairseq's")
    return ledger


@torch.no_grad()
def _run(model: ExternalModel, sources: Tensor, targets: Tensor) -> Tensor:
    """Return the logits (B, T, V) of transformers' own model, in fairseq's order of rows."""
    source, target = (torch.tensor(words.rows) for words in (model.source, model.target))
    begun = target[targets]
    begun[:, 0] = model.start
    loaded = load_in_transformers("MarianMTModel", model.path)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # transformers' causal mask needs it
    try:
        mask = (sources != PADDING).long()
        logits = loaded(input_ids=source[sources], attention_mask=mask, decoder_input_ids=begun).logits
    finally:
        torch.set_default_dtype(default)
    return logits[..., target.clamp(min=0)]


def _named(weights: State, config: dict[str, Any], folder: Path) -> State:
    """Rename tensors as fairseq does, with a copy wherever the folder saves a shared one once."""
    plain = [name.removeprefix("model.") for name in weights]
    if twice := next((name for name in plain if plain.count(name) > 1), None):
        raise ConversionError(f"{folder} has {twice} twice, with `model.` before it and without: remove one")
    weights = dict(zip(plain, weights.values(), strict=True))
    shared = next(
        (weights[n] for n in ("shared.weight", "lm_head.weight", "decoder.embed_tokens.weight") if n in weights), None
    )
    if shared is None:
        raise ConversionError(f"{folder} has no embedding: copy the whole folder again")
    own = config.get("share_encoder_decoder_embeddings", True)
    for side in SIDES:
        if own:
            weights.setdefault(f"{side}.embed_tokens.weight", shared)
        elif f"{side}.embed_tokens.weight" not in weights:
            raise ConversionError(f"{folder} has no {side}.embed_tokens.weight")
    output = weights.pop("lm_head.weight", shared)
    output = weights["decoder.embed_tokens.weight"] if config.get("tie_word_embeddings", True) else output
    weights["output.weight"] = output
    weights["output.bias"] = weights.pop("final_logits_bias", torch.zeros(len(output)))
    left = ("shared.weight", "encoder.embed_positions.weight", "decoder.embed_positions.weight")
    return {name: value for name, value in weights.items() if name not in left}


def _symbols(path: Path, rows: int) -> list[str]:
    """Return the symbols of a vocabulary by id; rows without a symbol are named as fairseq pads dictionaries."""
    numbers = read_json(path, dict[str, int], error=ConversionError)
    symbols = [f"madeupword{number:04d}" for number in range(rows)]
    taken: set[int] = set()
    for symbol, number in numbers.items():
        if not 0 <= number < rows:
            raise ConversionError(f"{path}: {symbol!r} has number {number}, the model {rows} rows")
        if number in taken:
            raise ConversionError(f"{path}: {symbol!r} and another symbol have the number {number}")
        symbols[number] = symbol
        taken.add(number)
    return symbols


class _Facts(TypedDict, total=False):
    """What is read of tokenizer_config.json."""

    source_lang: str | None
    target_lang: str | None
    added_tokens_decoder: dict[str, dict[str, object]] | None


def _facts(folder: Path) -> _Facts:
    return read_json(folder / "tokenizer_config.json", _Facts, {}, error=ConversionError)


def _add_text(model: ExternalModel) -> None:
    """Set languages and sentencepiece models from the folder, in place."""
    facts = _facts(model.path)
    found = facts.get("source_lang") or "source", facts.get("target_lang") or "target"
    model.languages = found if found[0] != found[1] else ("source", "target")
    if missing := [name for name in PIECES if not (model.path / name).is_file()]:
        model.notes.append(f"no {' and '.join(missing)}: text is pieces joined by spaces")
        return
    for language, name in zip(model.languages, PIECES, strict=True):
        load_sentencepiece(model.path / name)  # a broken one would be found when text is read
        model.files[f"sentencepiece.{language}.model"] = model.path / name
