"""Build encoder layers of equal sizes: this package's, fairseq's and other libraries'."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import Tensor, nn

from relpos_fairseq.core.positions import Positions
from relpos_fairseq.io.manifests import version_of
from relpos_fairseq.io.reading import read_json
from relpos_fairseq.lab.benchmarks.workload import PLAIN, scheme_and_backend, takes_clip
from relpos_fairseq.models.configs import RelPosRobertaConfig, namespace, transformer
from relpos_fairseq.models.relpos_roberta import RelPosSentenceEncoder
from relpos_fairseq.modules.transformer_layer import RelPosEncoderLayer, initialize_projections

# ---------------------------------------------------------------------------------------------------------------------
# Layers of this package and of fairseq.


BASELINE = PLAIN


@dataclass(frozen=True)
class LayerSetting:
    """Sizes of BERT's layer (post-norm, GELU) and of its input of (batch, length) tokens."""

    width: int  # e
    ffn: int  # width of the feed-forward layer
    heads: int  # number of heads
    batch: int  # rows
    length: int  # tokens of each
    clip: int  # clip distance of schemes that take one; 0: unclipped
    dropout: float  # everywhere, in training
    dtype: torch.dtype  # of parameters
    device: torch.device  # where it runs


class OurLayer(nn.Module):
    """A layer of `relpos_roberta`, with the positions that its stack evaluates once a forward pass.

    `name` is a scheme (and backend: `label_of`).
    """

    def __init__(self, name: str, setting: LayerSetting) -> None:
        super().__init__()
        config = _config(setting)
        scheme, config.attention_backend = scheme_and_backend(name)
        config.position_scheme = scheme
        if takes_clip(scheme):
            config.position_clip_distance = str(setting.clip)
        nested = transformer(namespace(config, setting.length))
        self.positions = RelPosSentenceEncoder.make_positions(nested)
        self.layers = nn.ModuleList([RelPosEncoderLayer(nested, self.positions, 0)])
        initialize_projections(self.positions, self.layers)

    def forward(self, x: Tensor) -> Tensor:
        positions = Positions(len(x), len(x), device=x.device)
        added = self.positions.embed(positions)
        if added is not None:
            x = x + added.transpose(0, 1)
        return self.layers[0](x, None, self.positions.context(positions))


def fairseq_layer(setting: LayerSetting) -> nn.Module:
    """Build fairseq's own encoder layer, which has no positions."""
    nested = transformer(namespace(_config(setting), setting.length))
    return _Wrapped(TransformerEncoderLayerBase(nested), lambda inner, x: inner(x, None))


def _config(setting: LayerSetting) -> RelPosRobertaConfig:
    config = RelPosRobertaConfig()
    config.encoder_layers = 1
    config.encoder_embed_dim = setting.width
    config.encoder_ffn_embed_dim = setting.ffn
    config.encoder_attention_heads = setting.heads
    config.dropout = config.attention_dropout = setting.dropout
    return config


def layer_runner(layer: nn.Module, setting: LayerSetting, mode: str, time_first: bool = True) -> Callable[[], object]:
    """Return a function that makes a forward pass without gradients, or a forward and backward pass.

    The layer takes and returns (T, B, E), or (B, T, E) where not `time_first`.
    """
    layer = layer.to(setting.device, setting.dtype).train(mode == "train")
    rows = (setting.length, setting.batch) if time_first else (setting.batch, setting.length)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(*rows, setting.width, generator=generator).to(setting.device, setting.dtype)
    if mode == "forward":
        return torch.no_grad()(lambda: layer(x))
    x.requires_grad_()
    wanted = [x, *(part for part in layer.parameters() if part.requires_grad)]
    upstream = torch.ones_like(x)
    return lambda: torch.autograd.grad(layer(x), wanted, upstream, allow_unused=True)


# ---------------------------------------------------------------------------------------------------------------------
# Layers of other libraries, each only where the library is installed.  Sizes agree in what all have: four projections,
# two feed-forward matrices, heads, widths.  Where a library differs (T5 has no biases, x-transformers normalizes
# before), its layer stays as the library has it.

LEAST_TABLE = 512  # positions that BERT's and DeBERTa's tables cover at least, as published


@dataclass(frozen=True)
class Peer:
    """A layer of another library, and the scheme that it is like."""

    name: str  # of its row
    package: str  # which must be installed
    module: str  # which it must have
    like: str  # our scheme that computes the same or the like
    build: str  # the function of this file that makes the layer, of BUILDERS
    options: dict[str, Any] = field(default_factory=dict)  # of that function
    time_first: bool = False  # takes (T, B, E), not (B, T, E)
    cuda: bool = False  # runs on a GPU only

    def absence(self, device: torch.device) -> str | None:
        """Return why the layer cannot be measured, or None."""
        if (found := version_of(self.package)) is None:
            return f"{self.package} is not installed"
        if self.cuda and device.type != "cuda":
            return f"{self.package} runs on a GPU only"
        try:
            importlib.import_module(self.module)
        except ImportError as error:
            reason = str(error).splitlines()[0]
            return f"{self.package} {found} has no {self.module} that imports ({reason})"
        return None

    def layer(self, setting: LayerSetting) -> nn.Module:
        """Build the layer."""
        build = BUILDERS[self.build]
        return build(importlib.import_module(self.module), setting, **self.options)


class _Wrapped(nn.Module):
    """A module whose forward pass is another call of it."""

    def __init__(self, module: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.module, self.call = module, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.module, x)


def _first(module: nn.Module, x: Tensor) -> Tensor:
    return module(x)[0]


def bert_layer(library: ModuleType, setting: LayerSetting, kind: str) -> nn.Module:
    """Build BERT's layer with a `position_embedding_type`."""
    config = library.BertConfig(
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
    return _Wrapped(library.BertLayer(config), _first)


def disentangled_encoder(library: ModuleType, setting: LayerSetting, encoder: str) -> nn.Module:
    """Build an encoder of one layer of DeBERTa, as deberta-v3-base."""
    from transformers import DebertaV2Config

    config = DebertaV2Config(
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
    rows = (setting.batch, setting.length)
    mask = torch.ones(rows, dtype=torch.long, device=setting.device)
    built = getattr(library, encoder)(config)
    return _Wrapped(built, lambda inner, x: inner(x, mask, output_hidden_states=False)[0])


def bucketed_block(library: ModuleType, setting: LayerSetting) -> nn.Module:
    """Build a block of T5."""
    config = library.T5Config(
        d_model=setting.width,
        d_kv=setting.width // setting.heads,
        d_ff=setting.ffn,
        num_heads=setting.heads,
        dropout_rate=setting.dropout,
        feed_forward_proj="gelu",
    )
    block = library.T5Block(config, has_relative_attention_bias=True)
    if "cache_position" not in inspect.signature(block.forward).parameters:  # until 4.46
        return _Wrapped(block, _first)
    places = torch.arange(setting.length, device=setting.device)
    return _Wrapped(block, lambda inner, x: inner(x, cache_position=places)[0])


def recurrent_layer(library: ModuleType, setting: LayerSetting) -> nn.Module:
    """Build a layer of Transformer-XL, which sees the past alone."""
    heads, width, length = setting.heads, setting.width, setting.length
    layer = library.RelPartialLearnableDecoderLayer(
        heads, width, width // heads, setting.ffn, setting.dropout, dropatt=setting.dropout
    )
    for bias in (layer.dec_attn.r_w_bias, layer.dec_attn.r_r_bias):
        nn.init.zeros_(bias)  # the library leaves them as memory was
    ones = torch.ones(length, length, dtype=torch.bool, device=setting.device)
    future = ones.triu(1)[:, :, None]  # (T, S, 1): this library's shift of rows is causal
    places = torch.arange(length - 1, -1, -1.0, device=setting.device)
    r = library.PositionalEmbedding(width).to(setting.device)(places).to(setting.dtype)
    return _Wrapped(layer, lambda inner, x: inner(x, r, dec_attn_mask=future)[0])


def x_encoder(library: ModuleType, setting: LayerSetting, **options: bool) -> nn.Module:
    """Build an encoder of one layer of x-transformers."""
    return library.Encoder(
        dim=setting.width,
        depth=1,
        heads=setting.heads,
        attn_dim_head=setting.width // setting.heads,
        ff_mult=setting.ffn / setting.width,
        attn_dropout=setting.dropout,
        ff_dropout=setting.dropout,
        **options,
    )


BUILDERS = {
    build.__name__: build for build in (bert_layer, disentangled_encoder, bucketed_block, recurrent_layer, x_encoder)
}
# A file of its own: no scheme is named in code outside `schemes/`.
PEERS = tuple(Peer(**entry) for entry in read_json(Path(__file__).with_name("peers.json"), list[dict[str, object]]))
PACKAGES = tuple(dict.fromkeys(peer.package for peer in PEERS))
