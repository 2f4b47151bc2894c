"""Attention with positions for one's own models; needs torch, and no fairseq.

from relpos_fairseq.nn import PositionAttention

attention = PositionAttention(512, 8, scheme="m4", causal=True)
y = attention(torch.randn(2, 30, 512))
"""

from relpos_fairseq.nn.layers import AttentionCache, PositionAttention, PositionDecoderLayer, PositionEncoderLayer

__all__ = ["AttentionCache", "PositionAttention", "PositionDecoderLayer", "PositionEncoderLayer"]
