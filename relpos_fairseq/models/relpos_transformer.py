"""`relpos_transformer`: fairseq's encoder-decoder with any position scheme."""

from __future__ import annotations

from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models.transformer import TransformerModelBase

from relpos_fairseq.models.config.encoder_decoder import RelPosTransformerConfig, nested
from relpos_fairseq.models.config.sizes import register_sizes
from relpos_fairseq.models.decoder import RelPosDecoder
from relpos_fairseq.models.encoder import RelPosEncoder


class RelPosTransformerModel(TransformerModelBase):
    """fairseq's TransformerModel whose self-attention has a position scheme."""

    @classmethod
    def add_args(cls, parser: Any) -> None:
        """Every field of the named size's config; defaults are the config's, not argparse's."""
        gen_parser_from_dataclass(parser, getattr(cls, "__dataclass")(), delete_default=True)  # noqa: B009

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
                f"--segment-encoding {config.segment_encoding}: translation supplies no segments; "
                f"leave it at none"
            )
        return super().build_model(config, task)

    @classmethod
    def build_encoder(cls, cfg: Any, src_dict: Any, embed_tokens: Any) -> RelPosEncoder:
        """The encoder."""
        return RelPosEncoder(cfg, src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, cfg: Any, tgt_dict: Any, embed_tokens: Any) -> RelPosDecoder:
        """The decoder."""
        return RelPosDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)


def _widths(side: str, width: int, ffn: int, heads: int, layers: int) -> dict[str, int]:
    return {
        f"{side}_embed_dim": width,
        f"{side}_ffn_embed_dim": ffn,
        f"{side}_attention_heads": heads,
        f"{side}_layers": layers,
    }


def _both(width: int, ffn: int, heads: int, layers: int) -> dict[str, int]:
    return _widths("encoder", width, ffn, heads, layers) | _widths(
        "decoder", width, ffn, heads, layers
    )


SIZES: dict[str, dict[str, Any]] = {
    "relpos_transformer": {},
    "relpos_transformer_tiny": _both(128, 512, 4, 2),
    "relpos_transformer_iwslt_de_en": _both(512, 1024, 4, 6),
    "relpos_transformer_wmt_en_de": _both(512, 2048, 8, 6),
    "relpos_transformer_wmt_en_de_big": _both(1024, 4096, 16, 6) | {"dropout": 0.3},
}


globals().update(register_sizes(RelPosTransformerModel, RelPosTransformerConfig, SIZES, __name__))
