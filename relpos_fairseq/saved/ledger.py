"""Record what became of every tensor, config key and file of a source; the rest is lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

KINDS = {"tensors": "tensor", "keys": "config key", "files": "file"}
USED, NEUTRAL, KEPT, LOST = "used", "neutral", "kept", "lost"


class Recorded(dict):
    """A dictionary that remembers what it was given, and which of its keys were read."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.given = dict(self)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, as dict does, and remember its key."""
        self.read.add(key)
        return super().get(key, default)


class Ledger:
    """Everything that a source holds, and what became of each; keys of its config that are read are used.

    Args:
        tensors: names of its tensors.
        config: its config.
        files: names of its files.
    """

    def __init__(self, tensors: Iterable[str], config: Recorded, files: Iterable[str]) -> None:
        self.keys, self._read, self._became = dict(config.given), config.read, {}
        for kind, names in (("tensors", tensors), ("keys", config.given), ("files", files)):
            self._became[kind] = dict.fromkeys(sorted(names), (LOST, "not read here"))

    @property
    def became(self) -> dict[str, dict[str, tuple[str, str]]]:
        """Verdict and reason of each name, by kind."""
        keys = self._became["keys"]
        keys |= {name: (USED, "") for name in self._read & keys.keys()}
        return self._became

    def add(self, kind: str, name: str, value: Any = None) -> None:
        """Add something that is lost."""
        self._became[kind][name] = (LOST, "not read here")
        self.keys[name] = value

    def mark(self, kind: str, verdict: str, names: Iterable[str], why: str = "") -> None:
        """Say what became of those of `names` that the source has, and why."""
        became = self._became[kind]
        became |= {name: (verdict, why) for name in names if name in became}

    def mark_neutral(self, reasons: Mapping[str, str]) -> None:
        """Mark config keys that say nothing of the model, given as names between spaces by the reason why."""
        for reason, names in reasons.items():
            self.mark("keys", NEUTRAL, names.split(), reason)

    def named(self, kind: str, verdict: str) -> dict[str, str]:
        """Return the names of a kind of which this became, and why."""
        return {name: why for name, (one, why) in self.became[kind].items() if one == verdict}

    @property
    def lost(self) -> list[str]:
        """What is lost, in words."""
        return [
            f"{word} {name}{f' ({self.keys[name]!r})' if kind == 'keys' else ''}: {why}"
            for kind, word in KINDS.items()
            for name, why in self.named(kind, LOST).items()
        ]

    def lines(self) -> list[str]:
        """Return a summary, and what is kept for the way back."""
        parts = []
        for kind, became in self.became.items():
            counts = Counter(verdict for verdict, _ in became.values())
            said = ", ".join(
                f"{counts[verdict]} {verdict}" for verdict in (USED, NEUTRAL, KEPT, LOST) if counts[verdict]
            )
            parts += [f"{kind} {said}"] if became else []
        kept = [name for kind in self.became for name in self.named(kind, KEPT)]
        return [f"ledger    {'; '.join(parts)}", *([f"kept      {', '.join(kept)}"] if kept else [])]

    def record(self) -> dict[str, dict[str, Any]]:
        """Return all of it, for conversion.json: used names, and the others with their reasons."""
        return {
            kind: {USED: sorted(self.named(kind, USED))}
            | {verdict: found for verdict in (NEUTRAL, KEPT, LOST) if (found := self.named(kind, verdict))}
            for kind in self.became
        }
