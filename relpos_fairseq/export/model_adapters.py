"""Wrap each kind of model in modules that torch.export can trace, and compare the exported graphs with the model.

These modules take and return plain tensors. torch.export traces the model's own code, so that a graph serves every
scheme. Attention is evaluated by the reference backend, which can be traced with dynamic shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

from relpos_fairseq.core.placement import SchemeStack
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.modules.memory import Memory
from relpos_fairseq.modules.multihead_attention import RelPosMultiheadAttention

EXAMPLE = (3, 7)  # rows and tokens of the inputs that are traced
SIZES = ((1, 1), (2, 3), (5, 19), (1, 50))  # rows and tokens of inputs on which graph and model are compared
SPECIALS = 4  # <s>, <pad>, </s>, <unk>
Runs = dict[str, Callable[..., list[np.ndarray]]]
Pairs = Iterator[tuple[Tensor, np.ndarray]]
LIMIT = 1 << 15  # of a dynamic dimension, unless another is given


@dataclass(frozen=True)
class Graph:
    """A module to export, with example inputs and dynamic dimensions.

    Args:
        name: name of the exported file.
        module: takes and returns tensors.
        inputs: an example of each input, by name.
        free: the dynamic dimensions of each input, by axis: torch.export's `Dim`.
        outputs: names of the outputs.
        about: further entries of the manifest.
    """

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    free: dict[str, dict[int, Any]]
    outputs: tuple[str, ...]
    about: dict[str, Any] = field(default_factory=dict)

    def exported(self) -> Any:
        """Return the module's torch.export.ExportedProgram."""
        shapes: tuple = tuple(self.free.get(name, {}) for name in self.inputs)
        if isinstance(self.module, Step):  # torch.export counts `*given` as one argument
            shapes = (shapes[0], shapes[1:])
        with torch.no_grad():
            return torch.export.export(self.module, tuple(self.inputs.values()), dynamic_shapes=shapes, strict=False)


def free(name: str, least: int = 1, most: int | None = None) -> Any:
    """Return a dynamic dimension of torch.export: a size from `least` to `most` that the graph leaves open."""
    return Dim(name, min=least, max=most or LIMIT)


class _Bare(nn.Module):
    """Base class: wrap a model, in evaluation mode and with `auto` as the backend of its attention."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.eval()
        for module in model.modules():
            if isinstance(module, RelPosMultiheadAttention):
                module.backend = "auto"


class WholeModel(_Bare):
    """Run RoBERTa with all its heads: tokens in; features and the outputs of the heads out."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.kinds = (model.classification_heads, model.span_heads, model.token_heads)
        self.heads = ("lm", *(name for heads in self.kinds for name in heads))

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return features (B, L, E), logits (B, L, V), and the outputs of every other head.

        Args:
            tokens: (B, L), padded on either side.
            segments: (B, L) segment numbers, where the model has segments.
        """
        model = self.model
        features = model.encoder.extract_features(tokens, segments=segments)[0]
        logits = model.encoder.output_layer(features)
        return features, logits, *(head(features) for heads in self.kinds for head in heads.values())


class Encoder(_Bare):
    """Run a translation model's encoder, and project its output to the keys and values of each cross-attention."""

    OUTPUTS = ("source_keys", "source_values", "source_padding")

    def forward(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values (layers, B, H, S, D), and the padding mask (B, S), of source tokens (B, S)."""
        found = self.model.encoder(source)
        states, padding = found["encoder_out"][0], found["encoder_padding_mask"][0]
        keys, values = [], []
        for layer in self.model.decoder.layers:
            cross = layer.encoder_attn
            length, batch, _ = states.shape
            for kept, projection in ((keys, cross.k_proj), (values, cross.v_proj)):
                heads = projection(states).view(length, batch, cross.num_heads, cross.head_dim)
                kept.append(heads.permute(1, 2, 0, 3))
        return torch.stack(keys), torch.stack(values), padding


class _Terms:
    """Replace the cache of position terms: evaluate the terms anew at every step."""

    longest = None  # rotations are scaled by the longest input of the flags

    def evaluate(self, schemes: SchemeStack, positions: Positions) -> tuple:
        return schemes.evaluate(positions)


class _Past:
    """Replace a layer's `DecodingCache`: cached tensors are inputs (`past`) and outputs (`present`) of the graph."""

    places, is_read_by_rows, decided_by = None, False, None

    def __init__(self, past: dict[str, Tensor]) -> None:
        self.position, self.padding, self.past = _Terms(), None, past
        self.length = next(iter(past.values())).size(2)
        self.present: dict[str, Tensor] = {}

    def append(self, new: dict[str, Tensor | None], padding: Tensor | None) -> dict:
        self.present = {
            name: torch.cat([self.past[name], part], dim=2) if name in self.past else part
            for name, part in new.items()
            if part is not None
        }
        return dict.fromkeys(new) | self.present

    def tables(self, *unused: Any) -> None:
        return None

    def clipped_key_products(self, *unused: Any) -> None:
        return None  # a graph computes these products from the keys


def scores_of(decoder: Any, output: Tensor) -> Tensor:
    """Return the scores (B, T, V) of a decoder's output: logits, or log-probabilities of an adaptive softmax."""
    softmax = decoder.adaptive_softmax
    return output if softmax is None else softmax.get_log_prob(output, None)


class Kept(NamedTuple):
    """One tensor of a graph's decoding cache: the same part of several layers' caches, stacked over these layers.

    Attributes:
        name: name of the tensor in the graph, without its prefix `past_` or `present_`.
        part: name of the part in a layer's `DecodingCache`: `key`, `value`, or a scheme's own.
        layers: numbers of the layers, whose parts have the same shape.
    """

    name: str
    part: str
    layers: tuple[int, ...]


class Step(_Bare):
    """Run one step of decoding: tokens and cache in, scores of the next token and new cache out.

    Args:
        model: a model with a `decoder`.
        kept: the tensors of the cache.
        reads_source: whether the decoder attends to an encoder.
    """

    def __init__(self, model: Any, kept: Sequence[Kept], reads_source: bool) -> None:
        super().__init__(model)
        self.kept, self.reads_source = tuple(kept), reads_source

    def forward(self, tokens: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """Return the scores (B, V) of the next token, and the cache of all tokens so far.

        Args:
            tokens: (B, P + 1) all tokens so far; none is padding.
            given: keys, values and padding of the source, as `Encoder` returns them, if the model has an
                encoder; then the cache of the first P tokens: (layers, B, H, P, ...) for each of `kept`.
        """
        decoder = self.model.decoder
        source, past = given[: 3 * self.reads_source], given[3 * self.reads_source :]
        state: dict = {}
        decoder.set_incremental_state(state, "positions", _Terms())
        caches = []
        for index, layer in enumerate(decoder.layers):
            own = {
                kept.part: tensor[kept.layers.index(index)]
                for kept, tensor in zip(self.kept, past, strict=True)
                if index in kept.layers
            }
            caches.append(_Past(own))
            layer.self_attn.set_incremental_state(state, "attn_state", caches[-1])
            if self.reads_source:
                keys, values, padding = source
                given_source = {"prev_key": keys[index], "prev_value": values[index], "prev_key_padding_mask": padding}
                layer.encoder_attn.set_incremental_state(state, "attn_state", given_source | {"beams": 1})
        # Without a source, fairseq's layers leave out cross-attention. Its keys and values are read from the cache.
        named = {"encoder_out": [source[0]]} if self.reads_source else None
        found = decoder(tokens, named, incremental_state=state)
        scores = scores_of(decoder, found[0])[:, -1]
        present = ([caches[layer].present[kept.part] for layer in kept.layers] for kept in self.kept)
        return scores, *map(torch.stack, present)

    @staticmethod
    def of_all(model: Any, tokens: Tensor, source: Any = None) -> Tensor:
        """Return the scores (B, T, V) of the token after each of `tokens` (B, T), from one forward pass of a model."""
        return scores_of(model.decoder, model.decoder(tokens, source)[0])


class MemoryStep(_Bare):
    """Run a language model with memory on one segment: tokens and memory in, scores and new memory out."""

    def forward(self, tokens: Tensor, states: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scores (B, T, V) of the token after each of `tokens`, and the new memory.

        Args:
            tokens: (B, T), none of them padding.
            states: (layers, M, B, E) memory.
            valid: (B, M) True at slots that hold a state: the last slots of a row.
        """
        memory = Memory(tuple(states.unbind(0)), valid)
        output, extra = self.model.decoder(tokens, memory=memory)
        after = extra["memory"].state_dict()
        return scores_of(self.model.decoder, output), after["states"], after["valid"]


def adapter_of(model: Any) -> ModelAdapter:
    """Return the `ModelAdapter` for a model's kind.

    Raises:
        UserError: the model is none of this package.
    """
    if hasattr(model, "span_heads"):
        return Roberta(model)
    decoder = getattr(model, "decoder", None)
    if not hasattr(decoder, "positions"):
        raise UserError(f"a {type(model).__name__} has no graphs: give a relpos model")
    if hasattr(decoder, "mem_len"):
        return WithMemory(model)
    return Translation(model) if hasattr(model, "encoder") else LanguageModel(model)


def random_tokens(words: int, rows: int, length: int, seed: int = 1) -> Tensor:
    """Draw random tokens (rows, length) of a vocabulary of `words`, none of them a special symbol."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(SPECIALS, words, (rows, length), generator=generator)


class ModelAdapter:
    """Base class: make the graphs of one kind of model, and compare the exported graphs with the model."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        stack = self.stack
        self.words = self.input_words = len(stack.dictionary)
        self.pad, self.eos = stack.dictionary.pad(), stack.dictionary.eos()
        self.batch = free("batch")

    def graphs(self) -> list[Graph]:
        raise NotImplementedError(f"{type(self).__name__} must define graphs")

    def compared(self, runs: Runs, rows: int, length: int) -> Pairs:
        """Yield pairs (output of the model, output of the exported graphs) for inputs of a size.

        Args:
            runs: functions that run the exported graphs, by name.
            rows: rows of the inputs.
            length: tokens of a row.
        """
        raise NotImplementedError(f"{type(self).__name__} must define compared")

    @property
    def stack(self) -> Any:
        return self.model.decoder

    def about_scores(self) -> dict[str, str]:
        """Return the manifest's entry of what a decoder's scores are (`scores_of`)."""
        return {"scores": "logits" if self.stack.adaptive_softmax is None else "log-probabilities"}

    @property
    def longest(self) -> int | None:
        """The longest input in tokens that the position scheme allows, or None without a limit."""
        return self.stack.positions.plan.longest

    def sizes(self) -> list[tuple[int, int]]:
        """Return those of SIZES that the position scheme allows."""
        return [size for size in SIZES if self.longest is None or size[1] <= self.longest]

    def facts(self) -> dict[str, Any]:
        """Return entries of the manifest that a user of the graphs needs: vocabulary, special ids and positions."""
        return {
            "positions": self.stack.positions.plan.describe(),
            "longest": self.longest,
            "vocabulary": self.words,
            "pad": self.pad,
            "eos": self.eos,
        }

    def padded(self, rows: int, length: int, left: bool = False) -> Tensor:
        """Draw random tokens (rows, length), whose rows end in eos; the second row has padding."""
        tokens = random_tokens(self.input_words, rows, length)
        tokens[:, -1] = self.eos
        if rows > 1 and length > 2:
            tokens[1, slice(2) if left else slice(-2, None)] = self.pad
        return tokens


class Roberta(ModelAdapter):
    """Adapter of RoBERTa: one graph, which returns features, and logits of the LM head and every other head."""

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
        """Yield pairs for each output; features and logits of padding are left out."""
        inputs = self._inputs(rows, length)
        real = inputs["tokens"] != self.pad
        every = zip(WholeModel(self.model)(**inputs), runs["model"](**inputs), strict=True)
        for ours, theirs in every:
            yield (ours[real], theirs[real.numpy()]) if ours.dim() == 3 else (ours, theirs)


class _Stepping(ModelAdapter):
    """Base class of adapters for models that decode one token at a time with a cache."""

    reads_source = False

    @cached_property
    def _kept(self) -> dict[Kept, Tensor]:
        """The tensors of the cache, each with an example (B, H, 1, ...) of one layer after a first step."""
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
        """Return a cache of zeros for P = `tokens` tokens, by input name: (layers, B, H, P, ...) each."""
        return {
            f"past_{kept.name}": part.new_zeros(len(kept.layers), rows, part.size(1), tokens, *part.shape[3:])
            for kept, part in self._kept.items()
        }

    def step_graph(self, source: dict[str, Tensor], sizes: dict[str, dict]) -> Graph:
        """Return the graph of one step of decoding.

        Args:
            source: examples of what the decoder reads from an encoder, by name.
            sizes: dynamic dimensions of these inputs.
        """
        rows, length = EXAMPLE
        past, longest = self.past(rows, length), self.stack.positions.plan.longest
        before = free("past", 0, longest and longest - 1)
        inputs = {"tokens": random_tokens(self.words, rows, length + 1), **source, **past}
        sizes = {"tokens": {0: self.batch, 1: before + 1}, **sizes}
        sizes |= dict.fromkeys(past, {1: self.batch, 3: before})
        module = Step(self.model, list(self._kept), self.reads_source)
        outputs = ("scores", *(f"present_{kept.name}" for kept in self._kept))
        return Graph("step", module, inputs, sizes, outputs, self.about_scores())

    def stepped(self, runs: Runs, tokens: Tensor, **source: Any) -> Iterator[np.ndarray]:
        """Yield the exported graph's scores (B, V) after each of `tokens` (B, T), step by step with the cache."""
        past = self.past(len(tokens), 0)
        for stop in range(1, tokens.size(1) + 1):
            scores, *present = runs["step"](tokens=tokens[:, :stop], **source, **past)
            past = dict(zip(past, present, strict=True))
            yield scores

    def prefix(self, rows: int, length: int) -> Tensor:
        """Draw random tokens (rows, length) that a decoder reads, the first of each row eos."""
        tokens = random_tokens(self.words, rows, length, seed=2)
        tokens[:, 0] = self.eos
        return tokens


class LanguageModel(_Stepping):
    """Adapter of language models: one graph, of a step of decoding."""

    def graphs(self) -> list[Graph]:
        return [self.step_graph({}, {})]

    def compared(self, runs: Runs, rows: int, length: int) -> Pairs:
        """Yield pairs of scores after each token: the model's from one pass, the graph's step by step."""
        tokens = self.prefix(rows, length)
        ours = Step.of_all(self.model, tokens).unbind(1)
        yield from zip(ours, self.stepped(runs, tokens), strict=True)


class Translation(_Stepping):
    """Adapter of translation models: two graphs, of the encoder and of a step of the decoder."""

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

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.input_words = len(model.encoder.dictionary)

    @property
    def longest(self) -> int | None:
        plans = (self.model.encoder.positions.plan, self.stack.positions.plan)
        return min((plan.longest for plan in plans if plan.longest), default=None)

    def padded(self, rows: int, length: int, left: bool = False) -> Tensor:
        """Draw random tokens, `length` a row not counting the end symbol where the encoder skips it."""
        return super().padded(rows, length + self.model.encoder.skips_end, left)

    def facts(self) -> dict[str, Any]:
        encoder = self.model.encoder.positions.plan.describe()
        return super().facts() | {"encoder_positions": encoder, "source_vocabulary": self.input_words}

    def compared(self, runs: Runs, rows: int, length: int) -> Pairs:
        source, tokens = self.padded(rows, length, left=True), self.prefix(rows, length + 3)
        if self.longest is not None:
            tokens = tokens[:, : self.longest]
        kept = dict(zip(Encoder.OUTPUTS, runs["encoder"](source=source), strict=True))
        ours = Step.of_all(self.model, tokens, self.model.encoder(source)).unbind(1)
        yield from zip(ours, self.stepped(runs, tokens, **kept), strict=True)


class WithMemory(ModelAdapter):
    """Adapter of language models with memory: one graph, of a segment."""

    @property
    def longest(self) -> int | None:
        return super().longest if self.stack.window is None else self.stack.window.segment

    def _memory(self, rows: int) -> dict[str, Tensor]:
        decoder = self.stack
        states = torch.zeros(len(decoder.layers), decoder.mem_len, rows, decoder.embed_dim)
        return {"states": states, "valid": torch.zeros(rows, decoder.mem_len, dtype=torch.bool)}

    def graphs(self) -> list[Graph]:
        """Return one graph: a segment that reads memory and returns new memory.

        Raises:
            UserError: the model has no memory.
        """
        if not self.stack.mem_len:
            raise UserError("this model evaluates without memory (--mem-len 0): it has no graph")
        module, memory = MemoryStep(self.model), self._memory(EXAMPLE[0])
        inputs = {"tokens": random_tokens(self.words, *EXAMPLE), **memory}
        sizes = {"tokens": {0: self.batch, 1: free("length", 1, self.longest)}}
        sizes |= {"states": {2: self.batch}, "valid": {0: self.batch}}
        outputs = ("scores", "new_states", "new_valid")
        return [Graph("segment", module, inputs, sizes, outputs, self.about_scores())]

    def compared(self, runs: Runs, rows: int, length: int) -> Pairs:
        """Yield pairs of scores for three successive segments.

        The model starts without memory; the graph starts with memory of full size that is marked as empty.
        """
        tokens = random_tokens(self.words, rows, 2 * length + 1)
        memory, ours = self._memory(rows), None
        for segment in tokens.split([length, 1, length], dim=1):
            output, extra = self.model.decoder(segment, memory=ours)
            ours = extra["memory"]
            scores, states, valid = runs["segment"](tokens=segment, **memory)
            memory = {"states": states, "valid": valid}
            yield scores_of(self.stack, output), scores
