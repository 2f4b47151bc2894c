"""Continue and score texts with a causal language model, with memory or a window of context.

Continuing: a model with memory decodes a segment of its trained length after the memory, then reads the whole segment
once more, which gives the next memory exactly as in evaluation.  A model without memory keeps its context until that is
full, and goes on from the newer half of it.

Scoring: a text is read as `relpos evaluate lm` reads a stream that begins with it, by segments of the trained length
with memory, or by windows that advance by half a window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.inference.checkpoints.loading import Trained, load, longest
from relpos_fairseq.text.assets import LevelText, Text


@dataclass(frozen=True)
class Choice:
    """How the next symbol is drawn.

    Attributes:
        top_k: draw among this many likeliest symbols; 0: among all.
        top_p: draw among the fewest likeliest symbols that have this probability together (Holtzman et al. 2020).
        temperature: divides the logits; 0 takes the likeliest symbol.
        seed: of the draws.
    """

    top_k: int = 0
    top_p: float = 1.0
    temperature: float = 1.0
    seed: int = 1

    def __post_init__(self) -> None:
        if self.top_k < 0:
            raise ValueError(f"--top-k must be >= 0, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"--top-p must be above 0 and at most 1, got {self.top_p}")
        if self.temperature < 0:
            raise ValueError(f"--temperature must be >= 0, got {self.temperature}")

    def draw(self, log_probs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw ids (B,) from log-probabilities (B, V)."""
        if self.temperature == 0:
            return log_probs.argmax(dim=-1)
        scores, order = (log_probs.double() / self.temperature).sort(dim=-1, descending=True)
        probs = scores.softmax(dim=-1)
        if self.top_k:
            probs[:, self.top_k :] = 0.0
        if self.top_p < 1:
            probs = probs / probs.sum(dim=-1, keepdim=True)
            before = probs.cumsum(dim=-1) - probs  # the symbol that reaches top_p is kept
            probs = probs.masked_fill(before >= self.top_p, 0.0)
        place = torch.multinomial(probs.cpu(), 1, generator=generator).to(order.device)
        return order.gather(-1, place).squeeze(-1)


def lines_apart(trained: Trained) -> bool:
    """Tell whether a model was trained to see nothing before a line's beginning."""
    task = trained.cfg.task
    reset = getattr(task, "reset_memory_at_document", False)
    return bool(reset) and str(task.document_boundaries) == "eos"


def line_starts(tokens: Tensor, eos: int, before: Tensor | None = None) -> dict[str, Tensor]:
    """Return as a decoder's input where lines begin in tokens (B, T), which follow `before` (B, 1), if anything."""
    before = torch.full_like(tokens[:, :1], -1) if before is None else before
    return {"document_starts": torch.cat([before, tokens[:, :-1]], dim=1) == eos}


class Continuation:
    """The state of a language model that continues B copies of a text.

    Args:
        trained: the model and its task.
        rows: B.
        mem_len: slots of memory; None: as trained.
        context: tokens that a model without memory sees; None: as trained.
    """

    def __init__(self, trained: Trained, rows: int = 1, mem_len: int | None = None, context: int | None = None) -> None:
        self.decoder, self.rows = trained.model.decoder, rows
        self.words = trained.task.source_dictionary
        self.device, self.memory = trained.device, None
        self.segment = int(trained.cfg.task.tokens_per_sample)
        self.recurrent = hasattr(trained.model, "mem_len")
        if self.recurrent and mem_len is not None:
            trained.model.mem_len = mem_len
        if (context if self.recurrent else mem_len) is not None:
            raise ValueError(
                "--context is for models without memory: give --mem-len"
                if self.recurrent
                else "--mem-len: the model has no memory; leave it out, or give --context"
            )
        limit = longest(trained.model.max_positions())
        if context is not None and not 2 <= context <= (limit or context):
            most = f" and at most {limit}, the positions of its table" if limit else ""
            raise ValueError(f"--context must be >= 2{most}, got {context}")
        self.segment = context or min(self.segment, limit or self.segment)
        self.state: dict = {}
        self.tokens = torch.zeros(rows, 0, dtype=torch.long, device=self.device)
        self.lines_apart, self.last = lines_apart(trained), None  # (B, 1) the symbols before the segment

    @torch.no_grad()
    def read(self, ids: Sequence[int]) -> Tensor:
        """Append ids to every row, and return the log-probabilities (B, V) of the next symbol."""
        row = torch.tensor(ids, device=self.device).expand(self.rows, -1)
        scores = None
        while row.size(1):
            room = self._room()
            part, row = row[:, :room], row[:, room:]
            if self.recurrent and row.size(1):  # a full segment, which more tokens follow
                self.tokens = torch.cat([self.tokens, part], dim=1)
            else:
                scores = self._step(part)
        return scores

    @torch.no_grad()
    def add(self, symbols: Tensor) -> Tensor:
        """Append one symbol (B,) to each row, and return the log-probabilities (B, V) of the next."""
        self._room()
        return self._step(symbols[:, None])

    def _room(self) -> int:
        """Return how many symbols fit into the segment, after a full one has become memory or context."""
        if self.tokens.size(1) >= self.segment:
            if self.recurrent:
                extra = self.decoder.extract_features(self.tokens, None, **self._before())[1]
                self.last = self.tokens[:, -1:]
                self.memory, self.tokens = extra["memory"], self.tokens[:, :0]
                self.state = {}
            else:
                kept, self.tokens = self.tokens[:, -(self.segment // 2) :], self.tokens[:, :0]
                self.state = {}
                self._step(kept)
        return self.segment - self.tokens.size(1)

    def _before(self) -> dict[str, Any]:
        """Return what the decoder is told of the text before the segment, and of lines in it."""
        told = {"memory": self.memory} if self.recurrent else {}
        return told | (line_starts(self.tokens, self.words.eos(), self.last) if self.lines_apart else {})

    def _step(self, new: Tensor) -> Tensor:
        self.tokens = torch.cat([self.tokens, new], dim=1)
        features = self.decoder.extract_features(self.tokens, None, incremental_state=self.state, **self._before())[0]
        output = self.decoder.output_layer(features[:, -1:])
        scores = self.decoder.get_normalized_probs((output, None), True, None)[:, -1].float()
        for never in (self.words.pad(), self.words.bos()):  # symbols that no text has
            scores[:, never] = -torch.inf
        return scores


def open_model(path: Path, data: Path | None, cpu: bool, quantization: str | None = None) -> Trained:
    """Load a language model's checkpoint."""
    return load(path, data, cpu, "relpos sample", quantization)


def ids_of(trained: Trained, text: str) -> list[int]:
    """Return the ids of a text, after the </s> that begins every stream."""
    words = trained.task.source_dictionary
    return [words.eos(), *map(words.index, trained.source.encode(text))]


def sample(start: Continuation, ids: Sequence[int], count: int, choice: Choice) -> Iterator[tuple[Tensor, Tensor]]:
    """Continue a prompt by `count` symbols; yield the ids drawn (B,) and their log-probabilities (B,)."""
    generator = torch.Generator().manual_seed(choice.seed)
    scores = start.read(ids)
    for number in range(count):
        drawn = choice.draw(scores, generator)
        yield drawn, scores.gather(-1, drawn[:, None]).squeeze(-1)
        if number + 1 < count:
            scores = start.add(drawn)


def texts(
    trained: Trained, start: Continuation, prompt: str, count: int, lines: int | None, choice: Choice, streams: bool
) -> list[dict]:
    """Continue a prompt in every row.

    Args:
        trained: the model.
        start: its state before any text.
        prompt: the text to continue.
        count: symbols to draw, at most.
        lines: a row ends after this many lines; None: it ends with `count`.
        choice: how symbols are drawn.
        streams: print the first row while it is drawn.

    Returns:
        For each row its number, prompt, text, number of symbols and their negative log-likelihood in nats.
    """
    words, rows = trained.task.source_dictionary, range(start.rows)
    symbols: list[list[str]] = [[] for _ in rows]
    nats, left = [0.0 for _ in rows], [lines for _ in rows]
    show = streamer(trained.source, prompt)
    for drawn, scores in sample(start, ids_of(trained, prompt), count, choice):
        for row in rows:
            if left[row] == 0:
                continue
            number = int(drawn[row])
            symbols[row].append(words[number])
            nats[row] -= float(scores[row])
            if number == words.eos() and left[row]:
                left[row] -= 1
        if streams:
            print(show(symbols[0][-1]), end="", flush=True)
        if not any(left) and lines:
            break
    if streams:
        print(show(None))
    found = []
    for row in rows:
        show = streamer(trained.source, prompt)
        text = "".join(map(show, symbols[row])) + show(None)
        found.append(
            {
                "sample": row + 1,
                "prompt": prompt,
                "text": text,
                "symbols": len(symbols[row]),
                "nats": round(nats[row], 4),
            }
        )
    return found


def streamer(text: Text, prompt: str) -> Callable[[str | None], str]:
    """Return a function from the next symbol to the text that it adds after a prompt."""
    if not isinstance(text, LevelText):
        first = iter([" "] if prompt and not prompt[-1].isspace() else [])
        return lambda symbol: "" if symbol is None else f"{next(first, '')}{text.decode([symbol])} "
    show = text.stream()
    for symbol in text.encode(prompt):
        show(symbol)
    return show


# Scoring


class Scorer:
    """Scores the ends of texts with a language model.

    Args:
        trained: the model and its task.
        mem_len: slots of memory; None: as trained.
        context: tokens that a model without memory sees; None: as trained.
        rows: texts that are read together if they fit into one segment or window.
    """

    def __init__(
        self, trained: Trained, mem_len: int | None = None, context: int | None = None, rows: int = 16
    ) -> None:
        if mem_len is not None and mem_len < 0:
            raise ValueError(f"mem_len must be >= 0, got {mem_len}")
        if rows < 1:
            raise ValueError(f"rows must be >= 1, got {rows}")
        reading = Continuation(trained, 1, mem_len, context)
        self.segment, self.recurrent, self.lines_apart = reading.segment, reading.recurrent, reading.lines_apart
        self.trained, self.rows = trained, rows
        self.words, self.decoder = trained.task.source_dictionary, trained.model.decoder

    def pair(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Return the ids of </s>, context and continuation, and the index of the first id that is scored.

        Both are split into symbols as one text; a symbol that spans their border is scored.
        """
        before, whole = map(self.trained.source.encode, (context, context + continuation))
        shared = 0
        while shared < min(len(before), len(whole)) and before[shared] == whole[shared]:
            shared += 1
        return [self.words.eos(), *map(self.words.index, whole)], 1 + shared

    @torch.no_grad()
    def score(self, texts: Sequence[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        """Score the ends of texts.

        Args:
            texts: ids, the first of which is </s>, and the index of the first id that is scored.

        Returns:
            Of each text the log-probability of its scored ids (0 for none), and True if greedy decoding would have
            drawn them.
        """
        found: list[tuple[float, bool]] = [(0.0, True)] * len(texts)
        short = [n for n, (ids, _) in enumerate(texts) if len(ids) - 1 <= self.segment]
        short.sort(key=lambda number: -len(texts[number][0]))
        for start in range(0, len(short), self.rows):
            group = short[start : start + self.rows]
            tokens = torch.full((len(group), len(texts[group[0]][0])), self.words.pad())
            for row, number in zip(tokens, group, strict=True):
                row[: len(texts[number][0])] = torch.tensor(texts[number][0])
            if tokens.size(1) < 2:  # none has anything to predict
                continue
            tokens = tokens.to(self.trained.device)
            features = self.decoder.extract_features(tokens[:, :-1], None, **self._lines(tokens[:, :-1]))[0]
            scores, best = self._picked(features, tokens[:, 1:])
            for row, number in enumerate(group):
                ids, first = texts[number]
                part = slice(first - 1, len(ids) - 1)
                found[number] = float(scores[row, part].sum()), bool(best[row, part].all())
        for number in set(range(len(texts))) - set(short):
            ids, first = texts[number]
            total, greedy = [], True
            for start, scores, best in self._parts(ids, first):
                skipped = max(0, first - start)
                total += scores[0, skipped:].tolist()
                greedy = greedy and bool(best[0, skipped:].all())
            found[number] = math.fsum(total), greedy
        return found

    def _parts(self, ids: list[int], first: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Read one long text part by part; yield the index of a part's first target, and what `_picked` returns."""
        tokens, memory = torch.tensor([ids], device=self.trained.device), None
        if self.recurrent:
            for start in range(0, len(ids) - 1, self.segment):
                stop = min(start + self.segment, len(ids) - 1)
                part, before = tokens[:, start:stop], tokens[:, start - 1 : start] if start else None
                told = {"memory": memory} | self._lines(part, before)
                features, extra = self.decoder.extract_features(part, None, **told)
                memory = extra["memory"]
                yield start + 1, *self._picked(features, tokens[:, start + 1 : stop + 1])
            return
        stride = max(1, self.segment // 2)
        for start in range(first, len(ids), stride):
            stop = min(start + stride, len(ids))
            window = tokens[:, max(0, stop - 1 - self.segment) : stop - 1]
            features = self.decoder.extract_features(window, None)[0][:, start - stop :]
            yield start, *self._picked(features, tokens[:, start:stop])

    def _lines(self, tokens: Tensor, before: Tensor | None = None) -> dict[str, Tensor]:
        """Return where lines begin, for a model that was trained to see nothing before them."""
        return line_starts(tokens, self.words.eos(), before) if self.lines_apart else {}

    def _picked(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log-probabilities (B, T) of targets, in fp64, and True where a target is the likeliest symbol."""
        output = self.decoder.output_layer(features)
        scores = self.decoder.get_normalized_probs((output, None), True, {"target": targets})
        picked = scores.gather(-1, targets[..., None]).squeeze(-1).double()
        return picked, scores.argmax(dim=-1) == targets
