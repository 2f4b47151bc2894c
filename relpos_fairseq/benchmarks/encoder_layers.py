"""Encoder layers as benchmarks run them: this project's by scheme, and fairseq's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from fairseq.modules.transformer_layer import TransformerEncoderLayerBase
from torch import Tensor, nn

from relpos_fairseq.benchmarks.settings import PLAIN, scheme_and_backend, takes_clip
from relpos_fairseq.models.config.roberta import RelPosRobertaConfig, namespace, transformer
from relpos_fairseq.models.roberta.encoder import RelPosSentenceEncoder
from relpos_fairseq.modules.transformer_layer import RelPosEncoderLayer, initialize_projections
from relpos_fairseq.positions import Positions

BASELINE = PLAIN


@dataclass(frozen=True)
class LayerSetting:
    """BERT's layer (post-norm, GELU) of these sizes, on (batch, length) tokens."""

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
    """A layer of `relpos_roberta` with what its stack evaluates once a forward pass.

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


class FairseqLayer(nn.Module):
    """fairseq's own encoder layer, which has no positions."""

    def __init__(self, setting: LayerSetting) -> None:
        super().__init__()
        nested = transformer(namespace(_config(setting), setting.length))
        self.layer = TransformerEncoderLayerBase(nested)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, None)


def _config(setting: LayerSetting) -> RelPosRobertaConfig:
    config = RelPosRobertaConfig()
    config.encoder_layers = 1
    config.encoder_embed_dim = setting.width
    config.encoder_ffn_embed_dim = setting.ffn
    config.encoder_attention_heads = setting.heads
    config.dropout = config.attention_dropout = setting.dropout
    return config


def layer_runner(layer: nn.Module, setting: LayerSetting, mode: str, time_first: bool = True) -> Callable[[], object]:
    """Return what is timed: a forward pass without gradients, or forward and backward.

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
