"""Read a checkpoint of OpenNMT-py's transformer (version 3) as a translation model of relpos.

Layer norm comes before each block, with eps 1e-6, and after the last layer. --max_relative_positions k > 0 is Shaw's
scheme with one table for keys and values; --position_encoding adds interleaved sinusoids, and it alone multiplies
embeddings by sqrt(E). A source has neither <s> nor </s>; a target begins with <s>.
Klein et al. 2017 (arXiv:1701.02810); Shaw et al. 2018.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.conversion.layouts import State
from relpos_fairseq.conversion.report import ConversionError, never_run
from relpos_fairseq.formats.external_model import SIDES, ExternalModel, import_weights
from relpos_fairseq.formats.names import OPENNMT
from relpos_fairseq.formats.vocabulary import order_words
from relpos_fairseq.io.tensor_files import check_tensors, read_tensors
from relpos_fairseq.saved.ledger import NEUTRAL, USED, Ledger, Recorded
from relpos_fairseq.saved.model import SavedModel

LENGTH = 1024  # positions, where nobody says
SPECIAL = {"<s>": "<s>", "<pad>": "<blank>", "</s>": "</s>", "<unk>": "<unk>"}
BUFFERS = (".pe.pe", ".mask")
# Options that must have one of these values; an option that is absent has its first.
EXPRESSED = {
    "encoder_type": ("transformer",),
    "decoder_type": ("transformer",),
    "self_attn_type": ("scaled-dot", "scaled-dot-flash"),
    "copy_attn": (False,),
    "layer_norm": ("standard",),
    "parallel_residual": (False,),
    "relative_positions_buckets": (0,),
    "num_kv": (0,),
    "num_experts": (0,),
    "generator_function": ("softmax",),
    "aan_useffn": (False,),
    "pos_ffn_activation_fn": ("relu", "gelu"),
    "position_encoding_type": ("SinusoidalInterleaved",),
}


def read_opennmt(path: Path, checkpoint: dict[str, Any], max_positions: int | None) -> SavedModel:
    """Read a checkpoint, whose tensors may lie beside it in FILE.safetensors, with so many positions; None: LENGTH.

    Raises:
        ConversionError: another architecture, or a part that fairseq's layers cannot express.
    """
    options = Recorded(vars(checkpoint["opt"]))
    for name, values in EXPRESSED.items():
        if options.get(name, values[0]) not in values:
            raise ConversionError(
                f"{path}: --{name} {options[name]} of OpenNMT-py has no counterpart in "
                f"relpos_transformer, only {' and '.join(map(str, values))}"
            )
    length = max_positions or LENGTH
    reach = int(options.get("max_relative_positions", 0))
    if reach < 0:
        raise ConversionError(
            f"{path}: --max_relative_positions {reach} of OpenNMT-py is not converted: only Shaw's "
            f"(> 0) and --position_encoding are"
        )
    symbols = checkpoint["vocab"]
    if not isinstance(symbols, dict) or not all(isinstance(symbols.get(side), list) for side in ("src", "tgt")):
        raise ConversionError(
            f"{path}: its vocabulary is no list of symbols (OpenNMT-py 2 and older): run its "
            f"tools/convertv2_v3.py first"
        )
    if symbols.get("src_feats"):
        raise ConversionError(f"{path}: features of the source have no counterpart")
    tensors = _tensors(path, checkpoint)
    weights = _named(tensors, path)
    layers = tuple(
        1 + max(int(name.split(".")[2]) for name in weights if name.startswith(f"{side}.layers.")) for side in SIDES
    )
    width = weights["encoder.embed_tokens.weight"].size(1)
    absolute = bool(options.get("position_encoding"))
    if not absolute and not reach:
        raise ConversionError(f"{path}: the model has no positions at all: nothing to convert")
    if absolute:
        for side in SIDES:
            weights[f"{side}.positions"] = sinusoids(length, width)
    dropout = [options.get(f"{name}dropout", 0.0) for name in ("", "attention_", "")]  # of a schedule, the first
    start = symbols.get("decoder_start_token", "<s>")
    source, target = (
        order_words(symbols[side], len(weights[f"{name}.embed_tokens.weight"]), SPECIAL, f"{path}: vocabulary {side}")
        for side, name in (("src", "encoder"), ("tgt", "decoder"))
    )
    if start not in symbols["tgt"]:
        raise ConversionError(f"{path}: a target begins with {start!r}, which is no symbol of it")
    found = tuple(str(options.get(f"{side}_lang") or side) for side in ("src", "tgt"))
    model = ExternalModel(
        kind="OpenNMT-py",
        path=path,
        weights=weights,
        heads=(options["heads"],) * 2,
        layers=layers,
        pre_norm=True,
        activation=options.get("pos_ffn_activation_fn", "relu"),
        scaled=absolute,
        eps=float(options.get("norm_eps", 1e-6)),
        start=symbols["tgt"].index(start),
        source_ends=False,
        dropout=tuple(float(value[0] if isinstance(value, list) else value) for value in dropout),
        source=source,
        target=target,
        languages=found if found[0] != found[1] else ("src", "tgt"),
    )
    _add_text(model, options)
    logits = never_run("relpos does not run OpenNMT-py; compare translations of `relpos translate` with its own")
    imported = import_weights(model, length, logits)
    imported.ledger = _ledger(path, options, tensors)
    return imported


def sinusoids(count: int, width: int) -> Tensor:
    """Return (count, width) sinusoids: sines and cosines in turn."""
    frequency = torch.exp(torch.arange(0, width, 2).float() * -(math.log(10000.0) / width))
    angle = torch.arange(count).float()[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def _tensors(path: Path, checkpoint: dict[str, Any]) -> State:
    """Return the model's tensors, those of the generator under `generator.`."""
    if "model" in checkpoint:
        generator = checkpoint.get("generator") or {}
        tensors = checkpoint["model"] | {f"generator.{name}": v for name, v in generator.items()}
        check_tensors(tensors, path, ConversionError)
        return tensors
    beside = path.with_suffix(".safetensors")
    if not beside.is_file():
        raise ConversionError(f"{path} holds no tensors, and {beside.name} is not beside it")
    return read_tensors(beside, error=ConversionError)


def _named(weights: State, path: Path) -> State:
    """Rename tensors as fairseq does.

    Raises:
        ConversionError: one has no counterpart, or an embedding or the generator is missing.
    """
    result = {}
    for name in (name for name in weights if not name.endswith(BUFFERS)):
        found = OPENNMT.ours(name)
        if found is None:
            raise ConversionError(f"{path}: tensor {name} has no counterpart in relpos_transformer")
        result[found] = weights[name]
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "output.bias"):
        if name not in result:
            raise ConversionError(f"{path} has no {OPENNMT.theirs(name)}")
    result.setdefault("output.weight", result["decoder.embed_tokens.weight"])
    return result


def _ledger(path: Path, options: Recorded, weights: State) -> Ledger:
    """Return what became of a checkpoint."""
    ledger = Ledger(weights, options, [path.name])
    ledger.mark("files", USED, [path.name])
    ledger.mark("tensors", USED, weights)
    ledger.mark("tensors", NEUTRAL, [name for name in weights if name.endswith(BUFFERS)], "a buffer")
    ledger.mark("keys", NEUTRAL, options, "of training and its data")
    return ledger


def _add_text(model: ExternalModel, options: dict[str, Any]) -> None:
    """Add sentencepiece's models where the model was trained on its pieces and they are found, in place."""
    if "sentencepiece" in (options.get("transforms") or []):
        for side, language in zip(("src", "tgt"), model.languages, strict=True):
            given = Path(str(options.get(f"{side}_subword_model") or ""))
            places = (given, model.path.parent / given.name)
            found = next((path for path in places if path.is_file()), None)
            if found is not None:
                model.files[f"sentencepiece.{language}.model"] = found
    if len(model.files) < 2:
        model.files.clear()
        model.notes.append("no sentencepiece models of both sides: text is symbols between spaces")
