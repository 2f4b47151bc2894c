"""The kinds of model that have graphs: which, from which example, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from relpos_fairseq.export.extras import ExportError
from relpos_fairseq.export.graphs import Encoder, Graph, Kept, MemoryStep, Step, WholeModel, free, scores_of

EXAMPLE = (3, 7)  # rows and tokens that are traced
SIZES = ((1, 1), (2, 3), (5, 19), (1, 50))  # others, as far as positions reach
SPECIALS = 4  # <s>, <pad>, </s>, <unk>
Runs = dict[str, Callable[..., list[np.ndarray]]]
Pairs = Iterator[tuple[Tensor, np.ndarray]]


def kind_of(model: nn.Module) -> Kind:
    """Return a model's kind.

    Raises:
        ExportError: it is no model of this package.
    """
    if hasattr(model, "span_heads"):
        return Roberta(model)
    decoder = getattr(model, "decoder", None)
    if not hasattr(decoder, "positions"):
        raise ExportError(f"a {type(model).__name__} has no graphs: give a relpos model")
    if hasattr(decoder, "mem_len"):
        return WithMemory(model)
    return Translation(model) if hasattr(model, "encoder") else LanguageModel(model)


def random_tokens(words: int, rows: int, length: int, seed: int = 1) -> Tensor:
    """Draw (rows, length) tokens, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SPECIALS, words, (rows, length), generator=generator)


class Kind:
    """A kind of model: its graphs, and how they are compared with it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()
        stack = self.stack
        self.words = len(stack.dictionary)
        self.pad, self.eos = stack.dictionary.pad(), stack.dictionary.eos()
        self.batch = free("batch")

    def graphs(self) -> list[Graph]:
        raise NotImplementedError(f"{type(self).__name__} must define graphs")

    def compared(self, runs: Runs, rows: int, length: int) -> Pairs:
        """Yield the model's outputs, and those of its graphs."""
        raise NotImplementedError(f"{type(self).__name__} must define compared")

    @property
    def stack(self) -> Any:
        return self.model.decoder

    @property
    def input_words(self) -> int:
        return self.words

    @property
    def longest(self) -> int | None:
        """Most tokens that positions reach, or None."""
        return self.stack.positions.plan.longest

    def sizes(self) -> list[tuple[int, int]]:
        """Return those of SIZES that positions reach."""
        return [size for size in SIZES if self.longest is None or size[1] <= self.longest]

    def facts(self) -> dict[str, Any]:
        """Return what whoever runs the graphs must know: symbols' numbers and positions."""
        return {
            "positions": self.stack.positions.plan.describe(),
            "longest": self.longest,
            "vocabulary": self.words,
            "pad": self.pad,
            "eos": self.eos,
        }

    def padded(self, rows: int, length: int, left: bool = False) -> Tensor:
        """Tokens that end in eos; the second row has padding."""
        tokens = random_tokens(self.input_words, rows, length)
        tokens[:, -1] = self.eos
        if rows > 1 and length > 2:
            tokens[1, slice(2) if left else slice(-2, None)] = self.pad
        return tokens


class Roberta(Kind):
    """One graph: features, logits of the LM head, and logits of every other head."""

    @property
    def stack(self) -> Any:
        return self.model.encoder.sentence_encoder

    def _inputs(self, rows: int, length: int) -> dict[str, Tensor]:
        plan, tokens = self.stack.positions.plan, self.padded(rows, length)
        if plan.segment_encoding == "none":
            return {"tokens": tokens}
        halves = (torch.arange(length) * plan.num_segments // length).expand(rows, -1)
        return {"tokens": tokens, "segments": halves.contiguous()}

    def graphs(self) -> list[Graph]:
        module, inputs = WholeModel(self.model), self._inputs(*EXAMPLE)
        sizes = {0: self.batch, 1: free("length", 1, self.longest)}
        outputs = ("features", *(f"logits_{name}" for name in module.heads))
        return [Graph("model", module, inputs, dict.fromkeys(inputs, sizes), outputs)]

    def compared(self, runs: Runs, rows: int, length: int) -> Pairs:
        """Every output; those at padding are nobody's."""
        inputs = self._inputs(rows, length)
        real = inputs["tokens"] != self.pad
        every = zip(WholeModel(self.model)(**inputs), runs["model"](**inputs), strict=True)
        for ours, theirs in every:
            yield (ours[real], theirs[real.numpy()]) if ours.dim() == 3 else (ours, theirs)


class _Stepping(Kind):
    """What decodes a token at a time and keeps something of each."""

    reads_source = False

    @cached_property
    def _kept(self) -> dict[Kept, Tensor]:
        """What layers keep a token, as a first step leaves it in one of them: (B, H, 1, ...)."""
        state: dict = {}
        source = self.model.encoder(self.padded(1, 2)) if self.reads_source else None
        self.stack(torch.tensor([[self.eos]]), source, incremental_state=state)
        groups: dict[tuple, tuple[list[int], Tensor]] = {}
        for number, layer in enumerate(self.stack.layers):
            cache = layer.self_attn._get_input_buffer(state)  # noqa: SLF001
            for part, buffer in cache.buffers().items():
                first = buffer[:, :, :1]
                groups.setdefault((part, first.shape), ([], first))[0].append(number)
        kept: dict[Kept, Tensor] = {}
        for (part, _), (layers, first) in groups.items():
            another = any(part == known.part for known in kept)  # of another shape
            kept[Kept(f"{part}_{layers[0]}" if another else part, part, tuple(layers))] = first
        return kept

    def past(self, rows: int, tokens: int) -> dict[str, Tensor]:
        """What is kept of so many tokens (layers, B, H, P, ...), as zeros."""
        return {
            f"past_{kept.name}": part.new_zeros(len(kept.layers), rows, part.size(1), tokens, *part.shape[3:])
            for kept, part in self._kept.items()
        }

    def step_graph(self, source: dict[str, Tensor], sizes: dict[str, dict]) -> Graph:
        """Return the graph of a step, given what it reads of a source."""
        rows, length = EXAMPLE
        past, longest = self.past(rows, length), self.stack.positions.plan.longest
        before = free("past", 0, longest and longest - 1)
        inputs = {"tokens": random_tokens(self.words, rows, length + 1), **source, **past}
        sizes = {"tokens": {0: self.batch, 1: before + 1}, **sizes}
        sizes |= dict.fromkeys(past, {1: self.batch, 3: before})
        module = Step(self.model, list(self._kept), self.reads_source)
        outputs = ("scores", *(f"present_{kept.name}" for kept in self._kept))
        return Graph("step", module, inputs, sizes, outputs, {"scores": module.scores})

    def stepped(self, runs: Runs, tokens: Tensor, **source: Any) -> Iterator[np.ndarray]:
        """Yield the scores (B, V) after each of the tokens (B, T)."""
        past = self.past(len(tokens), 0)
        for stop in range(1, tokens.size(1) + 1):
            scores, *present = runs["step"](tokens=tokens[:, :stop], **source, **past)
            past = dict(zip(past, present, strict=True))
            yield scores

    def prefix(self, rows: int, length: int) -> Tensor:
        """Tokens that a decoder reads, the first of them eos."""
        tokens = random_tokens(self.words, rows, length, seed=2)
        tokens[:, 0] = self.eos
        return tokens


class LanguageModel(_Stepping):
    """One graph, of a step."""

    def graphs(self) -> list[Graph]:
        return [self.step_graph({}, {})]

    def compared(self, runs: Runs, rows: int, length: int) -> Pairs:
        """The scores after every token, ours in one pass."""
        tokens = self.prefix(rows, length)
        ours = Step.of_all(self.model, tokens).unbind(1)
        yield from zip(ours, self.stepped(runs, tokens), strict=True)


class Translation(_Stepping):
    """Two graphs: an encoder, and a step of the decoder."""

    reads_source = True

    def graphs(self) -> list[Graph]:
        tokens = self.padded(*EXAMPLE, left=True)
        length = free("length", 1, self.model.encoder.positions.plan.longest)
        encoder = Encoder(self.model)
        kept = dict(zip(Encoder.OUTPUTS, encoder(tokens), strict=True))
        sizes = {name: {1: self.batch, 3: length} for name in kept}
        sizes["source_padding"] = {0: self.batch, 1: length}
        first = {"source": {0: self.batch, 1: length}}
        return [Graph("encoder", encoder, {"source": tokens}, first, Encoder.OUTPUTS), self.step_graph(kept, sizes)]

    @property
    def input_words(self) -> int:
        return len(self.model.encoder.dictionary)

    @property
    def longest(self) -> int | None:
        plans = (self.model.encoder.positions.plan, self.stack.positions.plan)
        return min((plan.longest for plan in plans if plan.longest), default=None)

    def padded(self, rows: int, length: int, left: bool = False) -> Tensor:
        """As for any model; so many tokens that the encoder reads."""
        return super().padded(rows, length + self.model.encoder.skips_end, left)

    def facts(self) -> dict[str, Any]:
        encoder = self.model.encoder.positions.plan.describe()
        words = {"source_vocabulary": self.input_words}
        return super().facts() | {"encoder_positions": encoder} | words

    def compared(self, runs: Runs, rows: int, length: int) -> Pairs:
        source, tokens = self.padded(rows, length, left=True), self.prefix(rows, length + 3)
        if self.longest is not None:
            tokens = tokens[:, : self.longest]
        kept = dict(zip(Encoder.OUTPUTS, runs["encoder"](source=source), strict=True))
        ours = Step.of_all(self.model, tokens, self.model.encoder(source)).unbind(1)
        yield from zip(ours, self.stepped(runs, tokens, **kept), strict=True)


class WithMemory(Kind):
    """One graph: a segment that reads memory and leaves one."""

    @property
    def longest(self) -> int | None:
        return super().longest if self.stack.window is None else self.stack.window.segment

    def _memory(self, rows: int) -> dict[str, Tensor]:
        decoder = self.stack
        states = torch.zeros(len(decoder.layers), decoder.mem_len, rows, decoder.embed_dim)
        return {"states": states, "valid": torch.zeros(rows, decoder.mem_len, dtype=torch.bool)}

    def graphs(self) -> list[Graph]:
        """One.

        Raises:
            ExportError: the model has no memory.
        """
        if not self.stack.mem_len:
            raise ExportError("this model evaluates without memory (--mem-len 0): it has no graph")
        module, memory = MemoryStep(self.model), self._memory(EXAMPLE[0])
        inputs = {"tokens": random_tokens(self.words, *EXAMPLE), **memory}
        sizes = {"tokens": {0: self.batch, 1: free("length", 1, self.longest)}}
        sizes |= {"states": {2: self.batch}, "valid": {0: self.batch}}
        outputs = ("scores", "new_states", "new_valid")
        return [Graph("segment", module, inputs, sizes, outputs, {"scores": module.scores})]

    def compared(self, runs: Runs, rows: int, length: int) -> Pairs:
        """Three segments, each after the memory of the one before; ours with memory as it grows."""
        tokens = random_tokens(self.words, rows, 2 * length + 1)
        memory, ours = self._memory(rows), None
        for segment in tokens.split([length, 1, length], dim=1):
            output, extra = self.model.decoder(segment, memory=ours)
            ours = extra["memory"]
            scores, states, valid = runs["segment"](tokens=segment, **memory)
            memory = {"states": states, "valid": valid}
            yield scores_of(self.stack, output), scores
