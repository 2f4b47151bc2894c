"""Translate lines of text with anything that translates symbols: in batches sorted by length, and in order again.

A `Translator` is a checkpoint (`BeamSearch` of `checkpoints/loading.py`) or an export that another library runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.progress import progress
from relpos_fairseq.text.assets import Text

logger = logging.getLogger(__name__)
SHORTEST = 2  # symbols of a source with its </s>
SHOWN = 10  # numbers of lines that a warning lists


@dataclass(frozen=True)
class Search:
    """Options of beam search, with fairseq-generate's names, meanings and defaults."""

    beam: int = 5
    nbest: int = 1
    lenpen: float = 1.0
    unkpen: float = 0.0
    max_len_a: float = 0.0
    max_len_b: int = 200
    min_len: int = 1
    no_repeat_ngram_size: int = 0

    def __post_init__(self) -> None:
        for name in ("beam", "nbest"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be >= 1, got {getattr(self, name)}")
        if self.nbest > self.beam:
            raise ValueError(f"--nbest {self.nbest} needs --beam {self.nbest}, got {self.beam}")
        if int(self.max_len_a * SHORTEST + self.max_len_b) < self.min_len:
            raise ValueError(
                f"--max-len-a {self.max_len_a} and --max-len-b {self.max_len_b} allow a short line no symbol: "
                f"--max-len-b is at least {self.min_len}"
            )


@dataclass(frozen=True)
class Hypothesis:
    """A translation in symbols; its score is the log-probability in nats / length ** lenpen."""

    symbols: list[str]
    score: float


class Translator(Protocol):
    """A model that translates sentences in symbols.

    Attributes:
        source: the source language's text, to symbols and back.
        target: the target language's.
        longest: the most symbols of a source sentence, `</s>` not counted, or None.
    """

    source: Text
    target: Text
    longest: int | None

    def translate(self, batch: Sequence[list[str]], search: Search) -> list[list[Hypothesis]]:
        """Return the `search.nbest` best translations of each sentence, best first."""


@dataclass(frozen=True)
class Translated:
    """A line with its translations: texts and scores, best first."""

    number: int
    source: str
    texts: list[str]
    scores: list[float]


@dataclass(frozen=True)
class Batching:
    """How lines are batched.

    Attributes:
        max_tokens: symbols of a batch, padding and `</s>` included.
        max_sentences: sentences of a batch; more are slower on a CPU, whose caches hold no more scores of a vocabulary.
        buffer: lines that are read and sorted at a time.
        cut: cut a sentence that is too long; else it is an error.
    """

    max_tokens: int = 4096
    max_sentences: int = 128
    buffer: int = 8192
    cut: bool = False


def translate(translator: Translator, lines: Iterable[str], search: Search, batching: Batching) -> Iterator[Translated]:
    """Translate a stream of lines and yield the results in order; an empty line's translations are empty."""
    lines, done = iter(lines), 0
    with progress(description="translate", unit="lines") as bar:
        while chunk := list(islice(lines, batching.buffer)):
            yield from _chunk(translator, chunk, done, search, batching, bar)
            done += len(chunk)


def _chunk(
    translator: Translator, lines: list[str], first: int, search: Search, batching: Batching, bar
) -> Iterator[Translated]:
    encoded, cut = [translator.source.encode(line) for line in lines], []
    for number, symbols in enumerate(encoded):
        if translator.longest is not None and len(symbols) > translator.longest:
            if not batching.cut:
                raise UserError(
                    f"line {first + number + 1} has {len(symbols):,} symbols, and the model takes "
                    f"{translator.longest:,}: shorten it, or give --on-long-line cut"
                )
            del symbols[translator.longest :]
            cut.append(first + number + 1)
    if cut:
        numbers = ", ".join(map(str, cut[:SHOWN])) + (", ..." if len(cut) > SHOWN else "")
        logger.warning("%d lines were cut to %d symbols: %s", len(cut), translator.longest, numbers)
    found: list[list[Hypothesis]] = [[Hypothesis([], 0.0)] * search.nbest for _ in lines]
    bar.update(sum(not symbols for symbols in encoded))
    for batch in batches([len(symbols) for symbols in encoded], batching):
        results = translator.translate([encoded[n] for n in batch], search)
        for number, hypotheses in zip(batch, results, strict=True):
            found[number] = hypotheses
        bar.update(len(batch))
    for number, (line, hypotheses) in enumerate(zip(lines, found, strict=True)):
        texts = [translator.target.decode(one.symbols) for one in hypotheses]
        scores = [one.score for one in hypotheses]
        yield Translated(first + number + 1, line, texts, scores)


def batches(lengths: Sequence[int], batching: Batching) -> Iterator[list[int]]:
    """Yield batches of sentence numbers, longest sentences first; empty sentences are in no batch."""
    batch: list[int] = []
    width = 0
    for number in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        if not lengths[number]:
            break
        full = (len(batch) + 1) * width > batching.max_tokens
        if batch and (full or len(batch) == batching.max_sentences):
            yield batch
            batch = []
        if not batch:
            width = lengths[number] + 1  # </s>
        batch.append(number)
    if batch:
        yield batch
