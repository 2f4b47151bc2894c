"""Block sizes, warps and pipeline stages of every kernel, by type and width alone: no tuning at run
time, so that a resumed run sums in the same order.

Chosen so that ptxas spills nothing for sm_90: 4 warps do at 128 x 64, 8 do not.
"""  # noqa: D205

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


def launch_of(
    kernel: str, dtype: torch.dtype, dim: int, rank: int = 0, diagonals: bool = False
) -> Launch:
    """The launch of a kernel.

    Args:
        kernel: one of KERNELS.
        dtype: of queries and keys.
        dim: head_dim, a power of two.
        rank: of static factors, a power of two, or 0.
        diagonals: scalars want a gradient, whose tiles are square.
    """
    wide = dtype in (torch.float32, torch.float64)
    total = (dim + rank) * (2 if wide else 1)
    if kernel == "forward":
        if total <= 64:
            return Launch(128, 64, 8, 3)
        if total <= 128:
            return Launch(128, 64, 8, 2)
        return Launch(64, 32, 4, 2) if total <= 256 else Launch(32, 32, 4, 1)
    if kernel == "rows":
        if diagonals:
            return Launch(64, 64, 8, 2) if total <= 128 else Launch(32, 32, 4, 1)
        if total <= 64:
            return Launch(128, 64, 8, 2)
        return Launch(64, 64, 8, 2) if total <= 128 else Launch(32, 32, 4, 1)
    if total <= 64:
        return Launch(64, 128, 8, 2)
    return Launch(64, 64, 8, 2) if total <= 128 else Launch(32, 32, 4, 1)


def wide_launch_of(
    kernel: str, dtype: torch.dtype, dim: int, rank: int = 0, both: bool = False
) -> Launch:
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
