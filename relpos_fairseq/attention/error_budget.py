"""How far a result may be from fp64: so many times eager attention's own error in the same precision, and roundings.

    |result - exact| <= max(times |eager - exact|, floor) + roundings epsilon |exact|

for the whole tensor (root mean square: typical) and for its worst element.  Each place that compares has a row of
BUDGETS; a second order of summing the same rounded numbers stays inside all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

Name = TypeVar("Name", bound=Hashable)
Sizes = dict[str, float]  # of a tensor: its root mean square (typical) and its maximum (worst)
# By place: times, and roundings, of each size.
BUDGETS = {
    "tested": {"typical": (3.0, 1.0), "worst": (4.0, 1.0)},
    # Fused kernels multiply half-precision numbers: products with tables, probabilities and gradients of logits are
    # rounded on their way, where eager attention rounds its result alone.
    "fused": {"typical": (3.0, 3.0), "worst": (4.0, 3.0)},
    "on a device": {"typical": (3.0, 4.0), "worst": (4.0, 8.0)},  # at any length, by whatever a compiler makes of them
    "timed": {"worst": (2.0, 8.0)},
}
VANISHES = 1e-10  # the size of a gradient that is 0 but for fp64's rounding


@dataclass(frozen=True)
class Compared:
    """One size of a result's error, and its budget."""

    name: object
    kind: str  # typical or worst
    error: float
    budget: float

    @property
    def share(self) -> float:
        """The part of the budget that is used; NaN of an error that is."""
        return self.error / max(self.budget, sys.float_info.min)

    @property
    def exceeds(self) -> bool:
        """Whether the error is over its budget; NaN is."""
        return not self.error <= self.budget

    def __str__(self) -> str:
        return f"{self.name}: {self.kind} error {self.error:.2e} exceeds {self.budget:.2e}"


def sizes(error: Tensor) -> Sizes:
    """Return the root mean square and the maximum of the absolute values."""
    return {"typical": float(error.square().mean().sqrt()), "worst": float(error.abs().max())}


def error_budget(
    got: Mapping[Name, Tensor],
    eager: Mapping[Name, Tensor],
    exact: Mapping[Name, Tensor],
    place: str,
    epsilon: float,
    cancelled: Tensor | None = None,
    floor: Mapping[Name, Sizes] | None = None,
) -> Iterator[Compared]:
    """Compare results with fp64; yields each size of each error with its budget.

    Args:
        got: the results, by name.
        eager: the same by eager attention in the precision of `got`.
        exact: the same in fp64.
        place: the row of BUDGETS.
        epsilon: the rounding of a result, relative to its size.
        cancelled: a tensor of the size of what has cancelled where a result vanishes, on which softmax does not depend.
        floor: what a result may err wherever eager attention errs less by chance.
    """
    for name, right in exact.items():
        size, found, own = (sizes(part) for part in (right, got[name].double() - right, eager[name].double() - right))
        if cancelled is not None and size["worst"] < VANISHES:
            size = sizes(cancelled.double())
        for kind, (times, roundings) in BUDGETS[place].items():
            least = floor[name][kind] if floor else 0.0
            yield Compared(name, kind, found[kind], max(times * own[kind], least) + roundings * epsilon * size[kind])
