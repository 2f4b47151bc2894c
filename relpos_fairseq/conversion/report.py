"""Record what a conversion did and lost, and measure how far its result is from the source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.io.errors import UserError

PADDING, BOS, EOS, FIRST = 1, 0, 2, 4  # rows of fairseq's dictionary
SHORTEST = 4  # tokens of a sentence pair's targets that are compared
EXACT = 1e-4  # of a model's own values; rounding stays below, a wrong conversion does not
Outputs = dict[str, Tensor]
Log = Callable[[str], object]


class ConversionError(UserError):
    """A source, an option or a file that cannot be converted; one line that says what to do."""


class NotExactError(ConversionError):
    """The target cannot express the source, and only an exact conversion was asked for.

    Attributes:
        lost: what the target cannot express.
    """

    def __init__(self, message: str, lost: str) -> None:
        super().__init__(message)
        self.lost = lost


class NotComparedError(Exception):
    """The source's own library cannot run the source here; the message says why."""


def never_run(why: str) -> Callable[..., Any]:
    """Return what runs a source that relpos does not run: it raises NotComparedError, which says why."""

    def run(*inputs: Tensor) -> Any:
        raise NotComparedError(why)

    return run


@dataclass
class ConversionReport:
    """Record in words what a conversion did, what it lost, and what its outputs were compared with.

    Args:
        source: the source's positions (`PositionPlan.describe`).
        target: the target's positions.
        steps: what was done, one line each.
        losses: what the target cannot express, with the largest change of a table entry where that
            is known; empty where the rules lose nothing.
        limits: inputs outside of which an exact conversion is not promised.
        longest: the longest input within them, in tokens; None: any.
        rounding: how far, beside their size, outputs may be from the source's since numbers have 16 bits.
        dropped: what the source holds beside the model that outputs compare, and the result does not.
        apart: what `exact` says nothing of.
        compared: the program whose outputs the result's were compared with; empty: none was run.
        not_compared: why no outputs were compared; empty: they were, or nobody tried.
    """

    source: str
    target: str
    steps: list[str] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    limits: list[str] = field(default_factory=list)
    longest: int | None = None
    rounding: float = 0.0
    dropped: list[str] = field(default_factory=list)
    apart: list[str] = field(default_factory=list)
    compared: str = ""
    not_compared: str = ""

    @property
    def exact(self) -> bool:
        """Whether the rules lose nothing: the converted model should compute what the source computes."""
        return not self.losses

    def step(self, text: str) -> None:
        """Record, once, something that was done."""
        self.steps += [text] * (text not in self.steps)

    def lose(self, text: str, moved: float = 0.0) -> None:
        """Record, once, something that was lost, and the largest change of a table entry over all layers."""
        self.losses[text] = max(moved, self.losses.get(text, 0.0))

    @property
    def lost(self) -> list[str]:
        return [f"{text} (rows move by up to {moved:.3g})" if moved else text for text, moved in self.losses.items()]

    def limit(self, length: int, reason: str = "") -> None:
        """Record, once, the longest input in tokens for which the conversion holds."""
        text = f"inputs of up to {length} tokens" + (f" ({reason})" if reason else "")
        self.limits += [text] * (text not in self.limits)
        self.longest = min(length, self.longest or length)

    def lines(self) -> list[str]:
        """Return the report; it says `exact` only where no outputs were expected or they were compared."""
        lines = [f"from      {self.source}", f"to        {self.target}"]
        lines += [f"done      {text}" for text in self.steps]
        lines += [f"lost      {text}" for text in (*self.lost, *self.dropped)]
        lines += [f"holds for {text}" for text in self.limits]
        lines += [f"but for   {text}" for text in self.apart]
        if self.not_compared:
            lines.append(f"compared  no: outputs were not compared on this machine: {self.not_compared}")
            lines += ["exact     no"] if self.losses or self.dropped else []
            return lines
        lines += [f"compared  with {self.compared}"] if self.compared else []
        said = "yes, but for what is named so" if self.apart else "yes"
        lines.append(f"exact     {'no' if self.losses or self.dropped else said}")
        return lines


@dataclass(frozen=True)
class Probe:
    """Random input: sentences of different lengths, padded on the right.

    Args:
        tokens: (B, T) token ids that begin with <s> and end with </s>.
        segments: (B, T) 0, then 1; or None.
    """

    tokens: Tensor
    segments: Tensor | None

    @classmethod
    def draw(cls, rows: int, longest: int, segments: bool, seed: int = 0, batch: int = 3) -> Probe:
        """Draw one of `batch` rows; the last row of the embedding's `rows`, <mask>, occurs too."""
        random = torch.Generator().manual_seed(seed)
        length = max(min(longest, 48), 1)
        tokens = torch.randint(FIRST, max(rows, FIRST + 1), (batch, length), generator=random)
        division = torch.zeros_like(tokens)
        for row in range(batch):
            end = max(length - row * (length // 4), min(length, 3))
            tokens[row, 0], tokens[row, end - 1], tokens[row, end:] = BOS, EOS, PADDING
            division[row, end // 2 : end] = 1
        return cls(tokens, division if segments else None)

    @property
    def real(self) -> Tensor:
        return self.tokens != PADDING


def draw_pairs(rows: tuple[int, int], longest: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw three sentence pairs for embeddings of so many rows of fairseq's dictionaries, up to `longest` tokens each.

    Returns:
        (3, S) sources of different lengths that end in </s>, padded on the right; (3, T) beginnings of targets
        after </s>.
    """
    random = torch.Generator().manual_seed(seed)
    length = min(longest, 40)
    source, target = (torch.randint(FIRST, max(count, FIRST + 1), (3, length), generator=random) for count in rows)
    for row in range(3):
        end = length - row * (length // 4)
        source[row, end - 1], source[row, end:] = EOS, PADDING
    target[:, 0] = EOS
    return source, target


@dataclass(frozen=True)
class Fidelity:
    """Differences between the outputs of a source and its conversion on the same input.

    Args:
        largest: of every output, the largest absolute difference.
        magnitude: of every output, the source's largest absolute value.
        divergence: mean Kullback-Leibler divergence of the masked LM's predictions, in nats.
        agreement: share of positions with the same first choice.
        tokens: real tokens in the probe.
    """

    largest: dict[str, float]
    magnitude: dict[str, float]
    divergence: float | None
    agreement: float | None
    tokens: int

    def lines(self) -> list[str]:
        names = {"logits": "Maximum logit difference", "features": "Maximum feature difference"}
        lines = [
            f"{names.get(name, f'Maximum difference of {name}')}: {value:.3g} (values up to {self.magnitude[name]:.3g})"
            for name, value in self.largest.items()
        ]
        if self.divergence is not None:
            lines.append(
                f"Predictions of {self.tokens} random tokens: KL divergence {self.divergence:.3g} "
                f"nats, same first choice {self.agreement:.1%}"
            )
        return lines

    @property
    def relative(self) -> float:
        """The largest difference beside the output's own size; NaN where one is."""
        each = [value / max(self.magnitude[name], 1e-12) for name, value in self.largest.items()]
        return float(torch.tensor(each).max())


def compare(source: Outputs, target: Outputs, probe: Probe) -> Fidelity:
    """Compare two models' outputs of the same names, without those at padding.

    Raises:
        ValueError: the models have no output in common.
    """
    every = dict.fromkeys(("logits", *source))
    common = [name for name in every if name in source and name in target]
    if not common:
        raise ValueError("source and target have no output in common that could be compared")
    largest, magnitude = {}, {}
    divergence = agreement = None
    for name in common:
        before, after = (
            part[name].double()[probe.real] if part[name].dim() == 3 else part[name].double()
            for part in (source, target)
        )
        largest[name] = float((before - after).abs().max())
        magnitude[name] = float(before.abs().max())
        if name != "logits":
            continue
        old, new = before.log_softmax(-1), after.log_softmax(-1)
        divergence = float((old.exp() * (old - new)).sum(-1).mean().clamp(min=0))
        agreement = float((before.argmax(-1) == after.argmax(-1)).double().mean())
    return Fidelity(largest, magnitude, divergence, agreement, int(probe.real.sum()))


def compare_and_log(
    report: ConversionReport, run: Callable[[], tuple[Outputs, Outputs]], probe: Probe, log: Log
) -> dict[str, float]:
    """Compare source and result, and log the report and how far they are apart.

    Args:
        report: of the conversion; told why nothing was compared, where the source cannot be run.
        run: runs both models on the probe; raises NotComparedError where the source cannot be run.
        probe: the input.
        log: takes a line.

    Returns:
        The largest difference of each output; nothing where none was compared.

    Raises:
        ConversionError: outputs differ though the rules lose nothing.
    """
    measured = None
    try:
        measured = compare(*run(), probe)
    except NotComparedError as error:
        report.compared, report.not_compared = "", str(error)
    wrong = measured is not None and report.exact and not measured.relative <= max(EXACT, report.rounding)  # NaN is not
    if wrong:
        report.lose("what outputs show, though the rules lose nothing")
    for line in (*report.lines(), *(measured.lines() if measured else ())):
        log(line)
    if wrong and measured is not None:
        raise ConversionError(
            f"the conversion should be exact, and differs by {measured.relative:.3g} of the source's values: nothing "
            f"is written; where its config does not contradict its tensors, please report this"
        )
    return measured.largest if measured else {}
