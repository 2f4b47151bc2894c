"""What a saved model says of its positions: in its options, and in its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from torch import Tensor

from relpos_fairseq.config import OPTIONS, PositionConfig, resolve
from relpos_fairseq.plan import PositionPlan, decode_text
from relpos_fairseq.scheme import AttentionShape

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
