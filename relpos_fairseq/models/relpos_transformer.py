"""`relpos_transformer`: fairseq's encoder-decoder with any position scheme."""

from __future__ import annotations

from typing import Any

from fairseq.models.transformer import TransformerModelBase

from relpos_fairseq.models.config.encoder_decoder import RelPosTransformerConfig, nested
from relpos_fairseq.models.config.sizes import add_flags, register_sizes, widths
from relpos_fairseq.models.decoder import RelPosDecoder
from relpos_fairseq.models.encoder import RelPosEncoder


class RelPosTransformerModel(TransformerModelBase):
    """fairseq's TransformerModel whose self-attention has a position scheme."""

    add_args = classmethod(add_flags)

    @classmethod
    def build_model(cls, cfg: Any, task: Any) -> RelPosTransformerModel:
        """Build from the flat config.

        Raises:
            ValueError: a position flag that is wrong or does not apply, or segments asked of a
                task that has none.
        """
        config = nested(cfg)
        if config.segment_encoding != "none":
            raise ValueError(
                f"--segment-encoding {config.segment_encoding}: translation supplies no segments; leave it at none"
            )
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
