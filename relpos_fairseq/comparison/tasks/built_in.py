"""The built-in English-German grammar: sentences of training's lengths, and longer ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from relpos_fairseq.comparison.tasks.base import kind
from relpos_fairseq.comparison.tasks.pairs import Pair
from relpos_fairseq.comparison.tasks.parallel import Translation
from relpos_fairseq.data import grammar


@kind("built_in")
@dataclass(frozen=True, kw_only=True)
class BuiltIn(Translation):
    """The quickstart's corpus."""

    languages: ClassVar[Pair] = ("en", "de")
    test_sets: ClassVar[tuple[str, ...]] = ("test", "test_long")
    tokenize: ClassVar[str] = "none"
    # A grammar is learned, not memorised, without dropout.
    default: ClassVar[dict] = Translation.default | {
        "lr": 3e-3,
        "warmup-updates": 150,
        "max-update": 750,
        "dropout": 0.0,
        "save-interval-updates": 200,
    }

    pairs_seed: int = 1  # of the corpus
    pairs_train: int = 24000  # how many pairs each split has; likewise the others
    pairs_valid: int = 500
    pairs_test: int = 500
    pairs_test_long: int = 300

    def pairs(self) -> dict[str, list[Pair]]:
        return grammar.build(self.pairs_seed, self.pairs_train, self.pairs_valid, self.pairs_test, self.pairs_test_long)

    def inputs(self) -> list[Path]:
        """Return the grammar's own files: what they say is the data."""
        return sorted(Path(grammar.__file__).parent.glob("*.py"))
