"""What a conversion did, what it lost, and the errors that it ends in."""

from __future__ import annotations

from dataclasses import dataclass, field


class ConversionError(ValueError):
    """A source, an option or a file that cannot be converted; one line that says what to do."""


class NotExactError(ConversionError):
    """The target cannot express the source, and only an exact conversion was asked for.

    Attributes:
        lost: what the target cannot express.
    """

    def __init__(self, message: str, lost: str) -> None:
        super().__init__(message)
        self.lost = lost


@dataclass
class ConversionReport:
    """A conversion in words.

    Args:
        source: the source's positions (`PositionPlan.describe`).
        target: the target's.
        steps: what was done, a line each.
        losses: what the target cannot express, and by how much a table moves at most where that
            says something; empty where the conversion is exact.
        limits: inputs outside of which an exact conversion is not promised.
    """

    source: str
    target: str
    steps: list[str] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether the converted model computes what the source computes."""
        return not self.losses

    def step(self, text: str) -> None:
        _once(self.steps, text)

    def lose(self, text: str, moved: float = 0.0) -> None:
        """Remember what was lost, once, and how far a table moved: the most of all layers."""
        self.losses[text] = max(moved, self.losses.get(text, 0.0))

    @property
    def lost(self) -> list[str]:
        return [f"{text} (rows move by up to {moved:.3g})" if moved else text for text, moved in self.losses.items()]

    def limit(self, text: str) -> None:
        _once(self.limits, text)

    def lines(self) -> list[str]:
        lines = [f"from      {self.source}", f"to        {self.target}"]
        lines += [f"done      {text}" for text in self.steps]
        lines += [f"lost      {text}" for text in self.lost]
        lines += [f"holds for {text}" for text in self.limits]
        lines.append(f"exact     {'yes' if self.exact else 'no'}")
        return lines


def _once(lines: list[str], text: str) -> None:
    if text not in lines:
        lines.append(text)
