"""Read checkpoints of fairseq's RoBERTa and of relpos_roberta."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from fairseq.models import ARCH_MODEL_REGISTRY

from relpos_fairseq.conversion import layouts
from relpos_fairseq.conversion.layouts import ENCODER, State
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.core.plan import decode_text
from relpos_fairseq.formats.transformers_folder import kept_places
from relpos_fairseq.io.tensor_files import UNFILLED, building, check_checkpoint, load
from relpos_fairseq.models.building import build_fairseq_roberta, outputs_of, run_ours
from relpos_fairseq.models.configs import RelPosRobertaConfig
from relpos_fairseq.saved.checkpoint import ROBERTA
from relpos_fairseq.saved.identity import DEFAULTS, POSITION_FIELDS
from relpos_fairseq.saved.ledger import NEUTRAL, USED, Ledger, Recorded
from relpos_fairseq.saved.model import Origin, SavedModel
from relpos_fairseq.schemes import named_elsewhere
from relpos_fairseq.text import provenance
from relpos_fairseq.text.assets import asset_files_of

# Options of RelPosRobertaConfig that fairseq's RobertaModel has under the same names.
_SHARED = (
    *("encoder_layerdrop", "quant_noise_pq", "quant_noise_pq_block_size", "quant_noise_scalar"),
    *("mha_reg_scale_factor", "ffn_reg_scale_factor", "dropout", "attention_dropout", "activation_dropout"),
    *("pooler_dropout", *DEFAULTS),
)


def read_file(path: Path) -> dict[str, Any]:
    """Read a dictionary that torch saved, safely.

    Raises:
        ConversionError: it is absent, truncated, or another kind of file.
    """
    if not path.is_file():
        raise ConversionError(f"{path} does not exist: give a checkpoint or a Hugging Face folder")
    checkpoint = load(path, error=ConversionError)
    if not isinstance(checkpoint, dict):
        raise ConversionError(f"{path} is no fairseq checkpoint: it holds no model")
    return checkpoint


def from_checkpoint(path: Path, checkpoint: dict[str, Any]) -> SavedModel:
    """Return a fairseq checkpoint in memory as one of ours: a relpos_roberta, or fairseq's RoBERTa of any release.

    Raises:
        ConversionError: another model, or options that contradict its tensors.
    """
    with building(path):
        return _as_ours(SavedModel(path, check_checkpoint(checkpoint, path, ConversionError)))


def _as_ours(read: SavedModel) -> SavedModel:
    path, checkpoint, tensors, options = read.path, read.checkpoint, read.state, Recorded(read.options.model)
    ours = layouts.VERSION in tensors
    if not ours and not any(".sentence_encoder.layers." in key for key in tensors):
        name = options.get("_name") or options.get("arch")
        raise ConversionError(f"{path} holds a {name}: only RoBERTa's encoder is converted")
    state = _modern(tensors)
    values = DEFAULTS | {name: options[name] for name in _SHARED if options.get(name) is not None}
    values = {name: getattr(value, "value", value) for name, value in values.items()}
    if ours:
        values |= {name: str(options[name]) for name in POSITION_FIELDS if name in options}
        values["no_layernorm_embedding"] = bool(options.get("no_layernorm_embedding", False))
        values["max_positions"] = _length(options, read.task, path)
    else:
        if not options.get("encoder_learned_pos", True):
            raise ConversionError(f"{path}: its positions are not learned, as RoBERTa's are")
        values["no_layernorm_embedding"] = not options.get("layernorm_embedding", True)
        original, state = state, layouts.learned_from_fairseq(state)
        values["position_scheme"] = named_elsewhere("fairseq")["encoder_learned_pos"]
        values["max_positions"] = len(state[f"{ENCODER}.positions.shared.0.table"])
    origin = Origin.of(checkpoint.get("conversion") or {})
    saved = SavedModel.of(
        path,
        ROBERTA,
        values,
        state,
        read.task,
        kind=ROBERTA if ours else "fairseq's roberta",
        origin=origin,
        library=ROBERTA if ours else "fairseq's RobertaModel",
        files=asset_files_of(path.parent),
        kept_files={name: file for name in kept_places(origin.kept_files) if (file := path.parent / name).is_file()},
    )
    saved.checkpoint |= {provenance.KEY: checkpoint[provenance.KEY]} if provenance.KEY in checkpoint else {}
    check(saved)
    saved.ledger = _ledger(tensors, options, path, checkpoint.get("extra_state"))
    state.setdefault(layouts.VERSION, layouts.encode_text(saved.plan.describe()))
    saved.outputs = partial(run_ours, saved)
    if not ours:
        saved.outputs = lambda tokens, _: outputs_of(build_fairseq_roberta(values, original), tokens, None)
    return saved


# Options of the model that change no output or that its tensors say, and those of fairseq's RobertaModel alone.
_SILENT = ("_name", "max_positions", "load_checkpoint_heads")
_SILENT += ("checkpoint_activations", "offload_activations", "min_params_to_wrap")
_BUFFERS = (f".{UNFILLED}", "sentence_encoder.version")
_FAIRSEQS = ("spectral_norm_classification_head", "mha_heads_to_keep", "ffn_blocks_to_remove")


def _ledger(tensors: State, options: Recorded, path: Path, extra: dict[str, Any] | None) -> Ledger:
    """Return what became of a checkpoint's tensors and options; all that `_modern` leaves in is read."""
    ledger = Ledger(tensors, options, [path.name])
    ledger.mark("files", USED, [path.name])
    ledger.mark("tensors", USED, tensors)
    ledger.mark("tensors", NEUTRAL, [name for name in tensors if name.endswith(_BUFFERS)], "a buffer")
    defaults = {part.name: part.default for part in fields(RelPosRobertaConfig)} | dict.fromkeys(_FAIRSEQS)
    own = layouts.VERSION in tensors and options.get("_name") in ARCH_MODEL_REGISTRY  # not a whole command line
    for name, value in options.items():
        if name in _SILENT or (name not in defaults and not own):
            ledger.mark("keys", NEUTRAL, [name], "of data, training or memory, or the tensors say it")
        elif value is None or value is False or value == -1 or value == defaults.get(name, ...):
            ledger.mark("keys", NEUTRAL, [name], "not set")
    if "ema" in (extra or {}):
        ledger.add("tensors", "extra_state.ema")
    return ledger


def _length(options: dict[str, Any], task: dict[str, Any], path: Path) -> int:
    """Return the positions that a relpos_roberta was built for: its own option, else its task's sample length."""
    for length in (options.get("max_positions"), task.get("tokens_per_sample") or task.get("max_positions")):
        if isinstance(length, int):
            return length
    raise ConversionError(f"{path} does not say how many positions it has (max_positions)")


def _modern(state: State) -> State:
    """Rename tensors of old fairseq releases (decoder, emb_layer_norm, in_proj) as today's fairseq does."""
    result = {}
    for key, value in state.items():
        if key.startswith("decoder."):
            key = "encoder." + key.removeprefix("decoder.")
        key = key.replace(".emb_layer_norm.", ".layernorm_embedding.")
        if key.endswith(UNFILLED):
            continue
        if ".in_proj_" in key:
            stem, part = key.split(".in_proj_")
            made = {f"{stem}.{name}_proj.{part}": third for name, third in zip("qkv", value.chunk(3), strict=True)}
        else:
            made = {key: value}
        if twice := result.keys() & made.keys():
            raise ConversionError(f"the checkpoint has {min(twice)} twice, under an old name and a new one: remove one")
        result |= made
    return result


def check(saved: SavedModel) -> None:
    """Check that options and tensors belong together.

    Raises:
        ConversionError: they do not.
    """
    state, values = saved.state, saved.values
    layers = layouts.count_layers(state)
    if values["encoder_layers"] != layers:
        raise ConversionError(f"{saved.path} has {layers} layers, and its options say {values['encoder_layers']}")
    for name, key, axis in (
        ("encoder_embed_dim", f"{ENCODER}.embed_tokens.weight", 1),
        ("encoder_ffn_embed_dim", f"{ENCODER}.layers.0.fc1.weight", 0),
    ):
        if key not in state or state[key].size(axis) != values[name]:
            found = tuple(state[key].shape) if key in state else "missing"
            raise ConversionError(f"{saved.path}: {key} is {found}, and its options say {name} {values[name]}")
    version, options = state.get(layouts.VERSION), saved.plan.describe()
    if version is not None and (tensors := decode_text(version)) != options:
        raise ConversionError(f"{saved.path}: its tensors say [{tensors}] of positions, its options [{options}]")
