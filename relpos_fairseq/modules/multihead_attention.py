"""Multi-head self-attention with position schemes, in the place of fairseq's.

Parameters have the names and the initial values of fairseq's own MultiheadAttention, so that
checkpoints differ only by what the position scheme adds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fairseq.incremental_decoding_utils import FairseqIncrementalState
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from relpos_fairseq.core.placement import PositionContext, SchemeStack
from relpos_fairseq.nn.decoding_cache import DecodingCache
from relpos_fairseq.nn.self_attention import SelfAttention

SPARES = "relpos_spare_buffers"  # in fairseq's incremental state, for the layers of a model


class RelPosMultiheadAttention(FairseqIncrementalState, SelfAttention):
    """`SelfAttention` under the signature of fairseq's layers, with fairseq's decoding cache.

    Args:
        embed_dim: width E.
        num_heads: number of heads H.
        schemes: the position schemes of this layer alone.
        scale: the factor of q.k.
        q_noise: quantisation noise of the projections, as in fairseq.
        qn_block_size: its block size.
        more: further arguments of `SelfAttention`.
    """

    get_incremental_state: Callable[..., Any]  # of FairseqIncrementalState
    set_incremental_state: Callable[..., None]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        schemes: SchemeStack,
        scale: float,
        *,
        q_noise: float = 0.0,
        qn_block_size: int = 8,
        **more: Any,
    ) -> None:
        self._noise = q_noise, qn_block_size
        super().__init__(embed_dim, num_heads, schemes, scale, **more)

    def projection(self) -> nn.Linear:
        return quant_noise(super().projection(), *self._noise)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        incremental_state: dict | None = None,
        need_weights: bool = False,
        attn_mask: PositionContext | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from each of T tokens to these tokens, and to those of a cache or memory before them.

        Args:
            query: (T, B, E); `key` and `value` are the same tensor, as fairseq's layers pass them.
            key: not read; part of fairseq's signature.
            value: not read; part of fairseq's signature.
            key_padding_mask: as in `SelfAttention.attend`.
            incremental_state: fairseq's decoding cache.
            need_weights: return attention probabilities of every head: (B, H, T, S).
            attn_mask: the `PositionContext`, under the argument name that fairseq's layers pass on.

        Returns:
            (T, B, E) output, and probabilities or None.
        """
        if not isinstance(attn_mask, PositionContext):
            raise ValueError(
                "relpos attention takes a PositionContext as attn_mask (Placement.of returns one), "
                f"got {type(attn_mask).__name__}"
            )
        cache = None if incremental_state is None else self.cache(incremental_state)
        return self.attend(query, attn_mask, key_padding_mask, cache, need_weights)

    def cache(self, incremental_state: dict) -> DecodingCache:
        """Return this attention's own cache in fairseq's incremental state."""
        cache = self._get_input_buffer(incremental_state)
        if cache is None:
            cache = DecodingCache()
            self.set_incremental_state(incremental_state, "attn_state", cache)
        return cache

    def padding_of(self, incremental_state: dict) -> Tensor | None:
        """Return (B, S) True at padding among the cached tokens, or None where there is none."""
        cache = self._get_input_buffer(incremental_state)
        return None if cache is None else cache.padding

    def reorder_incremental_state(self, incremental_state: dict, new_order: Tensor) -> dict:
        cache = self._get_input_buffer(incremental_state)
        if cache is not None:
            cache.reorder(new_order, incremental_state.setdefault(SPARES, {}))
        return incremental_state

    def _get_input_buffer(self, incremental_state: dict | None) -> DecodingCache | None:
        """Return the `DecodingCache` or None; fairseq's decoder layer calls this method too."""
        cache: DecodingCache | None = self.get_incremental_state(incremental_state, "attn_state")
        return cache
