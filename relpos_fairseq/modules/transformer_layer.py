"""fairseq's transformer layers with the `PositionContext` as an explicit argument.

The encoder's layer takes it as `context`; the decoder's as `self_attn_mask`, since fairseq's forward
passes that argument to self-attention unchanged.  Activation checkpointing is torch's non-reentrant
one: it recomputes the layer with the same context, and gradients reach the tables that layers share
(fairseq's own wrapper cuts these gradients off).
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any, cast

import torch
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from relpos_fairseq.core.placement import Placement, PositionContext
from relpos_fairseq.modules.cross_attention import CrossAttention
from relpos_fairseq.modules.layer_step import LayerStep
from relpos_fairseq.modules.multihead_attention import RelPosMultiheadAttention
from relpos_fairseq.nn.self_attention import check_backend

STEP = {"self_attn_mask", "self_attn_padding_mask"}  # arguments of a step of decoding by the kernel, beside the others


class _Layer(nn.Module):
    """A layer with the self-attention of this package; recomputes its forward where the config asks for it.

    It stands before fairseq's layer in the order of bases.
    """

    side: str  # encoder or decoder

    def __init__(self, cfg: Any, placement: Placement, layer: int, *args: Any) -> None:
        # fairseq's constructor asks build_self_attention before attributes may be set.
        heads = getattr(cfg, self.side).attention_heads
        self._make_attention = lambda dim: build_self_attention(cfg, dim, heads, placement, layer)
        super().__init__(cfg, *args)
        del self._make_attention
        self.checkpoint_activations = cfg.checkpoint_activations or cfg.offload_activations
        self.offload_activations = cfg.offload_activations

    def build_self_attention(self, embed_dim: int, cfg: Any, **unused: Any) -> RelPosMultiheadAttention:
        return self._make_attention(embed_dim)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer, with recomputation where the config asks for it and gradients are enabled."""
        decoding = kwargs.get("incremental_state") is not None  # a cache must not grow twice
        if decoding or not (self.checkpoint_activations and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        offload = save_on_cpu() if self.offload_activations else contextlib.nullcontext()
        with offload:
            return checkpoint(super().forward, *args, use_reentrant=False, **kwargs)


def build_self_attention(
    cfg: Any, embed_dim: int, num_heads: int, placement: Placement, layer: int
) -> RelPosMultiheadAttention:
    """Build the self-attention of a layer, counted from 0, with the schemes and the backend of its placement.

    Raises:
        ValueError: the backend that the flags name cannot evaluate the position scheme.
    """
    schemes = placement.layer_schemes(layer)
    attention = RelPosMultiheadAttention(
        embed_dim,
        num_heads,
        schemes,
        placement.plan.of_layer(layer).scale,
        dropout=cfg.attention_dropout,
        backend=placement.plan.backend,
        q_noise=cfg.quant_noise.pq,
        qn_block_size=cfg.quant_noise.pq_block_size,
    )
    if layer == 0:
        check_backend(placement, schemes, embed_dim, num_heads)
    return attention


class _EncoderLayer(TransformerEncoderLayerBase):
    side = "encoder"

    def __init__(self, cfg: Any, return_fc: bool = False) -> None:
        super().__init__(cfg, return_fc=return_fc)
        self.can_use_fastpath = False

    def forward(
        self, x: Tensor, encoder_padding_mask: Tensor | None, context: PositionContext
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run fairseq's encoder layer on x (T, B, E); where the context names tokens, on these, zeros at others."""
        shape, residual = x.shape, context.unpad(x)
        if self.normalize_before:
            x = context.pad(self.self_attn_layer_norm(residual), shape)
        x, _ = self.self_attn(x, key_padding_mask=encoder_padding_mask, attn_mask=context)
        x = self.residual_connection(self.dropout_module(context.unpad(x)), residual)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)

        residual = x
        if self.normalize_before:
            x = self.final_layer_norm(x)
        x = self.activation_dropout_module(self.activation_fn(self.fc1(x)))
        fc_result = x = self.fc2(x)
        x = self.residual_connection(self.dropout_module(x), residual)
        if not self.normalize_before:
            x = self.final_layer_norm(x)
        x = context.pad(x, shape)
        return (x, context.pad(fc_result, shape)) if self.return_fc else x


class _DecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer with the self-attention of this package."""

    side = "decoder"

    def __init__(self, cfg: Any, no_encoder_attn: bool = False) -> None:
        super().__init__(cfg, no_encoder_attn=no_encoder_attn)
        self.need_attn = False  # the decoder asks the one layer whose probabilities it keeps
        self.step: LayerStep | None = None  # where the linear layers are packed

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> CrossAttention:
        return CrossAttention(
            embed_dim,
            cfg.decoder.attention_heads,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            dropout=cfg.attention_dropout,
            encoder_decoder_attention=True,
            q_noise=self.quant_noise,
            qn_block_size=self.quant_noise_block_size,
        )

    def join(self) -> None:
        """Evaluate steps of decoding by the kernel from now on, if it computes what this layer does."""
        self.step = LayerStep(self) if LayerStep.serves(self) else None

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Run fairseq's decoder layer on x (T, B, E); a step of decoding by the kernel in C, where it serves."""
        weighs = need_attn or need_head_weights
        if self.step is not None and incremental_state is not None and not weighs and more.keys() <= STEP:
            given = more["self_attn_mask"], more.get("self_attn_padding_mask"), encoder_out, encoder_padding_mask
            stepped = self.step(x, *given, incremental_state)
            if stepped is not None:
                return stepped, None, None
        found: tuple[Tensor, Tensor | None, None] = super().forward(
            x,
            encoder_out,
            encoder_padding_mask,
            incremental_state,
            need_attn=need_attn,
            need_head_weights=need_head_weights,
            **more,
        )
        return found


class RelPosEncoderLayer(_Layer, _EncoderLayer):
    """fairseq's encoder layer with the self-attention of this package; `forward` takes a PositionContext."""


class RelPosDecoderLayer(_Layer, _DecoderLayer):
    """A decoder layer; takes the PositionContext as `self_attn_mask`."""


class _MemoryLayer(_DecoderLayer):
    """A decoder layer that attends over [memory, segment]."""

    def forward(
        self, x: Tensor, *args: Any, memory: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, None]:
        """Run fairseq's decoder layer on x (T, B, E), after memory (M, B, E) of the same layer's inputs."""
        context: PositionContext = kwargs.pop("self_attn_mask")
        if memory is not None and len(memory):
            if self.normalize_before:
                memory = self.self_attn_layer_norm(memory)
            context = replace(context, memory=memory)
        return super().forward(x, *args, self_attn_mask=context, **kwargs)


class RelPosMemoryLayer(_Layer, _MemoryLayer):
    """A decoder layer with memory; see `_MemoryLayer.forward`."""


def shard(cfg: Any, layer: nn.Module) -> nn.Module:
    """Return a layer that says whether its parameters are sharded apart from others, as fairseq's builders decide."""
    checkpointed = cfg.checkpoint_activations or cfg.offload_activations
    count = sum(parameter.numel() for parameter in layer.parameters())
    layer.shards_apart = checkpointed or count >= cfg.min_params_to_wrap
    return layer


def initialize_projections(placement: Placement, layers: nn.ModuleList) -> None:
    """Let schemes set the biases of projections, after the model's own initialisation."""
    placement.plan.check_layers(len(layers))
    for index in range(len(layers)):  # an iterator would leave out layers at random under LayerDrop
        attention = cast(RelPosMultiheadAttention, layers[index].self_attn)
        for scheme in (*placement.shared_by(index), *attention.position):
            scheme.initialize_projections(attention.q_proj, attention.k_proj)
