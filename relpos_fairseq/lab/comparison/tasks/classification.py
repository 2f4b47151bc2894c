"""Define encoder tasks: a sequence and its label (Ruoss et al. 2023, arXiv:2305.16843).

fairseq's sentence_prediction trains the model from random values. The paper trains on lengths of 1 to 40 and tests on
41 to 500.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from relpos_fairseq.evaluation.classification import Classifier
from relpos_fairseq.io.files import atomic_path
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.reading import Positive, reading
from relpos_fairseq.lab.comparison import scores
from relpos_fairseq.lab.comparison.tasks.base import Scored, Task, Workspace, binarise, device, kind, write_lines

SPECIAL = 2  # tokens of an input besides its symbols: the first and the last
Labelled = tuple[list[str], str]


@dataclass(frozen=True, kw_only=True)
class Labels(Task):
    """Sequences and their labels."""

    unit: ClassVar[str] = "symbols"
    test_sets: ClassVar[tuple[str, ...]] = ("inside", "longer")  # trained lengths, and longer ones
    logged: ClassVar[tuple[str, ...]] = ("valid_loss", "valid_accuracy")
    default: ClassVar[dict] = {
        "task": "sentence_prediction",
        "arch": "relpos_roberta_tiny",
        "num-classes": 2,
        "init-token": 0,
        "criterion": "sentence_prediction_glue",
        "dropout": 0.0,
        "attention-dropout": 0.0,
        "pooler-dropout": 0.0,
        "batch-size": 128,
        "max-tokens": 8192,
        "required-batch-size-multiple": 1,
    }

    longest: int = 40  # the longest sequence in training
    beyond: int = 200  # the longest in the test
    examples: Positive = 20000  # of training
    test: Positive = 500  # examples of each test set

    def __post_init__(self) -> None:
        if not 2 <= self.longest < self.beyond:
            raise ValueError(f"longest must be 2 to beyond, {self.beyond}, got {self.longest}")

    def example(self, length: int, generator: random.Random) -> Labelled:
        """Return a sequence of about a length, and its label; each label comes as often."""
        raise NotImplementedError

    def make(self, folder: Path) -> None:
        generator, raw = random.Random(1), folder / "raw"
        for name, size, least, most in (
            ("train", self.examples, 2, self.longest),
            ("valid", self.test, 2, self.longest),
            ("inside", self.test, 2, self.longest),
            ("longer", self.test, self.longest + 2, self.beyond),
        ):
            some = [self.example(generator.randint(least, most), generator) for _ in range(size)]
            write_lines(raw / f"{name}.input0", [" ".join(sequence) for sequence, _ in some])
            write_lines(raw / f"{name}.label", [label for _, label in some])
        for part in ("input0", "label"):
            texts = {split: raw / f"{split}.{part}" for split in ("train", "valid")}
            texts["test"] = ",".join(str(raw / f"{name}.{part}") for name in self.sets())
            binarise(folder, texts, f"bin/{part}")

    def flags(self, scheme: dict, seed: int) -> dict:
        """Return fairseq-train's flags; tables of absolute positions have a row for each of the test's."""
        return {"max-positions": self.beyond + 8} | super().flags(scheme, seed)

    def score(self, name: str, workspace: Workspace) -> Scored:
        split = f"test{self.sets().index(name) or ''}"
        logits, targets, lengths = logits_of(workspace, name, split)
        right = logits.argmax(1) == targets
        inputs = scores.same_inputs(list(read_lines(workspace.data / "raw" / f"{name}.input0")))
        return Scored(lengths - SPECIAL, {"accuracy": scores.matches(right)}, inputs=inputs)


def logits_of(workspace: Workspace, name: str, split: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the outputs of a classifier that fairseq's sentence_prediction trained, also kept as `NAME.npz`.

    Args:
        workspace: of the run.
        name: of the test set.
        split: fairseq's name of the test set.

    Returns:
        Logits (N, classes), targets (N,), tokens (N,), in the data's order.
    """
    place = workspace.folder / f"{name}.npz"

    def predict() -> None:
        classifier = Classifier(workspace.model, workspace.data / "bin", cpu=bool(device()))
        logits, targets = classifier.outputs(split)
        dataset = classifier.task.datasets[split]
        tokens = [dataset.num_tokens(index) for index in range(len(dataset))]
        with atomic_path(place) as partial, partial.open("wb") as file:
            np.savez_compressed(file, np.stack([row.numpy() for row in logits]), np.array(targets), np.array(tokens))

    workspace.in_child(name, predict)
    with reading(place, "a file of outputs", "delete it: it is made anew"), np.load(place) as arrays:
        return tuple(arrays[key] for key in arrays.files)


@kind("even_pairs")
@dataclass(frozen=True, kw_only=True)
class EvenPairs(Labels):
    """The label is 1 where `ab` and `ba` together occur an odd number of times, which is where the ends differ."""

    def example(self, length: int, generator: random.Random) -> Labelled:
        sequence = generator.choices("ab", k=length)
        pairs = sum(one != other for one, other in zip(sequence, sequence[1:], strict=False))
        return sequence, str(pairs % 2)


@kind("missing_duplicate")
@dataclass(frozen=True, kw_only=True)
class MissingDuplicate(Labels):
    """The label is the symbol that is masked in a sequence that is written twice."""

    def example(self, length: int, generator: random.Random) -> Labelled:
        half = generator.choices("ab", k=length // 2)
        sequence, place = half * 2, generator.randrange(length // 2 * 2)
        label, sequence[place] = sequence[place], "?"
        return sequence, label
