"""Compositional tasks from their published files.

COGS (Kim and Linzen 2020, github.com/najoungkim/COGS, `data/`): train.tsv, dev.tsv, test.tsv,
gen.tsv, each line sentence, logical form, type.  PCFG SET's productivity split (Hupkes et al. 2020,
github.com/i-machine-think/am-i-compositional, `data/pcfgset/productivity/`): train.src, train.tgt,
test.src, test.tgt.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from relpos_fairseq.comparison.tasks.base import kind
from relpos_fairseq.comparison.tasks.pairs import Pair, Pairs
from relpos_fairseq.engine.lines import read_lines


@dataclass(frozen=True, kw_only=True)
class Published(Pairs):
    """A task read from a folder."""

    data: Path  # the folder of the published files
    test: int = 0  # examples of each test set, drawn once for all; 0: all of them

    def __post_init__(self) -> None:
        object.__setattr__(self, "data", Path(self.data))
        if self.test < 0:
            raise ValueError(f"test must be >= 0, got {self.test}")

    def drawn(self, pairs: list[Pair]) -> list[Pair]:
        """Return the examples of a test set that are tested."""
        if not self.test or self.test >= len(pairs):
            return pairs
        return random.Random(1).sample(pairs, self.test)


@kind("cogs")
@dataclass(frozen=True, kw_only=True)
class Cogs(Published):
    """COGS; `gen` is the generalisation set."""

    test_sets: ClassVar[tuple[str, ...]] = ("test", "gen")

    def inputs(self) -> list[Path]:
        return [self.data / f"{name}.tsv" for name in ("train", "dev", "test", "gen")]

    def pairs(self) -> dict[str, list[Pair]]:
        train, valid, test, gen = map(self.read, self.inputs())
        return {"train": train, "valid": valid, "test": self.drawn(test), "gen": self.drawn(gen)}

    @staticmethod
    def read(path: Path) -> list[Pair]:
        """Read a file of three columns."""
        pairs = []
        for number, line in enumerate(read_lines(path), start=1):
            columns = line.split("\t")
            if len(columns) != 3:
                raise ValueError(f"{path}, line {number}: {len(columns)} columns, COGS has 3")
            pairs.append((columns[0], columns[1]))
        return pairs


@kind("pcfg_set")
@dataclass(frozen=True, kw_only=True)
class PcfgSet(Published):
    """PCFG SET; a tenth of training, 1,000 pairs at most, validates."""

    test_sets: ClassVar[tuple[str, ...]] = ("test",)

    def inputs(self) -> list[Path]:
        return [self.data / f"{name}.{side}" for name in ("train", "test") for side in ("src", "tgt")]

    def pairs(self) -> dict[str, list[Pair]]:
        lines = [list(read_lines(path)) for path in self.inputs()]
        for source, target in (lines[:2], lines[2:]):
            if len(source) != len(target) or not source:
                raise ValueError(f"{self.data}: {len(source)} sources, {len(target)} targets")
        train, test = (list(zip(*some, strict=True)) for some in (lines[:2], lines[2:]))
        random.Random(1).shuffle(train)
        held = min(1000, len(train) // 10)
        return {"train": train[held:], "valid": train[:held], "test": self.drawn(test)}
