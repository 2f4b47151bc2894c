"""A scheme's row in the contract table (schemes/README.md, which `relpos schemes` writes)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SchemeCard:
    """What the table says of a scheme.

    Args:
        row: where it stands among the other rows; the gaps leave room for new schemes.
        source: paper and equation.
        logits: the equation, in words of the table.
        starts_at: initial values.
        published: parameters of BERT-base as the papers count them, if they do.
        difference: why ours are not that number.
    """

    row: int
    source: str
    logits: str
    starts_at: str
    published: str = "-"
    difference: str = ""
