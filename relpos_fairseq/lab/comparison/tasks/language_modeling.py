"""Define decoder-only tasks: perplexity of characters by length of context, and answers to prompts by length.

Prompts as in Kazemnejad et al. 2023 (arXiv:2305.19466): a prompt of n symbols, `>`, an answer; n is uniform up to
`longest` in training and up to `beyond` in the test. The model is a language model of the whole line. An answer counts
if every one of its tokens, the end of the sentence included, is the model's first choice after the true tokens before
it. That is exact match under greedy decoding: a decoder that has made no error so far reads the true tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from relpos_fairseq.io.files import write_text
from relpos_fairseq.io.lines import read_lines
from relpos_fairseq.io.reading import Positive
from relpos_fairseq.lab.comparison import scores
from relpos_fairseq.lab.comparison.tasks.base import Scored, Task, Workspace, binarise, device, kind, write_lines
from relpos_fairseq.lab.toy import corpus

SPACE = "▁"
MARK = ">"  # between a prompt and its answer


DECODER = {
    "task": "language_modeling",
    "arch": "relpos_transformer_lm_tiny",
    "share-decoder-input-output-embed": True,
    "criterion": "relpos_cross_entropy",
}


@kind("characters")
@dataclass(frozen=True, kw_only=True)
class Characters(Task):
    """A language model of characters; the last two twentieths of the text validate and test."""

    unit: ClassVar[str] = "characters of context"
    checkpoint: ClassVar[str] = "best"
    default: ClassVar[dict] = DECODER | {"dropout": 0.1, "sample-break-mode": "none", "lr": 2e-3}

    text: Path | None = None  # a file of lines, plain or compressed; None: the English of the built-in corpus
    context: int = 64  # characters of a sample in training
    times: tuple = (1, 2, 4, 8)  # contexts in the test, as multiples of `context`
    predictions: int = 4096  # scored of the test, the same ones in every context

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", tuple(self.times))
        if self.context < 2 or self.predictions < scores.BLOCK or min(self.times) < 1:
            raise ValueError(
                f"context must be >= 2, predictions >= {scores.BLOCK}, times >= 1, got {self.context}, "
                f"{self.predictions}, {self.times}"
            )

    def sets(self) -> tuple[str, ...]:
        return tuple(f"{times}x" for times in self.times)

    def code(self) -> set[Path]:
        return super().code() if self.text else super().code().union(corpus.SOURCES)

    def inputs(self) -> list[Path]:
        return [self.text] if self.text else []

    def make(self, folder: Path) -> None:
        """Write characters as words, a space as `▁`, and binarise them."""
        if self.text:
            lines = list(read_lines(self.text))
        else:
            lines = [english for english, _ in corpus.build()["train"]]
            random.Random(1).shuffle(lines)
        held = max(1, len(lines) // 20)
        raw, parts = folder / "raw", (lines[: -2 * held], lines[-2 * held : -held], lines[-held:])
        for name, part in zip(("train", "valid", "test"), parts, strict=True):
            write_lines(raw / name, [" ".join(line.replace(" ", SPACE)) for line in part])
        binarise(folder, {split: raw / split for split in ("train", "valid", "test")})

    def flags(self, scheme: dict, seed: int) -> dict:
        """Return fairseq-train's flags; tables of absolute positions have a row for each of the test's."""
        most = self.context * max(self.times)
        lengths = {"tokens-per-sample": self.context, "max-target-positions": most}
        return lengths | super().flags(scheme, seed)

    def score(self, name: str, workspace: Workspace) -> Scored:
        """Score the last predictions of the test with windows of one length."""
        context = self.context * int(name.removesuffix("x"))
        rows = scores.of_predictions(workspace.computed(name, lambda: self.nats(workspace, context)))
        return Scored(np.full(len(rows), context), {"perplexity": rows})

    def nats(self, workspace: Workspace, context: int) -> np.ndarray:
        """Return the negative log-likelihood (N,) of every prediction."""
        from relpos_fairseq.evaluation import language_model

        subject = language_model.load_subject(workspace.model, workspace.data / "bin", "test")
        targets = language_model.last_targets(subject, min(self.predictions, len(subject.tokens) - 1))
        stride = max(1, self.context // 2)
        return language_model.score_with_windows(subject, targets, context, stride, 4).each


@dataclass(frozen=True, kw_only=True)
class Prompts(Task):
    """Prompts and their answers."""

    unit: ClassVar[str] = "symbols"
    test_sets: ClassVar[tuple[str, ...]] = ("inside", "longer")  # trained lengths, and longer ones
    default: ClassVar[dict] = DECODER | {"dropout": 0.0, "sample-break-mode": "eos", "max-tokens": 4096}

    symbols: Positive = 20  # how many different ones there are
    longest: Positive = 20  # the longest prompt in training
    beyond: int = 40  # the longest prompt in the test
    examples: Positive = 20000  # of training
    each: Positive = 20  # test prompts of every length, all different; fewer where there are no more

    def __post_init__(self) -> None:
        if self.beyond <= self.longest:
            raise ValueError(f"beyond must be above longest, {self.longest}, got {self.beyond}")

    def prompt(self, length: int, generator: random.Random) -> list[str]:
        """Return a prompt of a length."""
        return generator.choices([f"s{number}" for number in range(self.symbols)], k=length)

    def possible(self, length: int) -> int:
        """Return how many prompts of a length there are."""
        return self.symbols**length

    def distinct(self, length: int, generator: random.Random) -> list[list[str]]:
        """Return `each` different prompts of a length, or all that there are."""
        found: dict[tuple[str, ...], None] = {}
        while len(found) < min(self.each, self.possible(length)):
            found.setdefault(tuple(self.prompt(length, generator)))
        return [list(one) for one in found]

    def answer(self, prompt: list[str]) -> list[str]:
        """Return the answer to a prompt."""
        raise NotImplementedError

    def lines(self) -> dict[str, list[str]]:
        """Return the lines of `train`, `valid` and the test sets."""
        generator = random.Random(1)
        drawn = [generator.randint(1, self.longest) for _ in range(self.examples)]
        prompts = {"train": [self.prompt(length, generator) for length in drawn]}
        inside, longer = range(1, self.longest + 1), range(self.longest + 1, self.beyond + 1)
        for name, lengths in {"valid": inside, "inside": inside, "longer": longer}.items():
            prompts[name] = [one for length in lengths for one in self.distinct(length, generator)]
        return {name: [" ".join([*one, MARK, *self.answer(one)]) for one in some] for name, some in prompts.items()}

    def make(self, folder: Path) -> None:
        for name, lines in self.lines().items():
            write_lines(folder / "raw" / f"{name}.txt", lines)
        binarise(folder, {split: folder / "raw" / f"{split}.txt" for split in ("train", "valid")})

    def flags(self, scheme: dict, seed: int) -> dict:
        """Return fairseq-train's flags; tables of absolute positions have a row for each of the test's."""
        most = 1 << (3 * self.beyond + 8).bit_length()
        lengths = {"tokens-per-sample": most, "max-target-positions": most}
        return lengths | super().flags(scheme, seed)

    def score(self, name: str, workspace: Workspace) -> Scored:
        lines = list(read_lines(workspace.data / "raw" / f"{name}.txt"))
        outputs = workspace.folder / f"{name}.txt"
        workspace.in_child(
            name, lambda: write_text(outputs, "\n".join([*first_choices(workspace, lines), ""]), renews=True)
        )
        wanted = [line.split(f" {MARK} ", 1) for line in lines]
        found = list(read_lines(outputs))
        right = [answer == line for (_, answer), line in zip(wanted, found, strict=True)]
        lengths = np.array([len(prompt.split()) for prompt, _ in wanted])
        return Scored(lengths, {"exact match": scores.matches(right)})


def first_choices(workspace: Workspace, lines: list[str]) -> list[str]:
    """Return the model's first choice for every token of each answer; the end of the sentence is not written."""
    import torch

    model, task = workspace.load()
    words, where = task.source_dictionary, "cpu" if device() else "cuda"
    mark, found = words.index(MARK), [""] * len(lines)
    ids = [words.encode_line(line, add_if_not_exist=False).long() for line in lines]
    groups: dict[int, list[int]] = {}
    for number, one in enumerate(ids):
        groups.setdefault(len(one), []).append(number)
    with torch.no_grad():
        for numbers in groups.values():
            target = torch.stack([ids[number] for number in numbers]).to(where)
            source = target.roll(1, 1)
            source[:, 0] = words.eos()  # as fairseq's blocks begin
            choice = model(source)[0].argmax(-1).cpu()
            for number, row in zip(numbers, choice, strict=True):
                begin = int((ids[number] == mark).nonzero()[0]) + 1
                end = [words[token] for token in row[begin:].tolist()]
                found[number] = " ".join(end[:-1] + [end[-1]] * (end[-1] != words[words.eos()]))
    return found


@kind("copy")
@dataclass(frozen=True, kw_only=True)
class Copy(Prompts):
    """Repeat the prompt."""

    def answer(self, prompt: list[str]) -> list[str]:
        return prompt


@kind("reverse")
@dataclass(frozen=True, kw_only=True)
class Reverse(Prompts):
    """Repeat the prompt from its end."""

    def answer(self, prompt: list[str]) -> list[str]:
        return prompt[::-1]


@kind("power")
@dataclass(frozen=True, kw_only=True)
class Power(Prompts):
    """a^n to a^n, b^n, or a^2n."""

    answers: str = "a"  # the symbols of the answer for each symbol of the prompt, say `a`, `b` or `a a`

    def possible(self, length: int) -> int:
        return 1

    def prompt(self, length: int, generator: random.Random) -> list[str]:
        return ["a"] * length

    def answer(self, prompt: list[str]) -> list[str]:
        return self.answers.split() * len(prompt)
