"""Ways to attend that are timed side by side, and what is timed of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from relpos_fairseq.benchmarks.settings import AttentionSetting, draw, draw_heads

BASELINE, NAIVE = "no positions", "naive"
DECODED = 8  # sentences that a step of decoding continues, at least
MODES = ("train", "forward", "decode", "memory")


class Candidate:
    """One way to attend over the queries, keys and values of a setting; `label` names its row."""

    def __init__(self, label: str, setting: AttentionSetting) -> None:
        self.label, self.setting = label, setting

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output (B, H, T, D)."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")

    def decoder(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """Return a step of decoding, q (B, H, 1, D), with what earlier steps left in the cache."""
        raise NotImplementedError(f"{type(self).__name__} must define decoder")

    def inputs(self) -> tuple[Tensor, ...]:
        """Return what a call takes."""
        return draw_heads(self.setting)

    def parameters(self) -> list[Tensor]:
        """Return what training takes gradients of, beside the inputs."""
        return []

    def refusal(self, mode: str) -> str | None:
        """Return why a mode cannot be measured, or None."""
        return None


class NoPositions(Candidate):
    """Torch's own attention; where it decodes, two products and a softmax."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.setting.causal)

    def decoder(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """Return scaled products of one query; the new key and value go into the cache."""
        keys, values, scale = k.clone(), v.clone(), q.size(-1) ** -0.5

        def step() -> Tensor:
            keys[:, :, -1:], values[:, :, -1:] = k[:, :, -1:], v[:, :, -1:]
            return ((q * scale) @ keys.transpose(-1, -2)).softmax(-1) @ values

        return step


class LayerCandidate(Candidate):
    """A BERT layer around a candidate: what positions cost where other work is done as well."""

    def __init__(self, attention: Candidate) -> None:
        super().__init__(attention.label, attention.setting)
        self.attention, width = attention, self.setting.embed_dim
        sizes = {name: (width, width) for name in ("query", "key", "value", "out")}
        sizes |= {"widen": (width, 4 * width), "narrow": (4 * width, width)}
        parts = {name: nn.Linear(*size) for name, size in sizes.items()}
        parts |= {name: nn.LayerNorm(width) for name in ("first_norm", "second_norm")}
        self.body = nn.ModuleDict(parts).to(self.setting.device, self.setting.dtype)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return hidden states (B, T, E)."""
        setting = self.setting
        return (draw(setting, setting.batch, setting.length, setting.embed_dim),)

    def parameters(self) -> list[Tensor]:
        return [*self.body.parameters(), *self.attention.parameters()]

    def refusal(self, mode: str) -> str | None:
        return "a layer does not decode" if mode == "decode" else self.attention.refusal(mode)

    def __call__(self, x: Tensor) -> Tensor:
        """Return hidden states (B, T, E), normalised after each half as in BERT."""
        q, k, v = (
            self.body[name](x).unflatten(-1, (self.setting.heads, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        attended = self.attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.body["first_norm"](x + self.body["out"](attended))
        inner = F.gelu(self.body["widen"](x))
        return self.body["second_norm"](x + self.body["narrow"](inner))


def runner(candidate: Candidate, mode: str) -> Callable[[], object]:
    """Return what is timed: forward and backward pass, a forward pass, or a step of decoding."""
    setting = candidate.setting
    if mode == "decode":
        many = replace(setting, batch=max(setting.batch, DECODED))
        return torch.no_grad()(candidate.decoder(*draw_heads(many, queries=1)))
    given = candidate.inputs()
    if mode == "forward":
        return torch.no_grad()(lambda: candidate(*given))
    upstream = draw(setting, *given[0].shape, seed=9)  # outputs have the queries' shape

    def train() -> None:
        leaves = [part.detach().requires_grad_() for part in given]
        wanted = [*leaves, *candidate.parameters()]
        torch.autograd.grad(candidate(*leaves), wanted, upstream, allow_unused=True)

    return train
