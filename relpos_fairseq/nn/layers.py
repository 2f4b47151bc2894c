"""`PositionAttention` and transformer layers around it, batch first, with every position scheme of this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from relpos_fairseq.core.config import OPTIONS, PositionConfig, resolve
from relpos_fairseq.core.options import AttentionShape
from relpos_fairseq.core.placement import DecodingTerms, Placement
from relpos_fairseq.nn.decoding_cache import DecodingCache
from relpos_fairseq.nn.self_attention import SelfAttention, check_backend

PADDING, NO_TOKEN = 1, 2  # ids by which a mask stands for tokens
SEGMENTS = ("segment_encoding", "segment_share", "num_segments")
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "gelu": nn.functional.gelu}


class AttentionCache(DecodingCache):
    """Keys, values and terms of a `PositionAttention` between steps of decoding: one for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = DecodingTerms()

    def reorder(self, order: Tensor, spares: dict | None = None) -> None:
        """Select the rows `order` (B',) of the batch, as beam search does."""
        super().reorder(order, {} if spares is None else spares)


class PositionAttention(SelfAttention):
    """Multi-head self-attention (B, T, E) to (B, T, E) with a position scheme; no part of fairseq is needed.

    The scale of the logits, the rotation of queries and keys, and tables of the scheme are those of the paper
    (`relpos schemes NAME`). A scheme that acts on the input (`learned`, `sinusoidal`) is
    added to this module's input: in a stack, give it to the first layer alone. `sentence` needs token ids, which
    this module does not see, and is refused.

    Args:
        embed_dim: width E.
        num_heads: number of heads H.
        scheme: a name of `relpos schemes`, or several joined by `+`.
        causal: a query does not see later keys.
        max_positions: longest input, which sizes absolute and unclipped tables.
        dropout: dropout probability of attention probabilities.
        backend: `auto`, or the name of the backend that evaluates attention.
        model: the kind of model, which decides what `auto` means for the clip distance: `translation`,
            `language_model` or `masked_lm`.
        options: options of the scheme by the names of their flags, with or without `position_`: `clip_distance=16`,
            `share="heads"`, `segment_encoding="head"`.

    Raises:
        ValueError: names the scheme or the option, its value and what is possible.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        scheme: str,
        *,
        causal: bool = False,
        max_positions: int = 512,
        dropout: float = 0.0,
        backend: str = "auto",
        model: str = "translation",
        **options: Any,
    ) -> None:
        shape = AttentionShape(embed_dim, num_heads, max_positions, causal, "max_positions", "attention")
        plan = resolve(_config(scheme, backend, options), shape, model)
        if plan.parts:
            raise ValueError(f"position scheme {scheme}: one attention has one scheme: give a part of it to each layer")
        placement = Placement(plan)
        schemes = placement.layer_schemes(0)
        if any(member.counts_sentences for member in placement.shared):
            raise ValueError(f"position scheme {scheme}: `sentence` counts tokens after each </s>, which no mask shows")
        super().__init__(embed_dim, num_heads, schemes, plan.scale, dropout=dropout, backend=plan.backend)
        self.positions = placement
        placement.check_before(self)
        check_backend(placement, schemes, embed_dim, num_heads)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        *,
        cache: AttentionCache | None = None,
        memory: Tensor | None = None,
        segments: Tensor | None = None,
        window: int | None = None,
        need_weights: bool = False,
    ) -> Any:
        """Attend from each token of `x` to these tokens, and to those of a cache or memory before them.

        Args:
            x: (B, T, E).
            key_padding_mask: (B, T) True at padding of these tokens, wherever it stands, or (B, M + T) with a memory.
            cache: of earlier steps of decoding; these tokens are appended to it. Needs `causal`.
            memory: (B, M, E) states of an earlier segment (Transformer-XL), which are keys and values alone.
            segments: (B, S) number of each key's segment, all S keys of cache or memory included.
            window: how many keys a query sees at most, the last of them its own; None: all.
            need_weights: return probabilities too.

        Returns:
            (B, T, E), or with `need_weights` a pair of that and the probabilities (B, H, T, S).

        Raises:
            ValueError: arguments exclude each other, or the input is longer than the scheme's tables.
        """
        if cache is not None and (memory is not None or not self.positions.plan.shape.causal):
            raise ValueError("cache needs causal=True, and no memory beside it")
        before = 0 if memory is None else memory.size(1)
        if cache is not None:
            before = cache.length
        mask = None if key_padding_mask is None else key_padding_mask.bool()
        self._check(x, mask, segments, before, memory is not None)
        tokens = x.new_zeros(x.size(0), before + x.size(1), dtype=torch.long)
        if cache is not None and cache.padding is not None:
            tokens[:, :before] = cache.padding.long() * PADDING
        if mask is not None:
            tokens[:, -mask.size(1) :] = mask.long() * PADDING
        added, context = self.positions.of(
            tokens,
            PADDING,
            NO_TOKEN,
            query_start=before,
            segments=segments,
            decoding=None if cache is None else cache.shared,
        )
        context = replace(context, window=window, memory=None if memory is None else memory.transpose(0, 1))
        query = (x if added is None else x + added.to(x.dtype)).transpose(0, 1)
        if mask is not None and memory is not None and mask.size(1) == x.size(1):
            mask = nn.functional.pad(mask, (before, 0))
        out, probs = self.attend(query, context, mask, cache, need_weights)
        return (out.transpose(0, 1), probs) if need_weights else out.transpose(0, 1)

    def _check(self, x: Tensor, mask: Tensor | None, segments: Tensor | None, before: int, with_memory: bool) -> None:
        """Raise a ValueError for a tensor whose shape is not what `forward` says."""
        if x.dim() != 3 or x.size(2) != self.embed_dim:
            raise ValueError(f"x must be (batch, length, {self.embed_dim}), got {tuple(x.shape)}")
        batch, length, _ = x.shape
        lengths = (length, before + length) if with_memory else (length,)
        if mask is not None and tuple(mask.shape) not in [(batch, n) for n in lengths]:
            wanted = " or ".join(str((batch, n)) for n in lengths)
            raise ValueError(f"key_padding_mask must be {wanted}, got {tuple(mask.shape)}")
        wants = self.positions.plan.segment_encoding != "none"
        if segments is None and wants or segments is not None and segments.shape != (batch, before + length):
            got = None if segments is None else tuple(segments.shape)
            raise ValueError(f"segments must be {(batch, before + length)}, a number for each key, got {got}")


def _config(scheme: str, backend: str, options: dict[str, Any]) -> Any:
    """Return the flags that the arguments of `PositionAttention` stand for."""
    names = {option.name: option.field for option in OPTIONS} | {option.field: option.field for option in OPTIONS}
    names |= {name: name for name in SEGMENTS}
    if unknown := options.keys() - names.keys():
        raise ValueError(f"no option {', '.join(sorted(unknown))}: choose from {', '.join(sorted(names))}")
    given = {names[name]: str(value) for name, value in options.items()}
    return PositionConfig(position_scheme=scheme, attention_backend=backend, **given)


class PositionEncoderLayer(nn.Module):
    """A transformer's encoder layer around `PositionAttention`: (B, T, E) to (B, T, E).

    Args:
        embed_dim: width E.
        num_heads: number of heads H.
        ffn_dim: inner width of the feed-forward network.
        scheme: as in `PositionAttention`.
        dropout: dropout probability of both residual branches and of attention probabilities.
        activation: `relu` or `gelu`.
        norm_first: normalise before each branch rather than after its sum.
        options: further arguments of `PositionAttention`.
    """

    causal = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        ffn_dim: int,
        scheme: str,
        *,
        dropout: float = 0.1,
        activation: str = "relu",
        norm_first: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}, got {activation}")
        options.setdefault("causal", self.causal)
        self.self_attn = PositionAttention(embed_dim, num_heads, scheme, dropout=dropout, **options)
        self.fc1, self.fc2 = nn.Linear(embed_dim, ffn_dim), nn.Linear(ffn_dim, embed_dim)
        self.self_attn_layer_norm, self.final_layer_norm = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.dropout, self.norm_first = nn.Dropout(dropout), norm_first
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, key_padding_mask: Tensor | None = None, **more: Any) -> Tensor:
        """Return the layer's output (B, T, E); the arguments are those of `PositionAttention.forward`."""
        x = self.branch(x, self.self_attn_layer_norm, lambda y: self.self_attn(y, key_padding_mask, **more))
        return self.branch(x, self.final_layer_norm, self.feed_forward)

    def feed_forward(self, x: Tensor) -> Tensor:
        """Return the feed-forward network's output (B, T, E)."""
        return self.fc2(self.dropout(self.activation(self.fc1(x))))

    def branch(self, x: Tensor, norm: nn.Module, form: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the sum of x (B, T, E) and what `form` makes of it, normalised before or after."""
        if self.norm_first:
            return x + self.dropout(form(norm(x)))
        return norm(x + self.dropout(form(x)))


class PositionDecoderLayer(PositionEncoderLayer):
    """A transformer's decoder layer: causal `PositionAttention`, attention to an encoder's output, feed-forward.

    The arguments are those of `PositionEncoderLayer`. Without `encoder_out` in a call, the layer is that of a
    language model, and its attention to the encoder is left out.
    """

    causal = True

    def __init__(self, embed_dim: int, num_heads: int, ffn_dim: int, scheme: str, **options: Any) -> None:
        super().__init__(embed_dim, num_heads, ffn_dim, scheme, **options)
        dropout = self.self_attn.dropout
        self.encoder_attn = nn.MultiheadAttention(embed_dim, num_heads, dropout=dropout, batch_first=True)
        self.encoder_attn_layer_norm = nn.LayerNorm(embed_dim)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        **more: Any,
    ) -> Tensor:
        """Return the layer's output (B, T, E).

        Args:
            x: (B, T, E); with `cache=` in `more`, the new tokens alone.
            key_padding_mask: (B, T) True at padding.
            encoder_out: (B, S, E) or None.
            encoder_padding_mask: (B, S) True at padding of the source, or None.
            more: further arguments of `PositionAttention.forward`.
        """
        x = self.branch(x, self.self_attn_layer_norm, lambda y: self.self_attn(y, key_padding_mask, **more))
        if encoder_out is not None:
            of_encoder = {"key": encoder_out, "value": encoder_out, "key_padding_mask": encoder_padding_mask}
            attend = partial(self.encoder_attn, **of_encoder, need_weights=False)
            x = self.branch(x, self.encoder_attn_layer_norm, lambda y: attend(y)[0])
        return self.branch(x, self.final_layer_norm, self.feed_forward)
