"""Read what a checkpoint says of its model, task and positions, whoever saved it: hydra, argparse or a program."""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
from omegaconf import OmegaConf
from torch import Tensor

from relpos_fairseq.core.config import OPTIONS, PositionConfig, resolve
from relpos_fairseq.core.plan import PositionPlan, decode_text
from relpos_fairseq.core.scheme import AttentionShape

logger = logging.getLogger(__name__)
# Options that say where files lie, in what languages and pieces, or what a training prints.
WHERE = r"data|load_checkpoint_heads|.*_folder|.*_lang|bpe|eval_.*bleu.*"
VERSION = ".positions.scheme_version"  # the end of the names of tensors that record schemes
DEFAULTS = {  # of fairseq's roberta, where a checkpoint does not say
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
_LEFT_OUT = {"encoder_position_scheme", "decoder_position_scheme"} | {o.field for o in OPTIONS if o.training_only}
POSITION_FIELDS = tuple(part.name for part in fields(PositionConfig) if part.name not in _LEFT_OUT)


@dataclass(frozen=True)
class SavedOptions:
    """The options of a checkpoint, as plain values by name.

    Attributes:
        model: the model's; of a release that keeps one list, all options.
        task: the task's; there too.
    """

    model: dict[str, Any]
    task: dict[str, Any]

    @property
    def model_name(self) -> str | None:
        """The model or architecture, as fairseq registers it."""
        return _named(self.model, "_name", "arch")

    @property
    def task_name(self) -> str | None:
        """The task, as fairseq looks for it: an older name counts before hydra's."""
        return _named(self.task, "task", "_name")

    @property
    def languages(self) -> tuple[str | None, str | None]:
        """The source's and the target's language; None where the task has none."""
        return self.task.get("source_lang"), self.task.get("target_lang")

    @property
    def data(self) -> str:
        """The first data folder of the task; "" where there is none."""
        return str(self.task.get("data") or "").split(":")[0]


def _named(options: Mapping[str, Any], *keys: str) -> str | None:
    """Return the first name among the options; under `task` a whole config may stand."""
    return next((options[key] for key in keys if isinstance(options.get(key), str)), None)


def saved_options(state: Mapping[str, Any]) -> SavedOptions | None:
    """Return a checkpoint's options, or None where it has none.

    A task of before hydra keeps a Namespace in a config; fairseq's first releases keep one Namespace of all.
    """
    if cfg := state.get("cfg"):
        parts = plain(cfg)
        return SavedOptions(plain(parts.get("model") or {}), plain(parts.get("task") or {}))
    if args := state.get("args"):
        every = plain(args)
        return SavedOptions(every, every | {"_name": every.get("task")})
    return None


def plain(options: Any) -> dict[str, Any]:
    """Return options as a dict of plain values; enumerations by their names."""
    if OmegaConf.is_config(options):
        return cast(dict, OmegaConf.to_container(options, resolve=False, enum_to_str=True))
    return dict(options if isinstance(options, Mapping) else vars(options))


def tell_replaced(saved: Mapping[str, Any], given: Mapping[str, Any], besides: str = WHERE) -> None:
    """Log a line for each option of a checkpoint that another value replaces: a number is not what was trained.

    Args:
        saved: the checkpoint's options.
        given: the options that are used; those that the checkpoint has not are left out.
        besides: expression of the names that change no number.
    """
    for name, value in given.items():
        if name in saved and _text(value) != _text(saved[name]) and not re.fullmatch(besides, name):
            logger.warning("%s %s in place of the checkpoint's %s", name, _text(value), _text(saved[name]))


def _text(value: Any) -> str:
    """Return an option as a command line has it."""
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def plan_of(values: Mapping[str, Any]) -> PositionPlan:
    """Resolve the positions of a config: values of RelPosRobertaConfig to a PositionPlan.

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


def describe(state: Mapping[str, Tensor]) -> str:
    """Return the position schemes of encoder and decoder in words, as a model's tensors record them."""
    plans = {name.removesuffix(VERSION): value for name, value in state.items() if name.endswith(VERSION)}
    return "; ".join(f"{side}: {decode_text(value)}" for side, value in sorted(plans.items()))


def hash_weights(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of a model's tensors: names, types, shapes and numbers, in the order of their names.

    What else a model may keep, `_extra_state`, is not counted: none of this package's does.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(item for item in state.items() if isinstance(item[1], Tensor)):
        digest.update(f"{name}\0{tensor.dtype}{tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
