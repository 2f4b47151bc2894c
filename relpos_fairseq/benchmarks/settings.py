"""What is measured: shape, type, device, and the queries, keys and values of it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from relpos_fairseq.config import PositionConfig
from relpos_fairseq.options import CLIP_DISTANCE
from relpos_fairseq.schemes import parse_hybrid, scheme_class, scheme_names

EVERY_LENGTH = tuple(64 << step for step in range(9))  # 64 .. 16384
# Nothing of them is in attention.
INPUT_SCHEMES = (
    "none",
    *(name for name in scheme_names() if scheme_class(name).own_scale is None),
)
DECODED = 8  # sentences that a step of decoding continues, at least


def label_of(scheme: str, backend: str) -> str:
    """A row's name: `m4`, or `m4, blocked` where it is not `auto` that chooses."""
    return scheme if backend == "auto" else f"{scheme}, {backend}"


def scheme_and_backend(label: str) -> tuple[str, str]:
    """What `label_of` put together."""
    scheme, _, backend = label.partition(", ")
    return scheme, backend or "auto"


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Args:
        batch: B.
        heads: H.
        length: T = S; of a decoding step, S.
        head_dim: D.
        clip: clip distance of tables that take one; 0: as long as the input.
        causal: keys in a query's future are excluded.
        dtype: of queries, keys, values and parameters.
        device: where.
    """

    batch: int
    heads: int
    length: int
    head_dim: int
    clip: int
    causal: bool
    dtype: torch.dtype
    device: torch.device

    @property
    def embed_dim(self) -> int:
        """Width E of the model."""
        return self.heads * self.head_dim

    def columns(self) -> dict:
        """The setting in a row of results."""
        return {
            "device": self.device.type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "causal": self.causal,
            "clip": self.clip,
            "batch": self.batch,
            "heads": self.heads,
            "head_dim": self.head_dim,
            "length": self.length,
        }


def flags_of(name: str, setting: Setting) -> PositionConfig:
    """The scheme's flags: the setting's clip distance where it takes one."""
    flags = {"position_scheme": name}
    if any(CLIP_DISTANCE in member.takes for member in parse_hybrid(name)):
        flags["position_clip_distance"] = str(setting.clip)
    return PositionConfig(**flags)


@lru_cache(maxsize=8)
def draw(setting: Setting, *shape: int, seed: int = 1) -> Tensor:
    """A unit normal of a shape, in the setting's type and on its device; the same in every run."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator)
    return drawn.to(setting.device, setting.dtype)


def draw_heads(setting: Setting, queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, H, T, D), k and v (B, H, S, D) of a setting."""
    lengths = (queries or setting.length, setting.length, setting.length)
    q, k, v = (
        draw(setting, setting.batch, setting.heads, length, setting.head_dim, seed=seed)
        for seed, length in enumerate(lengths, 1)
    )
    return q, k, v
