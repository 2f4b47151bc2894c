"""Define encoder-decoder tasks: pairs of a source and a target, translated by fairseq-generate; SCAN, COGS, PCFG SET.

SCAN (Lake and Baroni 2018, arXiv:1711.00350): commands to actions, by the paper's grammar (figures 6 and 7):

    C -> S and S | S after S | S        V -> D opposite D' | D around D' | D | U
    S -> V twice | V thrice | V         D -> U left | U right | turn left | turn right
                                        U -> walk | look | run | jump

It is finite: 20,910 commands, outputs of 1 to 48 actions. The published length split trains on outputs of at most 22
(16,990 pairs) and tests on 24 to 48 (3,920); Csordas et al. 2021 (arXiv:2108.12284) move the cut-off to 26 and beyond.

COGS (Kim and Linzen 2020, github.com/najoungkim/COGS, `data/`): train.tsv, dev.tsv, test.tsv, gen.tsv, each line
sentence, logical form, type. PCFG SET's productivity split (Hupkes et al. 2020,
github.com/i-machine-think/am-i-compositional, `data/pcfgset/productivity/`): train.src, train.tgt, test.src, test.tgt.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from relpos_fairseq.evaluation.translation import read_system
from relpos_fairseq.io.files import write_text
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.manifests import write_manifest
from relpos_fairseq.io.reading import Count, Positive
from relpos_fairseq.lab.comparison import scores
from relpos_fairseq.lab.comparison.tasks.base import Scored, Task, Workspace, as_arguments, fairseq, kind, write_lines

Pair = tuple[str, str]
SPEED = re.compile(r"Translated .*, ([\d.]+) tokens/s\)")
GENERATE = {
    "beam": 1,
    "max-len-a": 1.5,
    "max-len-b": 60,
    "max-tokens": 8192,
    "num-workers": 0,
    "distributed-world-size": 1,
}


@dataclass(frozen=True, kw_only=True)
class Pairs(Task):
    """Lines of two languages, scored by exact match of the words."""

    languages: ClassVar[Pair] = ("source", "target")
    default: ClassVar[dict] = {
        "task": "translation",
        "arch": "relpos_transformer_tiny",
        "share-all-embeddings": True,
        "criterion": "relpos_label_smoothed_cross_entropy",
        "dropout": 0.1,
    }

    def pairs(self) -> dict[str, list[Pair]]:
        """Return the pairs of `train`, `valid` and the test sets."""
        raise NotImplementedError

    def make(self, folder: Path) -> None:
        for name, pairs in self.pairs().items():
            for side, language in enumerate(self.languages):
                write_lines(folder / "raw" / f"{name}.{language}", [pair[side] for pair in pairs])
        binarise_pairs(folder, "raw", self.sets(), self.languages)

    def score(self, name: str, workspace: Workspace) -> Scored:
        """Translate a test set and score every sentence."""
        log = f"{name}.log"
        (workspace.folder / log).unlink(missing_ok=True)
        flags = GENERATE | self.generate | {"gen-subset": self.subset(name)}
        flags |= {"task": "translation", "path": workspace.model}
        flags |= dict(zip(("source-lang", "target-lang"), self.languages, strict=True))
        workspace.call("generate", log, flags=flags)
        found = (SPEED.search(line) for line in read_lines(workspace.folder / log, "drop"))
        speed = max((float(match[1]) for match in found if match), default=0.0)
        raw = (workspace.data / "raw" / f"{name}.{language}" for language in self.languages)
        sources, references = (list(read_lines(path)) for path in raw)
        system = self.plain(read_system(workspace.folder / log, len(references)))
        write_text(workspace.folder / f"{name}.txt", "".join(f"{line}\n" for line in system), renews=True)
        lengths = np.array([len(line.split()) for line in references])
        inputs = scores.same_inputs(sources)
        return Scored(lengths, self.statistics(system, references), {"tokens_per_second": speed}, inputs)

    def subset(self, name: str) -> str:
        """Return fairseq's name of a test set: test, test1, ..."""
        return f"test{self.sets().index(name) or ''}"

    def plain(self, system: list[str]) -> list[str]:
        """Return translations in the form of the references."""
        return system

    def statistics(self, system: list[str], references: list[str]) -> dict[str, np.ndarray]:
        """Return the statistics of every translation, by metric."""
        right = [line.split() == other.split() for line, other in zip(system, references, strict=True)]
        return {"exact match": scores.matches(right)}


def binarise_pairs(folder: Path, text: str, tests: tuple[str, ...], pair: Pair) -> None:
    """Run fairseq-preprocess on `folder/text`: write `folder/bin` and a manifest."""
    raw = folder / text
    flags = {
        "source-lang": pair[0],
        "target-lang": pair[1],
        "joined-dictionary": True,
        "trainpref": raw / "train",
        "validpref": raw / "valid",
        "testpref": ",".join(str(raw / name) for name in tests),
        "destdir": folder / "bin",
        "workers": 1,
    }
    fairseq("preprocess", as_arguments(flags), folder / "prepare.log")
    made = [folder / "bin", *folder.glob("sentencepiece.model")]
    write_manifest(
        folder / "manifest.json",
        command="relpos compare",
        inputs=sorted(path for path in raw.iterdir() if path.suffix[1:] in pair),
        outputs=made,
        extra={"level": "sentencepiece" if made[1:] else "word", "languages": pair},
    )


def scan_commands() -> dict[str, list[str]]:
    """Return every command and its actions."""
    verbs = {word: [f"I_{word.upper()}"] for word in ("walk", "look", "run", "jump")}
    phrases = dict(verbs)
    for verb, action in {**verbs, "turn": []}.items():
        for side in ("left", "right"):
            turn = [f"I_TURN_{side.upper()}"]
            phrases[f"{verb} {side}"] = turn + action
            phrases[f"{verb} opposite {side}"] = turn * 2 + action
            phrases[f"{verb} around {side}"] = (turn + action) * 4
    repeated = {
        f"{phrase}{word}": actions * times
        for phrase, actions in phrases.items()
        for word, times in (("", 1), (" twice", 2), (" thrice", 3))
    }
    found = dict(repeated)
    for first, before in repeated.items():
        for second, after in repeated.items():
            found[f"{first} and {second}"] = before + after
            found[f"{first} after {second}"] = after + before
    return found


@kind("scan")
@dataclass(frozen=True, kw_only=True)
class Scan(Pairs):
    """SCAN by length."""

    unit: ClassVar[str] = "actions"
    test_sets: ClassVar[tuple[str, ...]] = ("inside", "longer")  # trained lengths, and longer ones

    cutoff: int = 22  # the longest output in training, in actions
    valid: Positive = 500  # pairs of training lengths that validate; as many others are the set `inside`
    test: Count = 0  # longer pairs that are tested, drawn once for all runs; 0: all of them

    def __post_init__(self) -> None:
        if not 1 <= self.cutoff < 48:
            raise ValueError(f"cutoff must be 1 to 47, the longest output has 48, got {self.cutoff}")

    def pairs(self) -> dict[str, list[Pair]]:
        every = [(command, " ".join(actions)) for command, actions in scan_commands().items()]
        random.Random(1).shuffle(every)
        short = [pair for pair in every if len(pair[1].split()) <= self.cutoff]
        long = [pair for pair in every if len(pair[1].split()) > self.cutoff]
        held = min(self.valid, len(short) // 4)
        inside, train = short[held : 2 * held], short[2 * held :]
        return {"valid": short[:held], "inside": inside, "train": train, "longer": long[: self.test or None]}


@dataclass(frozen=True, kw_only=True)
class Published(Pairs):
    """A task whose published files lie in a folder."""

    data: Path  # the folder of the published files
    test: Count = 0  # examples of each test set, drawn once for all runs; 0: all of them

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
        train, valid, test, gen = map(read_columns, self.inputs())
        return {"train": train, "valid": valid, "test": self.drawn(test), "gen": self.drawn(gen)}


def read_columns(path: Path) -> list[Pair]:
    """Read the first two of COGS' three columns."""
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
        train, test = (list(zip(*sides, strict=True)) for sides in (lines[:2], lines[2:]))
        random.Random(1).shuffle(train)
        held = min(1000, len(train) // 10)
        return {"train": train[held:], "valid": train[:held], "test": self.drawn(test)}
