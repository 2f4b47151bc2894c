"""Su et al. 2021, RoFormer: Rotary Position Embedding (arXiv:2104.09864), eq. 34.

    e_ij = (R_i q_i) . (R_j k_j) / sqrt(d),   R_m rotates channels (2c, 2c + 1) by m 10000^(-2c/d)

The rotation comes after the projection and per head, so that the logits depend on j - i alone.
An odd head_dim leaves its last channel as it is.  Angles are computed in at least fp32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.positions import Positions
from relpos_fairseq.scheme import PositionScheme, SchemeCard, register_scheme


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate pairs of channels.

    Args:
        x: (B, H, L, D).
        cosine: (L, D // 2), in at least fp32.
        sine: (L, D // 2).

    Returns:
        (B, H, L, D) in x's type.
    """
    even = 2 * cosine.size(-1)
    pairs = x[..., :even].to(torch.promote_types(x.dtype, cosine.dtype)).unflatten(-1, (-1, 2))
    a, b = pairs.unbind(-1)
    turned = torch.stack([a * cosine - b * sine, a * sine + b * cosine], dim=-1)
    return torch.cat([turned.flatten(-2).to(x.dtype), x[..., even:]], dim=-1)


@register_scheme("rope")
class Rope(PositionScheme):
    """Rotations of query and key by their slots."""

    card = SchemeCard("Su 2021 eq. 34", "(Rᵢq)·(Rⱼk)/√d", "fixed")
    rotates = True

    def prepare(self, positions: Positions) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every slot: (S, D // 2) in fp64, exact for any length."""
        pairs = self.shape.head_dim // 2
        channel = torch.arange(pairs, device=positions.device, dtype=torch.float64)
        slot = torch.arange(positions.src_len, device=positions.device, dtype=torch.float64)
        angle = slot[:, None] * 10000 ** (-channel / max(pairs, 1))
        return angle.cos(), angle.sin()

    def transform_query(self, q: Tensor, prepared: tuple[Tensor, Tensor], start: int) -> Tensor:
        """Rotate each row by its slot."""
        exact = torch.promote_types(q.dtype, torch.float32)
        cosine, sine = (part[start : start + q.size(2)].to(exact) for part in prepared)
        return rotate(q, cosine, sine)

    def transform_key(self, k: Tensor, prepared: tuple[Tensor, Tensor], start: int) -> Tensor:
        """Rotate each row by its slot."""
        return self.transform_query(k, prepared, start)
