"""Longer and shorter tables over absolute positions.

Relative tables need nothing: beyond their reach they read their ends, and an unclipped one grows
by repeating them (`exact.reread`).  A table with a row a position ends where it ends, and is made
longer by

    tile          row i is row i mod N: locally the same pattern, as fairseq users tile RoBERTa
    interpolate   N rows stretched linearly over N' (the first and last rows stay)
"""

from __future__ import annotations

import torch
from torch import Tensor

from relpos_fairseq.conversion.report import ConversionReport

FILLS = ("tile", "interpolate")


def resize(table: Tensor, length: int, fill: str | None, report: ConversionReport, axis: int = 0) -> Tensor:
    """Give a table `length` positions along `axis`; where more are wanted, `fill` says how.

    Raises:
        ValueError: more positions are wanted and `fill` does not say how, or an unknown `fill`.
    """
    if fill not in (None, *FILLS):
        raise ValueError(f"positions are filled by one of {', '.join(FILLS)}, got {fill}")
    known = table.size(axis)
    if length == known:
        return table
    if length < known:
        report.step(f"absolute positions cut from {known} to {length}")
        report.limit(f"inputs of up to {length} tokens")
        return table.narrow(axis, 0, length)
    if fill is None:
        raise ValueError(
            f"the source knows {known} absolute positions and {length} are wanted: fill the rest "
            f"(relpos convert --positions {length} --fill tile or --fill "
            f"interpolate), keep to {known} (--max-positions), or choose a relative scheme, which "
            f"takes any length"
        )
    if fill == "tile":
        report.step(f"absolute positions {known}..{length - 1} repeat those from 0")
        report.limit(f"inputs of up to {known} tokens")
        return table.index_select(axis, torch.arange(length, device=table.device) % known)
    report.lose(f"{known} absolute positions are stretched over {length}")
    where = torch.arange(length, dtype=torch.float64, device=table.device)
    where = where * (known - 1) / (length - 1)
    below = where.floor().long().clamp(max=max(known - 2, 0))
    share = (where - below).to(table.dtype)
    share = share.view(-1, *[1] * (table.dim() - axis - 1))
    above = (below + 1).clamp(max=known - 1)
    return torch.lerp(table.index_select(axis, below), table.index_select(axis, above), share)
