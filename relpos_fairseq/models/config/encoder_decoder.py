"""The flat config of an encoder-decoder: the same fields on the command line and in hydra.

fairseq's TransformerConfig nests encoder, decoder and quant_noise; registered as a dataclass it
crashes the command line, and rebuilt with factories it ignores every --encoder-* flag.  Here its
fields are laid out flat beside ours, and `nested` builds the TransformerConfig that fairseq's
classes read.
"""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import MISSING, dataclass, fields, make_dataclass
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig, QuantNoiseConfig
from omegaconf import II

from relpos_fairseq.config import PositionConfig, help_text
from relpos_fairseq.models.config.single_stack import ACTIVATIONS, plain

_NESTED = {"encoder": EncDecBaseConfig, "decoder": DecoderConfig, "quant_noise": QuantNoiseConfig}
# Positions are ours to say; cross+self attention puts source and target on one line of slots.
_DROPPED = {
    "_name",
    "no_token_positional_embeddings",
    "encoder_learned_pos",
    "decoder_learned_pos",
    "encoder_xformers_att_config",
    "decoder_xformers_att_config",
    "cross_self_attention",
}
# fairseq reads Optional[...], not X | None, from a field.
_RETYPED = {
    "activation_fn": (ACTIVATIONS, "relu"),
    "decoder_input_dim": (Optional[int], None),  # noqa: UP045
    "decoder_output_dim": (Optional[int], None),  # noqa: UP045
    "encoder_layers_to_keep": (Optional[str], None),  # noqa: UP045
    "decoder_layers_to_keep": (Optional[str], None),  # noqa: UP045
}
DEFAULT_LENGTH = 1024
SKIPS_END = "the encoder takes </s> for padding, as where sources were trained without it"


def _flat_fields() -> list[tuple[str, Any, Any]]:
    """(name, type, field) of every option of TransformerConfig, flat."""
    flat = []
    for outer in fields(TransformerConfig):
        inner = _NESTED.get(outer.name)
        for part in fields(inner) if inner else (outer,):
            name = f"{outer.name}_{part.name}" if inner else part.name
            if part.name == "_name" or name in _DROPPED:
                continue
            kind, default = _RETYPED.get(name, (part.type, part.default))
            metadata = dict(part.metadata)
            if name in ("max_source_positions", "max_target_positions"):
                # The task has the flag; without a help text fairseq does not add it twice.
                default, metadata = II(f"task.{name}"), {}
            if default is MISSING:
                raise TypeError(f"fairseq's TransformerConfig.{name} has no default")
            flat.append((name, kind, dataclasses.field(default=default, metadata=metadata)))
    for part in fields(PositionConfig):
        own = dataclasses.field(default=part.default, metadata=part.metadata)
        flat.append((part.name, str, own))
    flat.append(("encoder_skips_end", bool, help_text(False, SKIPS_END)))
    return flat


_Flat = make_dataclass("_Flat", _flat_fields(), bases=(FairseqDataclass,))
_Flat.__module__ = __name__


@dataclass
class RelPosTransformerConfig(_Flat):
    """Every option of fairseq's transformer and every option of positions."""


def nested(cfg: Any) -> TransformerConfig:
    """Fairseq's nested config, carrying the position fields, from a flat one (see `plain`)."""
    flat = {key: value for key, value in plain(cfg).items() if not key.startswith("_")}
    for key in ("max_source_positions", "max_target_positions"):
        if not isinstance(flat.get(key), int):
            flat[key] = DEFAULT_LENGTH
    for key in ("decoder_input_dim", "decoder_output_dim"):
        flat[key] = flat.get(key) or flat["decoder_embed_dim"]
    flat["no_token_positional_embeddings"] = True
    return TransformerConfig.from_namespace(argparse.Namespace(**flat))
