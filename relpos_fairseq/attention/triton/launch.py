"""Block sizes, warps and pipeline stages of every kernel.

They follow from what is computed alone, and nothing is tuned at run time: a resumed run sums in the
same order.  Chosen so that ptxas keeps all in registers for sm_90 (255 a thread).  What a cell of a
tile reads and keeps beside its logit costs registers: kernels that meet tables of vectors have
eight cells a thread, others up to 32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

KERNELS = ("forward", "rows", "keys")


@dataclass(frozen=True)
class Launch:
    """How a kernel is launched.

    Args:
        rows: queries of a tile.
        keys: keys of a tile.
        warps: warps of a program.
        stages: stages of the software pipeline.
    """

    rows: int
    keys: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Work:
    """What a call's kernels do, as far as registers go.

    Args:
        dtype: of queries and keys.
        dim: head_dim, a power of two.
        rank: of static factors, a power of two, or 0.
        tables: tables of vectors are met.
        product: two of them multiply the content.
        scalars: scalars want a gradient: sums along the diagonals of square tiles.
        gate: the gate among them.
    """

    dtype: torch.dtype
    dim: int
    rank: int = 0
    tables: bool = False
    product: bool = False
    scalars: bool = False
    gate: bool = False


def launch_of(kernel: str, work: Work) -> Launch:
    if work.dtype in (torch.float32, torch.float64):
        return _full_precision(kernel, work)
    wide = work.dim + work.rank > 64
    heavy = work.tables or work.rank > 0
    if kernel == "forward":
        if work.dim > 64:
            return Launch(64, 32, 8, 2)
        return Launch(64, 64, 8, 2) if heavy else Launch(128, 64, 8, 2)
    if kernel == "keys":
        if work.dim > 64:
            return Launch(32, 32, 8, 2)
        return Launch(32, 64, 8, 1 if work.product else 2)
    if work.scalars:
        plain = not (work.gate or wide or heavy)
        return Launch(64, 64, 8, 2) if plain else Launch(32, 32, 4, 2)
    return Launch(64, 32, 8, 2) if heavy or wide else Launch(128, 64, 8, 2)


def _full_precision(kernel: str, work: Work) -> Launch:
    """Products of fp32 are formed in registers, an operand's whole rows at a time."""
    if kernel == "keys":
        return Launch(32, 32, 8, 1)
    if kernel == "forward":
        return Launch(16, 32, 4, 1)
    return Launch(16, 16, 4, 1) if work.scalars else Launch(32, 16, 8, 1)


def wide_launch_of(kernel: str, dtype: torch.dtype, dim: int, rank: int = 0, both: bool = False) -> Launch:
    """The launch of a kernel where there are vectors over many distances: tiles are square.

    Args:
        kernel: one of KERNELS, or "diagonals".
        dtype: of queries and keys.
        dim: head_dim, a power of two.
        rank: of static factors, a power of two, or 0.
        both: queries and keys have such vectors.
    """
    total = (dim + rank) * (2 if dtype in (torch.float32, torch.float64) else 1)
    if kernel == "forward" and total <= 64 and not both:
        return Launch(64, 64, 8, 2)
    return Launch(32, 32, 8 if kernel == "diagonals" and both else 4, 1)
