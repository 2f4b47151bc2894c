"""A pre-trained checkpoint as the flags of a fine-tuning: the same model, from the command line."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Any

from relpos_fairseq.engine.errors import PreparationError, unreadable

ARCH = "relpos_roberta"
# Said by the fine-tuning itself, or only of use in pre-training.
LEFT_OUT = (
    "_name",
    "max_positions",
    "load_checkpoint_heads",
    "checkpoint_activations",
    "offload_activations",
    "min_params_to_wrap",
)


@dataclass(frozen=True)
class Pretrained:
    """What is fine-tuned."""

    name: str  # what tables call it
    path: Path
    positions: int  # the longest input that it was built for
    flags: dict[str, object]  # the command line's flags that build its model
    any_length: bool = False  # whether its positions reach beyond that: a relative scheme's do


def read_pretrained(name: str, path: Path) -> Pretrained:
    """Read the configuration of a checkpoint of relpos_roberta, or of fairseq's roberta."""
    import torch

    import relpos_fairseq  # noqa: F401  (lets torch load fairseq's checkpoints safely)
    from relpos_fairseq.models.config.roberta import RelPosRobertaConfig

    if not path.is_file():
        raise PreparationError(f"{name}: there is no checkpoint {path}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds
        raise PreparationError(f"{name}: {unreadable(path, error)}") from None
    if not isinstance(state, Mapping) or not (state.get("cfg") or state.get("args")):
        raise PreparationError(f"{name}: {path} is no fairseq checkpoint: it has no configuration")
    model, task = _sections(state)
    if "encoder_embed_dim" not in model or "decoder_embed_dim" in model:
        raise PreparationError(f"{name}: {path} is no RoBERTa, but {model.get('_name')!r}")
    flags: dict[str, object] = {"arch": ARCH}
    for part in fields(RelPosRobertaConfig):
        value = _plain(model.get(part.name, part.default))
        if part.name in LEFT_OUT or part.default is MISSING or value == _plain(part.default):
            continue
        if value not in (None, False):
            flags[part.name.replace("_", "-")] = value
    positions = model.get("max_positions") or task.get("tokens_per_sample")
    positions = int(positions or task.get("max_positions") or 512)
    return Pretrained(name, path, positions, flags, takes_any_length(model, positions))


def takes_any_length(model: Mapping[str, Any], positions: int) -> bool:
    """Whether a model's positions have no end: none of its schemes has a row a position."""
    from relpos_fairseq.conversion.source import DEFAULTS, plan_of
    from relpos_fairseq.schemes import DEFAULT

    own = {name: _plain(value) for name, value in model.items() if value is not None}
    values = {"position_scheme": DEFAULT["masked_lm"]} | DEFAULTS | own
    return plan_of(values | {"max_positions": positions}).longest is None


def _sections(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The model's and the task's configuration, of both styles."""
    if state.get("cfg"):
        parts = (state["cfg"].get("model"), state["cfg"].get("task"))
    else:
        parts = (state["args"], state["args"])
    return tuple(_mapping(part) for part in parts)


def _mapping(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    return dict(config) if isinstance(config, Mapping) else dict(vars(config))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value
