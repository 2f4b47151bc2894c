"""A whole BERT layer around attention: what positions cost where other work is done as well."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from relpos_fairseq.benchmarks.candidates import Candidate
from relpos_fairseq.benchmarks.settings import draw


class Layer(Candidate):
    """Projections, attention by a candidate, feed-forward of four times the width, two norms.

    Args:
        attention: the candidate that attends.
    """

    def __init__(self, attention: Candidate) -> None:
        """Build the layer, in the candidate's setting."""
        super().__init__(attention.label, attention.setting)
        self.attention, width = attention, self.setting.embed_dim
        self.body = nn.ModuleDict(
            {
                "query": nn.Linear(width, width),
                "key": nn.Linear(width, width),
                "value": nn.Linear(width, width),
                "out": nn.Linear(width, width),
                "widen": nn.Linear(width, 4 * width),
                "narrow": nn.Linear(4 * width, width),
                "first_norm": nn.LayerNorm(width),
                "second_norm": nn.LayerNorm(width),
            }
        ).to(self.setting.device, self.setting.dtype)

    def inputs(self) -> tuple[Tensor, ...]:
        """Hidden states (B, T, E)."""
        setting = self.setting
        return (draw(setting, setting.batch, setting.length, setting.embed_dim),)

    def parameters(self) -> list[Tensor]:
        """The layer's and the scheme's."""
        return [*self.body.parameters(), *self.attention.parameters()]

    def refusal(self, mode: str) -> str | None:
        """Why a mode cannot be measured, or None."""
        return "a layer does not decode" if mode == "decode" else self.attention.refusal(mode)

    def __call__(self, x: Tensor) -> Tensor:
        """Hidden states (B, T, E), normalised after each half as in BERT."""
        q, k, v = (
            self.body[name](x).unflatten(-1, (self.setting.heads, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        attended = self.attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.body["first_norm"](x + self.body["out"](attended))
        inner = F.gelu(self.body["widen"](x))
        return self.body["second_norm"](x + self.body["narrow"](inner))
