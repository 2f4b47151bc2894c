"""Initial values of Transformer-XL's released code (`weights_init` in its train.py); its biases.

Weights come from N(0, 0.02), projections of adaptive embeddings from N(0, 0.01), layer norms from
N(1, 0.02), and biases are 0.  Position schemes keep what they started from.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from fairseq.modules import AdaptiveInput
from torch import Tensor, nn

from relpos_fairseq.placement import Placement
from relpos_fairseq.scheme import PositionScheme
from relpos_fairseq.stack import SchemeStack


def initialise(decoder: nn.Module, std: float, proj_std: float) -> None:
    """Redraw all that is a fairseq decoder's own; `proj_std`: projections between widths."""
    projections = _projections(decoder)
    for module in _own_modules(decoder):
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, 0.0, proj_std if id(module) in projections else std)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(module.weight[module.padding_idx])
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, std)
        if isinstance(module, (nn.Linear, nn.LayerNorm)) and module.bias is not None:
            nn.init.zeros_(module.bias)


def _own_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module and its descendants, but for position schemes."""
    if isinstance(module, (SchemeStack, Placement)):
        return
    yield module
    for child in module.children():
        yield from _own_modules(child)


def _projections(decoder: nn.Module) -> set[int]:
    """Projections between the widths of an embedding's bands and the model's."""
    found = [decoder.project_in_dim, decoder.project_out_dim]
    if isinstance(decoder.embed_tokens, AdaptiveInput):
        found += [band[1] for band in decoder.embed_tokens.embeddings]
    if decoder.adaptive_softmax is not None:
        found += [tail[0] for tail in decoder.adaptive_softmax.tail]
    return {id(module) for module in found if module is not None}


def drop_biases(layers: nn.ModuleList) -> None:
    """Take the biases out of the projections of attention.

    Raises:
        ValueError: a position scheme starts from biases of its own.
    """
    for layer in layers:
        attention = layer.self_attn
        for scheme in attention.position:
            if type(scheme).initialize_projections is not PositionScheme.initialize_projections:
                raise ValueError(
                    f"--no-attention-bias: position scheme {scheme.name} starts from the biases of "
                    f"queries and keys: leave the flag out, or choose another scheme"
                )
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            getattr(attention, name).register_parameter("bias", None)


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
