"""The transformer encoder: fairseq's, whose layers take the positions explicitly."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from fairseq.models.transformer import TransformerEncoderBase
from torch import Tensor, nn

from relpos_fairseq.core.config import resolve
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.core.positions import is_captured
from relpos_fairseq.core.scheme import AttentionShape
from relpos_fairseq.modules.transformer_layer import RelPosEncoderLayer, initialize_projections, shard
from relpos_fairseq.nn.packed import pack

UNLIMITED = 2**31 - 1  # where positions set no limit
# Padding is computed with the tokens up to this share of a batch, and up to so many numbers of a layer's input, on a
# CPU or elsewhere, where nobody has measured it.
SHARE, PADDED, PADDED_ELSEWHERE = 0.05, 2**13, 2**18


class TableLimit(int):
    """A longest length with the name of the scheme whose table sets it, for error messages."""

    scheme: str

    @classmethod
    def of(cls, length: int, scheme: str) -> TableLimit:
        limit = cls(length)
        limit.scheme = scheme
        return limit


def limit_of(placement: Placement) -> int:
    """Return the longest input that a placement allows, in the form of fairseq's `max_positions`."""
    longest = placement.plan.longest
    return UNLIMITED if longest is None else TableLimit.of(longest, placement.plan.name)


def unpadded(padding: Tensor, width: int) -> Tensor | None:
    """Return the places in (T B) of the tokens that are no padding (B, T), or None: too little is padding."""
    if is_captured():
        return None
    tokens = (~padding).t().flatten().nonzero().flatten()
    left_out = padding.numel() - len(tokens)
    little = max(SHARE * padding.numel(), (PADDED if padding.is_cpu else PADDED_ELSEWHERE) / width)
    return tokens if left_out > little else None


def encoder_shape(cfg: Any, length_flag: str) -> AttentionShape:
    """Return the attention of an encoder, from fairseq's nested config."""
    return AttentionShape(
        embed_dim=cfg.encoder.embed_dim,
        num_heads=cfg.encoder.attention_heads,
        max_positions=cfg.max_source_positions,
        length_flag=length_flag,
        seed_name="encoder",
    )


class PositionedStack(nn.Module):
    """What the encoder and the decoder have in common, to derive from before fairseq's class."""

    layers: nn.ModuleList
    make_positions: Callable[[Any], Placement]

    def __init__(self, cfg: Any, dictionary: Any, *args: Any, **more: Any) -> None:
        """Build fairseq's encoder or decoder with the position schemes that `cfg` names."""
        placement = self.make_positions(cfg)
        # fairseq's constructor builds layers before modules of ours may be assigned.
        self._construction = (placement, itertools.count())
        super().__init__(cfg, dictionary, *args, **more)
        del self._construction
        self.positions = placement
        placement.check_before(self)
        self.eos_idx = dictionary.eos()
        self.initialize(cfg)
        initialize_projections(placement, self.layers)

    def initialize(self, cfg: Any) -> None:
        """Redraw initial values that differ from fairseq's; a scheme's parameters are never redrawn."""

    def max_positions(self) -> int:
        return limit_of(self.positions)

    def make_generation_fast_(self, **unused: Any) -> None:
        """Pack the linear layers, as fairseq's commands ask every model before they generate."""
        pack(self)


class RelPosEncoder(PositionedStack, TransformerEncoderBase):
    """Transformer encoder with a position scheme."""

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: nn.Embedding, return_fc: bool = False) -> None:
        """Build fairseq's encoder with the position schemes that `cfg` names."""
        super().__init__(cfg, dictionary, embed_tokens, return_fc=return_fc)
        self.skips_end = getattr(cfg, "encoder_skips_end", False)

    @staticmethod
    def make_positions(cfg: Any) -> Placement:
        shape = encoder_shape(cfg, "--max-source-positions")
        return Placement(resolve(cfg, shape, "translation", side="encoder", sides=("encoder", "decoder")))

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        """Build a layer with its own part of the position scheme."""
        placement, index = self._construction
        return shard(cfg, RelPosEncoderLayer(cfg, placement, next(index), self.return_fc))

    def forward_scriptable(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> dict[str, list[Tensor]]:
        """Encode tokens (B, S), padded on either side, with segment numbers (B, S); return what fairseq's encoder does.

        With --encoder-skips-end </s> counts as padding, but in a source that is </s> alone.
        """
        if self.skips_end:
            end = src_tokens.eq(self.eos_idx)
            others = (~end & src_tokens.ne(self.padding_idx)).any(dim=1, keepdim=True)
            src_tokens = src_tokens.masked_fill(end & others, self.padding_idx)
        padding = src_tokens.eq(self.padding_idx)
        has_pads = is_captured() or bool(padding.any())
        added, context = self.positions.of(src_tokens, self.padding_idx, self.eos_idx, segments=segments)
        x, embedding = self.embed(src_tokens, added, token_embeddings)
        if has_pads:
            x = x * (~padding).unsqueeze(-1).type_as(x)
            context = replace(context, tokens=unpadded(padding, x.size(-1)))
        x = x.transpose(0, 1)  # (S, B, E)
        states, fc_results = [x] if return_all_hiddens else [], []
        for layer in self.layers:
            x = layer(x, encoder_padding_mask=padding if has_pads else None, context=context)
            x, fc_result = x if isinstance(x, tuple) else (x, None)
            if return_all_hiddens:
                states.append(x)
                fc_results.append(fc_result)
        if self.layer_norm is not None:
            x = self.layer_norm(x)
        return {
            "encoder_out": [x],  # (S, B, E)
            "encoder_padding_mask": [padding],  # (B, S)
            "encoder_embedding": [embedding],  # (B, S, E)
            "encoder_states": states,
            "fc_results": fc_results,
            "src_tokens": [],
            "src_lengths": [(~padding).sum(dim=1, dtype=src_tokens.dtype)[:, None]],
        }

    def embed(
        self, tokens: Tensor, added: Tensor | None, token_embeddings: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the input of the first layer (B, S, E), and the scaled token embedding."""
        if token_embeddings is None:
            token_embeddings = self.embed_tokens(tokens)
        x = embedding = self.embed_scale * token_embeddings
        if added is not None:
            x = x + added.to(x.dtype)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        x = self.dropout_module(x)
        if self.quant_noise is not None:
            x = self.quant_noise(x)
        return x, embedding

    def reorder_encoder_out(
        self, encoder_out: dict[str, list[Tensor]], new_order: Tensor, cached: bool = False
    ) -> dict[str, list[Tensor]]:
        """Select rows of the encoder's output, as beam search does; copy nothing if each row keeps its source.

        `sources` (B,) numbers the source sentence of each row: all beams of one sentence are equal.  Where the decoder
        has cached what it reads of them, only these numbers are selected.
        """
        known = encoder_out.get("sources")
        if not known:
            batch = encoder_out["encoder_out"][0].size(1)
            known = [torch.arange(batch, device=new_order.device)]
        sources = known[0].index_select(0, new_order)
        if torch.equal(sources, known[0]):
            return encoder_out
        kept = encoder_out if cached else super().reorder_encoder_out(encoder_out, new_order)
        return kept | {"sources": [sources]}
