"""Encoder layers of other libraries, of the same sizes as ours; each only where it is installed.

Sizes agree in what all have: four projections, two feed-forward matrices, heads, widths.  Where a
library differs (T5 has no biases, x-transformers norms before), its layer is left as its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch
from torch import Tensor, nn

from relpos_fairseq.benchmarks.layers import Layer

_BERT = "transformers.models.bert.modeling_bert"
_DEBERTA = "transformers.models.deberta_v2.modeling_deberta_v2"
_FLASH_DEBERTA = "flashdeberta.model"
_T5 = "transformers.models.t5.modeling_t5"
_XL = "transformers.models.deprecated.transfo_xl.modeling_transfo_xl"
LEAST_TABLE = 512  # positions that BERT's and DeBERTa's tables cover at least, as published


@dataclass(frozen=True)
class Peer:
    """A layer of another library.

    Args:
        name: of its row.
        package: which must be installed.
        module: which it must have.
        like: our scheme that computes the same or the like.
        build: makes the layer.
        time_first: takes (T, B, E), not (B, T, E).
        cuda: runs on a GPU only.
    """

    name: str
    package: str
    module: str
    like: str
    build: Callable[[Layer], nn.Module]
    time_first: bool = False
    cuda: bool = False

    def absence(self, device: torch.device) -> str | None:
        """Why it cannot be measured, or None."""
        try:
            found = version(self.package)
        except PackageNotFoundError:
            return f"{self.package} is not installed"
        if self.cuda and device.type != "cuda":
            return f"{self.package} runs on a GPU only"
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            reason = str(error).splitlines()[0]
            return f"{self.package} {found} has no {self.module} that imports ({reason})"
        return None


class _Wrapped(nn.Module):
    """A module and how to call it."""

    def __init__(self, module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.module, x)


def _first(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)[0]


def _bert(kind: str) -> Callable[[Layer], nn.Module]:
    def build(setting: Layer) -> nn.Module:
        bert = importlib.import_module(_BERT)
        config = bert.BertConfig(
            hidden_size=setting.width,
            intermediate_size=setting.ffn,
            num_attention_heads=setting.heads,
            hidden_dropout_prob=setting.dropout,
            attention_probs_dropout_prob=setting.dropout,
            max_position_embeddings=max(setting.length, LEAST_TABLE),
            position_embedding_type=kind,
        )
        # Its SDPA path knows absolute positions only.
        config._attn_implementation = "sdpa" if kind == "absolute" else "eager"
        return _Wrapped(bert.BertLayer(config), _first)

    return build


def _deberta(module: str, encoder: str) -> Callable[[Layer], nn.Module]:
    def build(setting: Layer) -> nn.Module:
        from transformers import DebertaV2Config

        config = DebertaV2Config(  # as deberta-v3-base
            hidden_size=setting.width,
            intermediate_size=setting.ffn,
            num_attention_heads=setting.heads,
            num_hidden_layers=1,
            hidden_dropout_prob=setting.dropout,
            attention_probs_dropout_prob=setting.dropout,
            max_position_embeddings=max(setting.length, LEAST_TABLE),
            relative_attention=True,
            position_buckets=256,
            pos_att_type="p2c|c2p",
            share_att_key=True,
            norm_rel_ebd="layer_norm",
        )
        made = getattr(importlib.import_module(module), encoder)(config)
        rows = (setting.batch, setting.length)
        mask = torch.ones(rows, dtype=torch.long, device=setting.device)
        return _Wrapped(made, lambda inner, x: inner(x, mask, output_hidden_states=False)[0])

    return build


def _t5(setting: Layer) -> nn.Module:
    t5 = importlib.import_module(_T5)
    config = t5.T5Config(
        d_model=setting.width,
        d_kv=setting.width // setting.heads,
        d_ff=setting.ffn,
        num_heads=setting.heads,
        dropout_rate=setting.dropout,
        feed_forward_proj="gelu",
    )
    return _Wrapped(t5.T5Block(config, has_relative_attention_bias=True), _first)


def _transformer_xl(setting: Layer) -> nn.Module:
    xl = importlib.import_module(_XL)
    head_dim = setting.width // setting.heads
    layer = xl.RelPartialLearnableDecoderLayer(
        setting.heads, setting.width, head_dim, setting.ffn, setting.dropout,
        dropatt=setting.dropout, pre_lnorm=False,
    )  # fmt: skip
    for bias in (layer.dec_attn.r_w_bias, layer.dec_attn.r_r_bias):
        nn.init.zeros_(bias)  # the library leaves them as memory was
    ones = torch.ones(setting.length, setting.length, dtype=torch.bool, device=setting.device)
    future = ones.triu(1)[:, :, None]  # (T, S, 1): this library's shift of rows is causal
    places = torch.arange(setting.length - 1, -1, -1.0, device=setting.device)
    r = xl.PositionalEmbedding(setting.width).to(setting.device)(places).to(setting.dtype)
    return _Wrapped(layer, lambda inner, x: inner(x, r, dec_attn_mask=future)[0])


def _x_transformers(**options: bool) -> Callable[[Layer], nn.Module]:
    def build(setting: Layer) -> nn.Module:
        from x_transformers import Encoder

        return Encoder(
            dim=setting.width,
            depth=1,
            heads=setting.heads,
            attn_dim_head=setting.width // setting.heads,
            ff_mult=setting.ffn / setting.width,
            attn_dropout=setting.dropout,
            ff_dropout=setting.dropout,
            **options,
        )

    return build


def _of_transformers(name: str, module: str, like: str, build: Callable, **more: bool) -> Peer:
    return Peer(f"{name} (transformers)", "transformers", module, like, build, **more)


def _of_x_transformers(name: str, like: str, **options: bool) -> Peer:
    package, module = "x-transformers", "x_transformers"
    return Peer(f"{name} ({package})", package, module, like, _x_transformers(**options))


PEERS = (
    _of_transformers("BERT absolute", _BERT, "none", _bert("absolute")),
    _of_transformers("BERT relative_key", _BERT, "shaw_keys", _bert("relative_key")),
    _of_transformers("BERT relative_key_query", _BERT, "m4", _bert("relative_key_query")),
    _of_transformers("DeBERTa-v2", _DEBERTA, "deberta", _deberta(_DEBERTA, "DebertaV2Encoder")),
    _of_transformers("T5", _T5, "t5", _t5),
    _of_transformers(
        "Transformer-XL, causal", _XL, "transformer_xl", _transformer_xl, time_first=True
    ),
    Peer("FlashDeBERTa (flashdeberta)", "flashdeberta", _FLASH_DEBERTA, "deberta",
         _deberta(_FLASH_DEBERTA, "FlashDebertaV2Encoder"), cuda=True),
    _of_x_transformers("T5's bias", "t5", rel_pos_bias=True),
    _of_x_transformers("rotary", "rope", rotary_pos_emb=True, attn_flash=True),
    _of_x_transformers("ALiBi", "alibi", alibi_pos_bias=True, attn_flash=True),
)  # fmt: skip
