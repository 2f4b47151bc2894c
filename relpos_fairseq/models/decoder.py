"""The transformer decoder: fairseq's, whose layers take the positions explicitly."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor, nn

from relpos_fairseq.core.config import resolve
from relpos_fairseq.core.placement import DecodingTerms, Placement, PositionContext
from relpos_fairseq.core.positions import is_captured
from relpos_fairseq.core.scheme import AttentionShape
from relpos_fairseq.models.encoder import PositionedStack
from relpos_fairseq.modules.cross_attention import SOURCES, repeats
from relpos_fairseq.modules.transformer_layer import RelPosDecoderLayer, shard


def decoder_positions(
    cfg: Any,
    model: str = "translation",
    sides=("encoder", "decoder"),
    length_flag: str = "--max-target-positions",
    memory: int = 0,
) -> Placement:
    """Return the positions of a decoder after `memory` slots, from fairseq's nested config."""
    shape = AttentionShape(
        embed_dim=cfg.decoder.embed_dim,
        num_heads=cfg.decoder.attention_heads,
        max_positions=memory + cfg.max_target_positions,
        causal=True,
        length_flag=length_flag,
        seed_name="decoder",
    )
    return Placement(resolve(cfg, shape, model, side="decoder", sides=sides))


class AdaptiveModel(BaseFairseqModel):
    """A model with a decoder that may have an adaptive softmax."""

    def get_normalized_probs(self, net_output: tuple, log_probs: bool, sample: dict | None = None) -> Tensor:
        """Return probabilities or log-probabilities as fairseq does; in training, not those of an adaptive softmax.

        Raises:
            ValueError: the model is in training and has an adaptive softmax, whose probabilities have no gradient.
        """
        softmax = self.decoder.adaptive_softmax
        if softmax is not None and self.training:
            raise ValueError(
                f"an adaptive softmax (--adaptive-softmax-cutoff; here {softmax.cutoff}) is "
                f"trained by --criterion adaptive_loss and by no other: give that"
            )
        return super().get_normalized_probs(net_output, log_probs, sample)


class RelPosDecoder(PositionedStack, TransformerDecoderBase):
    """Transformer decoder with a position scheme in its self-attention."""

    layer_class = RelPosDecoderLayer

    @staticmethod
    def make_positions(cfg: Any) -> Placement:
        return decoder_positions(cfg)

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        """Build a layer with its own part of the position scheme."""
        placement, index = self._construction
        return shard(cfg, self.layer_class(cfg, placement, next(index), no_encoder_attn))

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: dict | None = None,
        **more: Any,
    ) -> tuple[Tensor, dict[str, list]]:
        """Return scores (B, T, V) and what else fairseq's decoder returns, as fairseq does.

        The first step of beam search, whose hypotheses of a sentence are equal, is evaluated once a sentence.
        """
        beams = self._equal_rows(prev_output_tokens, encoder_out, incremental_state)
        if beams == 1:
            return super().forward(prev_output_tokens, encoder_out, incremental_state, **more)
        enc, padding, sources = encoder_parts(encoder_out)
        one = {"encoder_out": [enc[:, ::beams]], "sources": [sources[::beams]]}
        one |= {} if padding is None else {"encoder_padding_mask": [padding[::beams]]}
        x, extra = super().forward(prev_output_tokens[::beams], one, incremental_state, **more)
        order = torch.arange(len(x), device=x.device).repeat_interleave(beams)
        for layer in self.layers:
            layer.self_attn.reorder_incremental_state(incremental_state, order)
            if layer.encoder_attn is not None:
                layer.encoder_attn.share(incremental_state, beams)
        attn = [part if part is None else part[order] for part in extra["attn"]]
        return x[order], extra | {"attn": attn, "inner_states": [state[:, order] for state in extra["inner_states"]]}

    def _equal_rows(self, tokens: Tensor, encoder_out: dict | None, state: dict | None) -> int:
        """Return how many successive rows of a first step are equal, in source and tokens; 1: it is no such step."""
        sources = encoder_parts(encoder_out)[2]
        if state is None or SOURCES in state or sources is None or torch.is_grad_enabled() or is_captured():
            return 1
        if any(part.training or getattr(part, "apply_during_inference", False) for part in self.modules()):
            return 1  # dropout makes rows differ
        beams = repeats(sources, len(tokens))
        alike = beams > 1 and torch.equal(tokens, tokens[::beams].repeat_interleave(beams, 0))
        return beams if alike else 1

    def extract_features_scriptable(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None,
        incremental_state: dict | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, list]]:
        """Return features (B, T, E) of tokens (B, T), as fairseq does; in decoding, of those that are not cached."""
        if alignment_layer is None:
            alignment_layer = self.num_layers - 1
        enc, enc_padding, sources = encoder_parts(encoder_out)
        if incremental_state is not None:
            incremental_state[SOURCES] = sources
        added, context = self.place(prev_output_tokens, incremental_state)
        if full_context_alignment:
            context = replace(context, causal=False)
        tokens = prev_output_tokens[:, context.positions.query_start :]
        x = self.embed(tokens, added).transpose(0, 1)
        padding = tokens.eq(self.padding_idx)
        padding = padding if is_captured() or padding.any() else None
        attn, inner_states = None, [x]
        for index, layer in enumerate(self.layers):
            aligned = index == alignment_layer
            x, layer_attn, _ = layer(
                x,
                enc,
                enc_padding,
                incremental_state=incremental_state,
                self_attn_mask=context,
                self_attn_padding_mask=padding,
                need_attn=aligned,
                need_head_weights=aligned,
            )
            inner_states.append(x)
            if layer_attn is not None and aligned:
                attn = layer_attn.float().to(x)
        if attn is not None:
            attn = attn[:alignment_heads].mean(dim=0)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        x = x.transpose(0, 1)
        if self.project_out_dim is not None:
            x = self.project_out_dim(x)
        return x, {"attn": [attn], "inner_states": inner_states}

    def reorder_incremental_state_scripting(self, incremental_state: dict, new_order: Tensor) -> None:
        """Select rows of the decoding state, layer by layer; fairseq would visit every module at every step."""
        regrouped = None
        for index in range(self.num_layers):  # an iterator would leave out layers at random under LayerDrop
            layer = self.layers[index]
            layer.self_attn.reorder_incremental_state(incremental_state, new_order)
            if layer.encoder_attn is not None:
                regrouped = layer.encoder_attn.reorder(incremental_state, new_order, regrouped)

    def place(self, tokens: Tensor, incremental_state: dict | None) -> tuple[Tensor | None, PositionContext]:
        """Evaluate the positions of all tokens; queries are all tokens, or in incremental decoding those not cached."""
        ids = (self.padding_idx, self.eos_idx)
        if incremental_state is None:
            return self.positions.of(tokens, *ids)
        kept = self.get_incremental_state(incremental_state, "positions") or DecodingTerms()
        self.set_incremental_state(incremental_state, "positions", kept)
        cache = self.layers[0].self_attn._get_input_buffer(incremental_state) if self.num_layers else None
        done = 0 if cache is None else min(cache.length, tokens.size(1) - 1)
        return self.positions.of(tokens, *ids, query_start=done, decoding=kept)

    def embed(self, tokens: Tensor, added: Tensor | None) -> Tensor:
        """Return the input of the first layer: (B, T, E)."""
        x = self.embed_scale * self.embed_tokens(tokens)
        if self.quant_noise is not None:
            x = self.quant_noise(x)
        if self.project_in_dim is not None:
            x = self.project_in_dim(x)
        if added is not None:
            x = x + added.to(x.dtype)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        return self.dropout_module(x)


def encoder_parts(encoder_out: dict[str, list[Tensor]] | None) -> tuple:
    """Return the encoder's output, its padding mask and the number of each row's source; each is None if missing."""
    parts = []
    for key in ("encoder_out", "encoder_padding_mask", "sources"):
        part = encoder_out.get(key) if encoder_out is not None else None
        parts.append(part[0] if part else None)
    return tuple(parts)
