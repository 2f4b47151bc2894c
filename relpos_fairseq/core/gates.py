"""What schemes with gates share: numbers that each token gives each head."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.core.positions import is_exported


def of_tokens(source: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return w . x + b of each token, in at least single precision: (B, H, S, n).

    Args:
        source: (S, B, E), a layer's input.
        weight: (H, n, E).
        bias: (H, n).
    """
    given = F.linear(source, weight.flatten(0, 1))  # (S, B, H * n)
    exact = torch.promote_types(given.dtype, torch.float32)
    return (given.to(exact).unflatten(-1, bias.shape) + bias).permute(1, 2, 0, 3)


def log_sigmoid(x: Tensor) -> Tensor:
    """Return F.logsigmoid, which ONNX would compute as the inexact logarithm of a small sigmoid."""
    return x.clamp(max=0) - (-x.abs()).exp().log1p() if is_exported() else F.logsigmoid(x)
