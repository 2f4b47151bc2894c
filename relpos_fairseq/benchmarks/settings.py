"""The call of attention that is measured: shape, type, device; its queries, keys and values."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from relpos_fairseq.options import CLIP_DISTANCE
from relpos_fairseq.schemes import parse_hybrid, scheme_class, scheme_names

EVERY_LENGTH = tuple(64 << step for step in range(9))  # 64 .. 16384
PLAIN = "none"  # attention without positions, evaluated by this package
Setting = TypeVar("Setting")


def label_of(scheme: str, backend: str) -> str:
    """Return a row's name: `m4`, or `m4, blocked` where it is not `auto` that chooses."""
    return scheme if backend == "auto" else f"{scheme}, {backend}"


def scheme_and_backend(label: str) -> tuple[str, str]:
    """Return what `label_of` put together."""
    scheme, _, backend = label.partition(", ")
    return scheme, backend or "auto"


def in_attention(name: str) -> bool:
    """Tell whether a scheme is evaluated in attention; others act on the input alone."""
    return any(member.own_scale is not None for member in parse_hybrid(name))


def has_formula(name: str) -> bool:
    """Tell whether attention with a scheme is more than torch's own."""
    return in_attention(name) and name != PLAIN


def schemes_for(causal: bool = False, attention: bool = False) -> list[str]:
    """Return the schemes that `all` stands for.

    Those that are defined for decoders alone only with `causal`; with `attention` none that acts
    on the input alone.
    """
    names = [name for name in scheme_names() if causal or not scheme_class(name).causal_only]
    return [name for name in names if in_attention(name) or not attention]


def takes_clip(name: str) -> bool:
    """Tell whether a scheme has a clip distance."""
    return any(CLIP_DISTANCE in member.takes for member in parse_hybrid(name))


def setting_of(kind: type[Setting], args: argparse.Namespace, **own: object) -> Setting:
    """Return a setting: its fields are options of the same names, but for those given here."""
    own |= {"dtype": getattr(torch, args.dtype), "device": torch.device(args.device)}
    names = [one.name for one in fields(kind) if one.name not in own]
    return kind(**own, **{name: getattr(args, name) for name in names})


@dataclass(frozen=True)
class AttentionSetting:
    """The call of attention that is measured."""

    batch: int  # b
    heads: int  # h
    length: int  # t = S; of a decoding step, S
    head_dim: int  # d
    clip: int  # clip distance of tables that take one; 0: as long as the input
    causal: bool  # keys in a query's future are excluded
    dtype: torch.dtype  # of queries, keys, values and parameters
    device: torch.device  # where

    @property
    def embed_dim(self) -> int:
        """Width E of the model."""
        return self.heads * self.head_dim

    def columns(self) -> dict:
        """Return the setting as columns of a row of results."""
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


@lru_cache(maxsize=8)
def draw(setting: AttentionSetting, *shape: int, seed: int = 1) -> Tensor:
    """Draw a unit normal in the setting's type and on its device; the same in every run."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(shape, generator=generator)
    return drawn.to(setting.device, setting.dtype)


def draw_heads(setting: AttentionSetting, queries: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Draw queries (B, H, T, D), keys and values (B, H, S, D)."""
    lengths = (queries or setting.length, setting.length, setting.length)
    q, k, v = (
        draw(setting, setting.batch, setting.heads, length, setting.head_dim, seed=seed)
        for seed, length in enumerate(lengths, 1)
    )
    return q, k, v
