"""`relpos_transformer`: fairseq's encoder-decoder with any position scheme, and its flat config.

fairseq's TransformerConfig nests encoder, decoder and quant_noise; registered as a dataclass it crashes the
command line, and rebuilt with factories it ignores every --encoder-* flag.  Here its fields are laid
out flat, with the position flags, and `nested` builds the TransformerConfig that fairseq's classes read.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
from dataclasses import MISSING, dataclass, fields, make_dataclass
from typing import Any, Optional

from fairseq.dataclass import FairseqDataclass
from fairseq.models.transformer import TransformerConfig, TransformerModelBase
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig, QuantNoiseConfig
from omegaconf import II

from relpos_fairseq.core.config import PositionConfig, help_text
from relpos_fairseq.models.configs import ACTIVATIONS, DEFAULT_LENGTH, add_flags, flat_values, register_sizes, widths
from relpos_fairseq.models.decoder import AdaptiveModel, RelPosDecoder
from relpos_fairseq.models.encoder import RelPosEncoder

logger = logging.getLogger(__name__)
_NESTED = {"encoder": EncDecBaseConfig, "decoder": DecoderConfig, "quant_noise": QuantNoiseConfig}
# Position schemes replace these options; cross+self attention would mix the slots of source and target.
_DROPPED = {
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
SKIPS_END = "the encoder takes </s> for padding, as where sources were trained without it"


def _flat_fields() -> list[tuple[str, Any, Any]]:
    """Return (name, type, field) of every option of TransformerConfig, flat."""
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
    """Return fairseq's nested config from a flat one (see `configs.plain`), with the position fields."""
    flat = flat_values(cfg)
    for key in ("max_source_positions", "max_target_positions"):
        if not isinstance(flat.get(key), int):
            flat[key] = DEFAULT_LENGTH
    return TransformerConfig.from_namespace(argparse.Namespace(**flat))


class RelPosTransformerModel(AdaptiveModel, TransformerModelBase):
    """fairseq's TransformerModel whose self-attention has a position scheme."""

    add_args = classmethod(add_flags)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> RelPosTransformerModel:
        """Build the model from the flat config.

        Raises:
            ValueError: a position flag that is wrong or does not apply, segments asked of a
                task that has none, or an adaptive softmax that is to share adaptive inputs.
        """
        config = nested(cfg)
        if config.segment_encoding != "none":
            raise ValueError(
                f"--segment-encoding {config.segment_encoding}: translation supplies no segments; leave it at none"
            )
        if config.adaptive_softmax_cutoff and config.tie_adaptive_weights:
            raise ValueError("--tie-adaptive-weights shares adaptive inputs, which translation has not: leave it out")
        if config.adaptive_softmax_cutoff and cfg.share_decoder_input_output_embed and not cfg.share_all_embeddings:
            logger.warning("--share-decoder-input-output-embed shares nothing: an adaptive softmax has its own weights")
        return super().build_model(config, task)

    @classmethod
    def build_encoder(cls, cfg: Any, src_dict: Any, embed_tokens: Any) -> RelPosEncoder:
        return RelPosEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: Any, tgt_dict: Any, embed_tokens: Any) -> RelPosDecoder:
        return RelPosDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)


def _both(*sizes: int) -> dict[str, int]:
    return widths("encoder", *sizes) | widths("decoder", *sizes)


SIZES: dict[str, dict[str, Any]] = {
    "relpos_transformer": {},
    "relpos_transformer_tiny": _both(128, 512, 4, 2),
    "relpos_transformer_iwslt_de_en": _both(512, 1024, 4, 6),
    "relpos_transformer_wmt_en_de": _both(512, 2048, 8, 6),
    "relpos_transformer_wmt_en_de_big": _both(1024, 4096, 16, 6) | {"dropout": 0.3},
}


globals().update(register_sizes(RelPosTransformerModel, RelPosTransformerConfig, SIZES, __name__))
