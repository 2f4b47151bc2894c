"""What the papers report that positions cost.

000: Huang et al. 2020, Improve Transformer Models with Better Relative Position Embeddings,
    table 1.
003: Multiplicative Position-aware Transformer Models for Language Understanding, table 5.
004: Chen et al. 2021, Demystifying the Better Performance of Position Encoding Variants,
    table 3.

m layers, h heads, inputs of n tokens, width d.  The formulas of 000 write d for a head's width
where they multiply by h; its text evaluates them without that factor (147K for Shaw, M3 and M4).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Sizes:
    """A model: m layers, width d, h heads, inputs of n tokens."""

    layers: int
    width: int
    heads: int
    length: int

    @property
    def distances(self) -> int:
        """2n - 1."""
        return 2 * self.length - 1

    @property
    def head_dim(self) -> int:
        """D / h."""
        return self.width // self.heads


Formula = Callable[[Sizes], int]


def _absolute(s: Sizes) -> int:
    return s.length * s.width


def _scalars(s: Sizes) -> int:
    return s.layers * s.distances


def _vectors(s: Sizes) -> int:
    return s.layers * s.distances * s.head_dim


def _vectors_per_head(s: Sizes) -> int:
    return s.heads * _vectors(s)


# Parameters of positions, by scheme; 000 gives every head its own, 003 shares them.
HUANG_TABLE_1: dict[str, Formula] = {
    "learned": _absolute,
    "shaw_keys": _vectors_per_head,
    "m1": lambda s: s.layers * s.heads * s.length,
    "m2": lambda s: s.heads * _scalars(s),
    "m3": _vectors_per_head,
    "m4": _vectors_per_head,
}
MULTIPLICATIVE_TABLE_5: dict[str, Formula] = {
    "learned": _absolute,
    "shaw_keys": _vectors,
    "t5": _scalars,
    "m2": _scalars,
    "m4": _vectors,
    "deberta": lambda s: _vectors(s) + s.layers * s.head_dim**2,
    "tupe": lambda s: s.layers * (s.length * s.head_dim + s.head_dim**2) + _scalars(s),
    "m4m": _vectors,
}
# What 003 prints for BERT-base at 512 tokens, in thousands.
MULTIPLICATIVE_PRINTED = {
    "learned": 393, "shaw_keys": 785, "t5": 12, "m2": 12, "m4": 785, "deberta": 834, "tupe": 454,
    "m4m": 785,
}  # fmt: skip
# Percent of time beyond that of rel_scalar: training, inference.
CHEN_TABLE_3 = {
    "base": {"shaw": (13, 33), "tupe": (1, 19), "rel_scalar": (0, 0)},
    "small": {"shaw": (24, 65), "tupe": (4, 27), "rel_scalar": (0, 0)},
}
IN_WORDS = (
    "In words: 000 (section 3.6) finds Shaw, M1, M2 and M4 about as fast as absolute positions, "
    "and that a GPU holds 2 sequences with M3, 20 with any other; 003 (appendix A) finds all "
    "methods about as fast as absolute positions, and TUPE slower in training for its [CLS]."
)
