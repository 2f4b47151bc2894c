"""The longest input of a model, as fairseq asks for it."""

from __future__ import annotations

from relpos_fairseq.placement import Placement

UNLIMITED = 2**31 - 1  # where positions set no limit


class TableLimit(int):
    """A longest length that remembers which scheme's table sets it, for error messages."""

    scheme: str

    @classmethod
    def of(cls, length: int, scheme: str) -> TableLimit:
        limit = cls(length)
        limit.scheme = scheme
        return limit


def limit_of(placement: Placement) -> int:
    """Return the longest input, as fairseq asks for it."""
    longest = placement.plan.longest
    return UNLIMITED if longest is None else TableLimit.of(longest, placement.plan.name)
