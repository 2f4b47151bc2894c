"""Gopalakrishnan et al. 2025, PoPE: Polar Coordinate Position Embeddings (arXiv:2509.10534).

    e_ij = sum_c softplus(q_ic) softplus(k_jc) cos((j - i) theta_c + delta_c) / sqrt(d)

    theta_c = b^(-c/d) for c = 0..d-1, b -> --position-rope-base;  delta -> `phase`, from 0

Content gives each channel a length and position alone its angle, so that the two multiply.  Each channel
becomes two, (mu cos, mu sin): q and k have 2d channels and values d, which the Triton kernels refuse by
name.  delta is kept in [-2 pi, 0], one a head and channel for all layers, as in lucidrains'
PoPE-pytorch; its gradient passes the bounds, so that training can leave them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from relpos_fairseq.core.options import SCALE
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.rotation import BASE
from relpos_fairseq.core.scheme import PositionScheme, SchemeInfo, Table, register_scheme


@register_scheme("pope")
class Pope(PositionScheme):
    """Content as lengths, positions as angles."""

    info = SchemeInfo(196, "Gopalakrishnan 2025", "Σ_c σ(q_c)σ(k_c) cos((j-i)θ_c + δ_c)/√d, σ softplus", "δ 0")
    takes = frozenset({SCALE, BASE})
    rotates = True
    nonlinear_qk = True
    tables = {"phase": Table("num_heads head_dim")}
    never_neutral = "it takes the softplus of q and k, and rotates them"
    phase: nn.Parameter  # (H, D)

    def prepare(self, positions: Positions) -> Tensor:
        """Return the angles of every slot: (S, D) in fp64."""
        dim = self.shape.head_dim
        channel = torch.arange(dim, device=positions.device, dtype=torch.float64)
        slot = positions.slot_positions().double()
        return slot[:, None] * self.options.rope_base ** (-channel / dim)

    def transform_query(self, q: Tensor, prepared: Tensor, start: int) -> Tensor:
        """Turn each channel of q into the two coordinates of a point at its slot's angle: (B, H, T, 2D)."""
        return _polar(q, prepared[start : start + q.size(2)])

    def transform_key(self, k: Tensor, prepared: Tensor, start: int) -> Tensor:
        """Do the same for k, with each head's phase added to the angles: (B, H, S, 2D)."""
        phase = self.phase.double()
        bounded = phase + (phase.clamp(-2 * math.pi, 0) - phase).detach()
        return _polar(k, prepared[start : start + k.size(2)] + bounded[:, None])


def _polar(x: Tensor, angle: Tensor) -> Tensor:
    """Return softplus(x) (cos, sin) at angles (L, D) or (H, L, D): (B, H, L, 2D) in x's type."""
    exact = torch.promote_types(x.dtype, torch.float32)
    length = nn.functional.softplus(x.to(exact))
    parts = (length * wave.to(exact) for wave in (angle.cos(), angle.sin()))
    return torch.cat(tuple(parts), dim=-1).to(x.dtype)
