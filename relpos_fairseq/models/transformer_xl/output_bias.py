"""A bias for each output, which the paper's released code has and fairseq has not."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Bias(nn.Module):
    """Adds a parameter (N,), at first zero, to (..., N)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def add_output_bias(decoder: nn.Module) -> None:
    """Give the outputs of a fairseq TransformerDecoderBase biases, those of each band their own."""
    softmax = decoder.adaptive_softmax
    if softmax is None:
        projection = decoder.output_projection
        projection.bias = nn.Parameter(torch.zeros(projection.out_features))
        return
    sizes = [end - start for start, end in zip(softmax.cutoff, softmax.cutoff[1:])]  # noqa: B905
    softmax.head = nn.Sequential(softmax.head, Bias(softmax.cutoff[0] + len(sizes)))
    for tail, size in zip(softmax.tail, sizes, strict=True):
        tail.append(Bias(size))
