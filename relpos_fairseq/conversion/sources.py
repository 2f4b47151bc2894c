"""What is converted: a fairseq RoBERTa, one of ours, or a Hugging Face folder.

All become a `Source`: tensors under our names, the values of our config that they need, the plan of
their positions, and a function that runs the original as its own library does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.config import PositionConfig, PositionPlan, resolve
from relpos_fairseq.conversion import huggingface, layouts
from relpos_fairseq.conversion.layouts import ENCODER, State
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.conversion.vocabulary import FILES, Vocabulary
from relpos_fairseq.registry import parse_hybrid
from relpos_fairseq.scheme import AttentionShape

Outputs = dict[str, Tensor]
# Options of ours that are fairseq's RobertaModel's, by its names.
_SHARED = (
    "encoder_layers",
    "encoder_embed_dim",
    "encoder_ffn_embed_dim",
    "encoder_attention_heads",
    "activation_fn",
    "pooler_activation_fn",
    "encoder_normalize_before",
    "untie_weights_roberta",
    "dropout",
    "attention_dropout",
    "activation_dropout",
    "pooler_dropout",
    "layer_norm_eps",
)
_DEFAULTS = {  # fairseq's roberta where a checkpoint does not say
    "encoder_layers": 12,
    "encoder_embed_dim": 768,
    "encoder_ffn_embed_dim": 3072,
    "encoder_attention_heads": 12,
    "activation_fn": "gelu",
    "pooler_activation_fn": "tanh",
    "encoder_normalize_before": False,
    "untie_weights_roberta": False,
    "layer_norm_eps": 1e-5,
}
POSITION_FIELDS = tuple(
    part.name
    for part in fields(PositionConfig)
    if part.name not in ("encoder_position_scheme", "decoder_position_scheme")
)

_KEPT = ("segment_encoding", "num_segments", "attention_backend")  # of any scheme


@dataclass
class Source:
    """A model to convert.

    Args:
        kind: `relpos_roberta`, `roberta` (fairseq's), or `bert`, `roberta` of `Hugging Face`.
        path: the file or folder.
        state: its tensors under our names.
        values: our config's values.
        vocabulary: its rows in fairseq's order, for a Hugging Face folder.
        files: dict.txt and the tokenizer's files, as far as they lie beside it.
        notes: what should be said of it.
        source_rows: for a converted checkpoint, the numbers that its rows had before.
        outputs: runs the original: (tokens, segments) to its outputs by name, in fairseq's order.
    """

    kind: str
    path: Path
    state: State
    values: dict[str, Any]
    vocabulary: Vocabulary | None = None
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    source_rows: list[int] | None = None
    outputs: Callable[[Tensor, Tensor | None], Outputs] | None = None

    @property
    def plan(self) -> PositionPlan:
        """The positions that it was trained with."""
        return plan_of(self.values)

    @property
    def rows(self) -> int:
        """Rows of its embedding."""
        return len(self.state[f"{ENCODER}.embed_tokens.weight"])


def plan_of(values: dict[str, Any]) -> PositionPlan:
    """The positions that our config's values ask for.

    Raises:
        ValueError: a position flag that is wrong or does not apply.
    """
    shape = AttentionShape(
        embed_dim=int(values["encoder_embed_dim"]),
        num_heads=int(values["encoder_attention_heads"]),
        max_positions=int(values["max_positions"]),
        length_flag="--positions",
        seed_name="encoder",
    )
    given = {name: str(values[name]) for name in POSITION_FIELDS if values.get(name) is not None}
    return resolve(PositionConfig(**given), shape, "masked_lm")


def target_values(source: Source, scheme: str, given: dict[str, str | None]) -> dict[str, Any]:
    """The source's config with other positions.

    An option that is not given is the source's own where source and target have a member that takes
    it in common, and else the target's default.

    Args:
        source: what is converted.
        scheme: the target's position scheme, or `same`.
        given: options by the names of our config (`max_positions` included); None: not given.
    """
    values = dict(source.values)
    scheme = source.plan.name if scheme == "same" else scheme
    mine = {member.name: member for member in parse_hybrid(scheme)}
    common = [member for member in source.plan.members if member.scheme.name in mine]
    kept = {option for member in common for option in member.scheme.takes}
    for name in POSITION_FIELDS:
        option = name.removeprefix("position_")
        keep = option in kept or name in _KEPT
        values[name] = values.get(name) if keep else None
    values["position_scheme"] = scheme
    values |= {name: value for name, value in given.items() if value is not None}
    if values.get("segment_encoding") == "none" and given.get("num_segments") is None:
        values["num_segments"] = None
    return values


def read_source(path: Path) -> Source:
    """Read a checkpoint or a folder.

    Raises:
        ConversionError: it is absent, truncated, or no model that is converted here.
    """
    if path.is_dir():
        if (path / "config.json").is_file():
            return _from_huggingface(path)
        files = sorted(path.glob("*.pt"))
        if len(files) != 1:
            raise ConversionError(
                f"{path} has no config.json of a Hugging Face model, and {len(files)} .pt files: "
                f"give the checkpoint itself"
            )
        path = files[0]
    return from_checkpoint(read_checkpoint(path), path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """A fairseq checkpoint, safely.

    Raises:
        ConversionError: it is absent, truncated, or another kind of file.
    """
    from relpos_fairseq.compat import allow_checkpoint_types

    if not path.is_file():
        raise ConversionError(f"{path} does not exist: give a checkpoint or a Hugging Face folder")
    allow_checkpoint_types()
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many types for a broken file
        reason = (str(error).strip().splitlines() or [repr(error)])[0]
        raise ConversionError(
            f"{path} ({path.stat().st_size:,} bytes) is truncated or no checkpoint: copy it again "
            f"({reason})"
        ) from None
    if not isinstance(checkpoint, dict) or not isinstance(checkpoint.get("model"), dict):
        raise ConversionError(f"{path} is no fairseq checkpoint: it holds no model")
    return checkpoint


def from_checkpoint(checkpoint: dict[str, Any], path: Path) -> Source:
    """A fairseq checkpoint in memory: ours, or RoBERTa with argparse's or a dataclass's options.

    Raises:
        ConversionError: another model, or options that contradict its tensors.
    """
    options = _options(checkpoint, path)
    state = _modern(checkpoint["model"])
    ours = layouts.VERSION in state
    if not ours and not any(key.startswith(f"{ENCODER}.layers.") for key in state):
        name = options.get("_name") or options.get("arch")
        raise ConversionError(f"{path} holds a {name}: only RoBERTa's encoder is converted")
    values = {name: default for name, default in _DEFAULTS.items()}
    values |= {name: options[name] for name in _SHARED if options.get(name) is not None}
    values = {name: getattr(value, "value", value) for name, value in values.items()}
    if ours:
        values |= {name: str(options[name]) for name in POSITION_FIELDS if name in options}
        values["no_layernorm_embedding"] = bool(options.get("no_layernorm_embedding", False))
        values["max_positions"] = _length(options, checkpoint, path)
    else:
        if not options.get("encoder_learned_pos", True):
            raise ConversionError(f"{path}: its positions are not learned, as RoBERTa's are")
        values["no_layernorm_embedding"] = not options.get("layernorm_embedding", True)
        original, state = state, layouts.learned_from_fairseq(state)
        values["position_scheme"] = "learned"
        values["max_positions"] = len(state[f"{ENCODER}.positions.shared.0.table"])
    source = Source(
        kind="relpos_roberta" if ours else "fairseq's roberta",
        path=path,
        state=state,
        values=values,
        files=beside(path.parent),
        source_rows=(checkpoint.get("conversion") or {}).get("rows"),
    )
    _check(source)
    state.setdefault(layouts.VERSION, layouts.encode_text(source.plan.describe()))
    run = _run_ours if ours else _run_fairseq
    kept = state if ours else original
    source.outputs = lambda tokens, segments: run(source, kept, tokens, segments)
    return source


def _options(checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """A checkpoint's model options, whichever style wrote them."""
    from omegaconf import OmegaConf

    cfg, args = checkpoint.get("cfg"), checkpoint.get("args")
    if cfg is None and args is None:
        raise ConversionError(f"{path} has neither cfg nor args: it is no fairseq checkpoint")
    model = args if cfg is None else cfg["model"]
    if OmegaConf.is_config(model):
        return OmegaConf.to_container(model, resolve=False, enum_to_str=True)
    if isinstance(model, argparse.Namespace):
        return dict(vars(model))
    return dict(model)


def _length(options: dict[str, Any], checkpoint: dict[str, Any], path: Path) -> int:
    """Positions that a model of ours was built for: its own option, else its task's samples."""
    length = options.get("max_positions")
    if not isinstance(length, int):
        task = dict((checkpoint.get("cfg") or {}).get("task") or {})
        length = task.get("tokens_per_sample") or task.get("max_positions")
    if not isinstance(length, int):
        raise ConversionError(f"{path} does not say how many positions it has (max_positions)")
    return length


def _modern(state: State) -> State:
    """Names of today's fairseq; old releases said decoder, emb_layer_norm and in_proj."""
    result = {}
    for key, value in state.items():
        if key.startswith("decoder."):
            key = "encoder." + key.removeprefix("decoder.")
        key = key.replace(".emb_layer_norm.", ".layernorm_embedding.")
        if key.endswith(("._float_tensor", "sentence_encoder.version")):
            continue
        if ".in_proj_" in key:
            stem, part = key.split(".in_proj_")
            for name, third in zip("qkv", value.chunk(3), strict=True):
                result[f"{stem}.{name}_proj.{part}"] = third
            continue
        result[key] = value
    return result


def _check(source: Source) -> None:
    """Options and tensors belong together.

    Raises:
        ConversionError: they do not.
    """
    state, values = source.state, source.values
    layers = layouts.count_layers(state)
    if values["encoder_layers"] != layers:
        raise ConversionError(
            f"{source.path} has {layers} layers, and its options say {values['encoder_layers']}"
        )
    for name, key, axis in (
        ("encoder_embed_dim", f"{ENCODER}.embed_tokens.weight", 1),
        ("encoder_ffn_embed_dim", f"{ENCODER}.layers.0.fc1.weight", 0),
    ):
        if key not in state or state[key].size(axis) != values[name]:
            found = tuple(state[key].shape) if key in state else "missing"
            raise ConversionError(
                f"{source.path}: {key} is {found}, and its options say {name} {values[name]}"
            )
    described = layouts.described(state)
    if described is not None and described != source.plan.describe():
        raise ConversionError(
            f"{source.path}: its tensors say [{described}] of positions, its options "
            f"[{source.plan.describe()}]"
        )


def beside(folder: Path) -> list[Path]:
    """Dict.txt and the tokenizer's files of a folder."""
    names = ("dict.txt", *FILES)
    return [folder / name for name in names if (folder / name).is_file()]


def _run_ours(source: Source, state: State, tokens: Tensor, segments: Tensor | None) -> Outputs:
    from relpos_fairseq.conversion.fidelity import outputs_of
    from relpos_fairseq.conversion.writer import build

    return outputs_of(build(source.values, state), tokens, segments)


def _run_fairseq(source: Source, state: State, tokens: Tensor, segments: Tensor | None) -> Outputs:
    from relpos_fairseq.conversion.fidelity import outputs_of
    from relpos_fairseq.conversion.writer import build_fairseq

    return outputs_of(build_fairseq(source.values, state), tokens, None)


def _from_huggingface(folder: Path) -> Source:
    model = huggingface.read(folder)
    state, values = huggingface.to_ours(model)
    source = Source(
        kind=f"Hugging Face's {model.family.name}",
        path=folder,
        state=state,
        values=_DEFAULTS | values,
        vocabulary=model.vocabulary,
        files=model.vocabulary.files,
        notes=model.notes,
    )
    plan = source.plan
    source.state[layouts.VERSION] = layouts.encode_text(plan.describe())
    source.outputs = lambda tokens, segments: _run_huggingface(model, tokens, segments)
    return source


def _run_huggingface(
    model: huggingface.HuggingFaceModel, tokens: Tensor, segments: Tensor | None
) -> Outputs:
    from relpos_fairseq.conversion.hf_reference import Reference

    rows = torch.tensor(model.vocabulary.rows)
    prefix = model.family.prefix
    types = torch.zeros_like(tokens) if segments is None else segments
    if len(model.encoder("embeddings.token_type_embeddings.weight")) == 1:
        types = torch.zeros_like(tokens)
    found = Reference(model.config, model.weights, prefix).outputs(rows[tokens], tokens == 1, types)
    if "logits" in found:
        logits = found["logits"][..., rows.clamp(min=0)]
        logits[..., rows < 0] = 0
        found["logits"] = logits
    return found


def check_destination(out: Path, source: Path) -> None:
    """Refuse to write over anything, the source above all.

    Raises:
        ConversionError: the destination is the source, lies in it, or exists.
    """
    there, here = out.resolve(), source.resolve()
    if there == here or here in there.parents:
        raise ConversionError(f"--out {out} is or lies in the source {source}: name another place")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConversionError(f"--out {out} exists: remove it, or name another place")
