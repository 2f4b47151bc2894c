"""What papers and other libraries report that positions cost (published.json).

A number of parameters is a sum of products of m layers, h heads, inputs of n tokens, r = 2n - 1
distances, width d and a head's width c.  The formulas of 000 write d for c where they multiply by
h; its text evaluates them without that factor (147K for Shaw, M3 and M4).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

PUBLISHED = json.loads(Path(__file__).with_name("published.json").read_text(encoding="utf-8"))
PARAMETERS: dict[str, dict[str, str]] = PUBLISHED["parameters"]
TIME, LAYER = PUBLISHED["time"], PUBLISHED["layer"]
IN_WORDS = (
    "In words: 000 (section 3.6) finds Shaw, M1, M2 and M4 about as fast as absolute positions, "
    "and that a GPU holds 2 sequences with M3, 20 with any other; 003 (appendix A) finds all "
    "methods about as fast as absolute positions, and TUPE slower in training for its [CLS]."
)


@dataclass(frozen=True)
class ModelSizes:
    """A model: m layers, width d, h heads, inputs of n tokens."""

    layers: int
    width: int
    heads: int
    length: int

    def count(self, formula: str) -> int:
        """Return the number of parameters that a formula of `PARAMETERS` gives."""
        symbols = {"m": self.layers, "h": self.heads, "n": self.length, "d": self.width}
        symbols |= {"r": 2 * self.length - 1, "c": self.width // self.heads}
        products = (product.split() for product in formula.split("+"))
        return sum(math.prod(symbols[name] for name in names) for names in products)
