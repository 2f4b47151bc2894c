"""Decoder-only tasks: a prompt, `>`, an answer; trained on some lengths, tested beyond them.

Kazemnejad et al. 2023 (arXiv:2305.19466): n symbols in the prompt, n uniform up to `longest` in
training, test lengths up to twice that.  The model is a language model of the whole line.

An answer counts if every one of its tokens, the end of the sentence included, is the model's first
choice after the true tokens before it.  That is exact match under greedy decoding: a decoder that
has made no error so far reads the true tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from relpos_fairseq.comparison import scores
from relpos_fairseq.comparison.commands import device
from relpos_fairseq.comparison.tasks.base import Run, Scored, Task, binarise, kind, write_lines
from relpos_fairseq.engine.files import write_text
from relpos_fairseq.engine.lines import read_lines

MARK = ">"


@dataclass(frozen=True, kw_only=True)
class Prompts(Task):
    """Prompts and answers."""

    unit: ClassVar[str] = "symbols"
    test_sets: ClassVar[tuple[str, ...]] = ("inside", "longer")  # trained lengths, and longer ones
    default: ClassVar[dict] = {
        "task": "language_modeling",
        "arch": "relpos_transformer_lm_tiny",
        "dropout": 0.0,
        "share-decoder-input-output-embed": True,
        "criterion": "relpos_cross_entropy",
        "sample-break-mode": "eos",
        "max-tokens": 4096,
    }

    symbols: int = 20  # how many different ones there are
    longest: int = 20  # the longest prompt in training
    beyond: int = 40  # the longest prompt in the test
    examples: int = 20000  # of training
    each: int = 20  # test prompts of every length

    def __post_init__(self) -> None:
        for name in ("symbols", "longest", "examples", "each"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.beyond <= self.longest:
            raise ValueError(f"beyond must be above longest, {self.longest}, got {self.beyond}")

    def prompt(self, length: int, generator: random.Random) -> list[str]:
        """Return a prompt of a length."""
        return generator.choices([f"s{number}" for number in range(self.symbols)], k=length)

    def answer(self, prompt: list[str]) -> list[str]:
        """Return the answer to a prompt."""
        raise NotImplementedError

    def lines(self) -> dict[str, list[str]]:
        """Return `train`, `valid` and the test sets."""
        generator, found = random.Random(1), {}
        some = [generator.randint(1, self.longest) for _ in range(self.examples)]
        within, after = range(1, self.longest + 1), range(self.longest + 1, self.beyond + 1)
        for name, lengths in {
            "train": some,
            "valid": [n for n in within for _ in range(self.each)],
            "inside": [n for n in within for _ in range(self.each)],
            "longer": [n for n in after for _ in range(self.each)],
        }.items():
            prompts = [self.prompt(length, generator) for length in lengths]
            found[name] = [" ".join([*one, MARK, *self.answer(one)]) for one in prompts]
        return found

    def make(self, folder: Path) -> None:
        for name, lines in self.lines().items():
            write_lines(folder / "raw" / f"{name}.txt", lines)
        binarise(folder, {split: folder / "raw" / f"{split}.txt" for split in ("train", "valid")})

    def flags(self, scheme: dict, seed: int) -> dict:
        """Return fairseq-train's flags; tables of positions reach as far as the test."""
        most = 1 << (3 * self.beyond + 8).bit_length()
        lengths = {"tokens-per-sample": most, "max-target-positions": most}
        return lengths | super().flags(scheme, seed)

    def score(self, name: str, run: Run) -> Scored:
        lines = list(read_lines(run.data / "raw" / f"{name}.txt"))
        outputs = run.folder / f"{name}.txt"
        run.apart(name, lambda: write_text(outputs, "\n".join([*answers(run, lines), ""])))
        wanted = [line.split(f" {MARK} ", 1) for line in lines]
        found = list(read_lines(outputs))
        right = [answer == line for (_, answer), line in zip(wanted, found, strict=True)]
        lengths = np.array([len(prompt.split()) for prompt, _ in wanted])
        return Scored(lengths, {"exact match": scores.matches(right)})


def answers(run: Run, lines: list[str]) -> list[str]:
    """Return the first choices for every token of the answers; a right end is not written."""
    import torch

    model, task = run.load()
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

    # the symbols of the answer for each symbol of the prompt, say `a`, `b` or `a a`
    answers: str = "a"

    def prompt(self, length: int, generator: random.Random) -> list[str]:
        return ["a"] * length

    def answer(self, prompt: list[str]) -> list[str]:
        return self.answers.split() * len(prompt)
