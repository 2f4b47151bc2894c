"""Models of the conversion tests: small, random in every table, in fp64."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from fairseq.models.roberta import RobertaModel
from torch import Tensor, nn

from relpos_fairseq.conversion import Conversion, convert
from relpos_fairseq.conversion.report import Probe, compare
from relpos_fairseq.models import building
from relpos_fairseq.models.building import outputs_of
from relpos_fairseq.models.relpos_roberta import RelPosRobertaModel
from relpos_fairseq.saved.identity import plan_of

ROWS, POSITIONS = 23, 20
SIZES = {
    "encoder_layers": 2,
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "encoder_attention_heads": 2,
    "activation_fn": "gelu_accurate",  # fairseq's gelu rounds to fp32
    "pooler_activation_fn": "tanh",
    "max_positions": POSITIONS,
    "layer_norm_eps": 1e-5,
}


def config(scheme: str, **values: Any) -> dict[str, Any]:
    """Values of our config."""
    return SIZES | {"position_scheme": scheme} | values


def random_state(values: dict[str, Any], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """The tensors of a model whose every parameter, tables included, is random and of size; whole numbers stay so."""
    found = _random_state(json.dumps(values)).items()
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in found}


@functools.cache
def _random_state(values: str) -> dict[str, Tensor]:
    """Many tests begin with the same few models, whichever is first; nothing writes into them."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_of(json.loads(values)).double()
    shake(model)
    return {key: value.detach().clone() for key, value in model.state_dict().items()}


@functools.cache
def _random_outputs(values: str, longest: int, segments: bool) -> dict[str, Tensor]:
    probe = Probe.draw(ROWS, longest, segments)
    model = building.build_roberta(json.loads(values), _random_state(values))
    return outputs_of(model, probe.tokens, probe.segments)


def model_of(values: dict[str, Any], rows: int = ROWS) -> RelPosRobertaModel:
    """A new model."""
    task = building.task_of(rows, values["max_positions"])
    return RelPosRobertaModel.build_model(building.namespace(values), task)


@torch.no_grad()
def shake(model: nn.Module) -> None:
    """Add noise to every parameter, so that no table is neutral and no two layers are alike."""
    random = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=random, dtype=torch.float64)
        parameter.add_(0.3 * noise.to(parameter.dtype))


def converted(source: dict[str, Any], target: dict[str, Any], **options: Any) -> tuple[Conversion, float]:
    """Convert a random model; returns the conversion and the largest difference of its logits."""
    done = convert(random_state(source), plan_of(source), plan_of(target), **options)
    return done, difference(source, target, done.state)


def difference(
    source: dict[str, Any], target: dict[str, Any], after: dict[str, Tensor], longest: int | None = None
) -> float:
    """Largest difference of logits to the random model's, on input with padding and segments."""
    longest = longest or min(source["max_positions"], target["max_positions"])
    segments = "segment_encoding" in source
    probe = Probe.draw(ROWS, longest, segments)
    before = _random_outputs(json.dumps(source), longest, segments)
    outputs = outputs_of(building.build_roberta(target, after), probe.tokens, probe.segments)
    return compare(before, outputs, probe).largest["logits"]


def assert_exact(source: dict, target: dict, **options) -> Conversion:
    """The conversion says that it is exact, and is."""
    done, apart = converted(source, target, **options)
    assert done.report.exact, done.report.lines()
    assert apart < 1e-10
    return done


def fairseq_roberta(folder: Path, style: str) -> tuple[Path, RobertaModel]:
    """A checkpoint of fairseq's own RoBERTa, as one of its releases wrote it.

    Args:
        folder: where it is written.
        style: `argparse` (args, and the names of 2019), `legacy` (a Namespace in cfg, as today's
            fairseq-train writes for roberta) or `dataclass` (plain values in cfg).
    """
    options = building.namespace(dict(SIZES))
    for name in ("layer_norm_eps", "load_checkpoint_heads"):
        delattr(options, name)
    model = RobertaModel.build_model(options, building.task_of(ROWS, POSITIONS)).eval()
    shake(model)
    with torch.no_grad():
        model.encoder.sentence_encoder.embed_tokens.weight[1] = 0
        model.encoder.sentence_encoder.embed_positions.weight[1] = 0
    model.register_classification_head("sentence_classification_head", num_classes=3)
    state = {key: value.detach().clone() for key, value in model.state_dict().items()}
    options.arch = options._name = "roberta"
    options.task, options.data, options.criterion = "masked_lm", ".", "masked_lm"
    history = {"criterion_name": "MaskedLmLoss", "optimizer_name": "FairseqAdam", "lr_scheduler_state": {}}
    checkpoint = {"model": state, "args": None, "cfg": None, "last_optimizer_state": None}
    checkpoint |= {"optimizer_history": [history | {"num_updates": 5}]}
    checkpoint |= {"extra_state": {"train_iterator": {"epoch": 1, "iterations_in_epoch": 0}}}
    if style == "argparse":
        checkpoint["args"], checkpoint["model"] = options, names_of_2019(state)
        del checkpoint["cfg"]
    else:
        values = options if style == "legacy" else dict(vars(options))
        checkpoint["cfg"] = {"model": values, "task": {"_name": "masked_lm", "data": "."}}
    path = folder / f"{style}.pt"
    torch.save(checkpoint, path)
    return path, model


def as_plain(checkpoint: dict) -> dict:
    """One of ours with learned positions as fairseq's own RoBERTa writes it."""
    state = {}
    for key, value in checkpoint["model"].items():
        if key.endswith("positions.shared.0.table"):
            value = torch.cat([value.new_zeros(2, value.size(1)), value])
            key = "encoder.sentence_encoder.embed_positions.weight"
        if not key.endswith("scheme_version"):
            state[key] = value
    own = ("position_", "segment_", "num_segments", "clamp", "attention_ba")
    options = {key: value for key, value in checkpoint["cfg"]["model"].items() if not key.startswith(own)}
    checkpoint["cfg"]["model"] = options | {"_name": "roberta"}
    return checkpoint | {"model": state}


def names_of_2019(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as fairseq 0.9 named them: one projection of q, k and v, and a decoder."""
    old = {}
    for key, value in state.items():
        key = key.replace(".layernorm_embedding.", ".emb_layer_norm.")
        for part in ("weight", "bias"):
            if key.endswith(f"self_attn.q_proj.{part}"):
                stem = key.removesuffix(f"q_proj.{part}")
                pieces = [state[f"{stem}{name}_proj.{part}"] for name in "qkv"]
                old[f"decoder.{stem.removeprefix('encoder.')}in_proj_{part}"] = torch.cat(pieces)
        if not any(f"self_attn.{name}_proj." in key for name in "qkv"):
            old[key.replace("encoder.", "decoder.", 1) if key.startswith("encoder.") else key] = value
    return old
