"""Encoder-decoder tasks: a source, a target, translated by fairseq-generate."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from relpos_fairseq.comparison import scores
from relpos_fairseq.comparison.commands import as_arguments, fairseq
from relpos_fairseq.comparison.tasks.base import Run, Scored, Task, write_lines
from relpos_fairseq.engine.files import write_text
from relpos_fairseq.engine.lines import read_lines
from relpos_fairseq.engine.manifest import write_manifest
from relpos_fairseq.evaluation.hypotheses import read_system

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


def binarise_pairs(folder: Path, text: str, tests: tuple[str, ...], pair: Pair) -> None:
    """Run fairseq-preprocess on `folder/text`; `folder/bin` is made, and a manifest."""
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


@dataclass(frozen=True, kw_only=True)
class Pairs(Task):
    """Lines of two languages; exact match, in the tokens of the files."""

    languages: ClassVar[Pair] = ("source", "target")
    default: ClassVar[dict] = {
        "task": "translation",
        "arch": "relpos_transformer_tiny",
        "share-all-embeddings": True,
        "criterion": "relpos_label_smoothed_cross_entropy",
        "dropout": 0.1,
    }

    def pairs(self) -> dict[str, list[Pair]]:
        """Return `train`, `valid` and the test sets."""
        raise NotImplementedError

    def make(self, folder: Path) -> None:
        for name, pairs in self.pairs().items():
            for side, language in enumerate(self.languages):
                write_lines(folder / "raw" / f"{name}.{language}", [pair[side] for pair in pairs])
        binarise_pairs(folder, "raw", self.sets(), self.languages)

    def score(self, name: str, run: Run) -> Scored:
        """Translate a test set and score every sentence."""
        log = f"{name}.log"
        (run.folder / log).unlink(missing_ok=True)
        flags = GENERATE | self.generate | {"gen-subset": self.subset(name)}
        flags |= {"task": "translation", "path": run.model}
        flags |= dict(zip(("source-lang", "target-lang"), self.pair(run), strict=True))
        run.call("generate", log, flags=flags)
        found = (SPEED.search(line) for line in read_lines(run.folder / log, "drop"))
        speed = max((float(match[1]) for match in found if match), default=0.0)
        references = list(read_lines(run.data / "raw" / f"{name}.{self.pair(run)[1]}"))
        system = self.plain(read_system(run.folder / log, len(references)), run)
        write_text(run.folder / f"{name}.txt", "".join(f"{line}\n" for line in system))
        lengths = np.array([len(line.split()) for line in references])  # of the outputs
        return Scored(lengths, self.statistics(system, references), {"tokens_per_second": speed})

    def subset(self, name: str) -> str:
        """Return fairseq's name of a test set: test, test1, ..."""
        return f"test{self.sets().index(name) or ''}"

    def pair(self, run: Run) -> Pair:
        return self.languages

    def plain(self, system: list[str], run: Run) -> list[str]:
        """Return translations as the references are written."""
        return system

    def statistics(self, system: list[str], references: list[str]) -> dict[str, np.ndarray]:
        right = [line.split() == other.split() for line, other in zip(system, references, strict=True)]
        return {"exact match": scores.matches(right)}
