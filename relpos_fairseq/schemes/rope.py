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


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate pairs of channels.

    Args:
        x: (B, H, L, D).
        turn: (L, D // 2) complex numbers of absolute value 1, in at least single precision.

    Returns:
        (B, H, L, D) in x's type.
    """
    even = 2 * turn.size(-1)
    pairs = x[..., :even].to(torch.promote_types(x.dtype, turn.real.dtype)).unflatten(-1, (-1, 2))
    turned = _Turned.apply(pairs, turn).flatten(-2).to(x.dtype)
    return turned if even == x.size(-1) else torch.cat([turned, x[..., even:]], dim=-1)


class _Turned(torch.autograd.Function):
    """Pairs (..., L, D // 2, 2) as complex numbers, multiplied.

    Autograd's own way back through them makes four passes over memory; this makes one.
    """

    @staticmethod
    def forward(ctx, pairs: Tensor, turn: Tensor) -> Tensor:
        ctx.save_for_backward(turn)
        *apart, beside = pairs.stride()  # complex numbers must lie a whole number of them apart
        if beside != 1 or any(step % 2 for step in (*apart, pairs.storage_offset())):
            pairs = pairs.clone(memory_format=torch.contiguous_format)
        return torch.view_as_real(torch.view_as_complex(pairs) * turn)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (turn,) = ctx.saved_tensors
        return _Turned.apply(grad, turn.conj()), None


class Turns:
    """What every slot is multiplied by, cos + i sin of its angles: exact for any length.

    Args:
        angle: (S, D // 2) in fp64.
    """

    def __init__(self, angle: Tensor) -> None:
        """Form them in double precision."""
        self._by_type = {torch.complex128: torch.polar(torch.ones_like(angle), angle)}

    def of(self, dtype: torch.dtype) -> Tensor:
        """(S, D // 2) for queries of a type, in at least single precision; kept for all layers."""
        kind = torch.complex128 if dtype == torch.float64 else torch.complex64
        if kind not in self._by_type:
            self._by_type[kind] = self._by_type[torch.complex128].to(kind)
        return self._by_type[kind]


@register_scheme("rope")
class Rope(PositionScheme):
    """Rotations of query and key by their slots."""

    card = SchemeCard(190, "Su 2021 eq. 34", "(Rᵢq)·(Rⱼk)/√d", "fixed")
    rotates = True
    never_neutral = "it has no parameter, and rotates q and k"

    def prepare(self, positions: Positions) -> Turns:
        """Return the rotations of every slot."""
        pairs = self.shape.head_dim // 2
        channel = torch.arange(pairs, device=positions.device, dtype=torch.float64)
        slot = torch.arange(positions.src_len, device=positions.device, dtype=torch.float64)
        return Turns(slot[:, None] * 10000 ** (-channel / max(pairs, 1)))

    def transform_query(self, q: Tensor, prepared: Turns, start: int) -> Tensor:
        """Rotate each row by its slot."""
        return rotate(q, prepared.of(q.dtype)[start : start + q.size(2)])

    def transform_key(self, k: Tensor, prepared: Turns, start: int) -> Tensor:
        """Rotate each row by its slot."""
        return self.transform_query(k, prepared, start)
