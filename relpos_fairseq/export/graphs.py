"""What of a model becomes a graph: its inputs, its outputs, and which sizes are free.

A graph is plain tensors in, plain tensors out.  Attention is evaluated by the reference, which
torch.export reads with sizes as symbols; the model itself is the code, so a graph has every scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import Dim

from relpos_fairseq.modules.cross_attention import CrossAttention
from relpos_fairseq.modules.memory import Memory
from relpos_fairseq.modules.multihead_attention import RelPosMultiheadAttention
from relpos_fairseq.positions import Positions
from relpos_fairseq.stack import SchemeStack

LIMIT = 1 << 15  # of a free size


@dataclass(frozen=True)
class Graph:
    """A module that torch.export reads.

    Args:
        name: of its file.
        module: takes and returns tensors.
        inputs: an example of each input, by name.
        free: by input, which of its axes have which free size.
        outputs: names of what it returns.
        about: what it is, for the manifest.
    """

    name: str
    module: nn.Module
    inputs: dict[str, Tensor]
    free: dict[str, dict[int, Any]]
    outputs: tuple[str, ...]
    about: dict[str, Any] = field(default_factory=dict)

    def exported(self) -> Any:
        shapes: tuple = tuple(self.free.get(name, {}) for name in self.inputs)
        if isinstance(self.module, Step):  # its arguments after the first are one, to torch
            shapes = (shapes[0], shapes[1:])
        with torch.no_grad():
            return torch.export.export(self.module, tuple(self.inputs.values()), dynamic_shapes=shapes, strict=False)


def free(name: str, least: int = 1, most: int | None = None) -> Any:
    """Return a size that the graph does not fix."""
    return Dim(name, min=least, max=most or LIMIT)


class _Bare(nn.Module):
    """A model in evaluation mode whose attention chooses its backend itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.eval()
        for module in model.modules():
            if isinstance(module, RelPosMultiheadAttention):
                module.backend = "auto"


class WholeModel(_Bare):
    """RoBERTa with all its heads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.heads = ("lm", *model.classification_heads, *model.span_heads)

    def forward(self, tokens: Tensor, segments: Tensor | None = None) -> tuple[Tensor, ...]:
        """Features (B, L, E), logits (B, L, V), and those of every other head.

        Args:
            tokens: (B, L), padded on either side.
            segments: (B, L) numbers, where the model has segments.
        """
        model = self.model
        features = model.encoder.extract_features(tokens, segments=segments)[0]
        heads = (*model.classification_heads.values(), *model.span_heads.values())
        logits = model.encoder.output_layer(features)
        return features, logits, *(head(features) for head in heads)


class Encoder(_Bare):
    """A translation model's encoder, and what each layer of the decoder reads of it."""

    OUTPUTS = ("source_keys", "source_values", "source_padding")

    def forward(self, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values (layers, B, H, S, D), and padding (B, S), of tokens (B, S)."""
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
    """Stands for what decoding keeps of terms: they are formed anew."""

    def evaluate(self, schemes: SchemeStack, positions: Positions) -> tuple:
        return schemes.evaluate(positions)


class _Past:
    """Stands for a layer's decoding cache: keys and values come in and go out as tensors."""

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

    def key_tails(self, *unused: Any) -> None:
        return None  # a graph forms them of the keys


def scores_of(decoder: nn.Module, output: Tensor) -> Tensor:
    """Return the scores (B, T, V) of a decoder's output: logits, or log-probabilities."""
    softmax = decoder.adaptive_softmax
    return output if softmax is None else softmax.get_log_prob(output, None)


class _Scored(_Bare):
    """A decoder whose scores are logits, or log-probabilities with an adaptive softmax."""

    @property
    def scores(self) -> str:
        adaptive = self.model.decoder.adaptive_softmax is not None
        return "log-probabilities" if adaptive else "logits"


class Kept(NamedTuple):
    """What some layers keep of a token in tensors of one shape, which a graph has as one tensor.

    Attributes:
        name: the graph's, behind `past_` and `present_`.
        part: the layers' own: `key`, `value`, or what a scheme needs beside them.
        layers: numbers of the layers.
    """

    name: str
    part: str
    layers: tuple[int, ...]


class Step(_Scored):
    """One step of a decoder.

    Args:
        model: it, or one that has it as `decoder`.
        kept: what layers keep a token.
        reads_source: whether it attends to an encoder.
    """

    def __init__(self, model: nn.Module, kept: Sequence[Kept], reads_source: bool) -> None:
        super().__init__(model)
        self.kept, self.reads_source = tuple(kept), reads_source

    def forward(self, tokens: Tensor, *given: Tensor) -> tuple[Tensor, ...]:
        """Scores (B, V) of the next token, and what is kept of all tokens so far.

        Args:
            tokens: (B, P + 1) all tokens so far; none is padding.
            given: keys, values and padding of the source, as `Encoder` returns them (where there is
                one); then of all that is kept (layers, B, H, P, ...), of the first P tokens.
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
                _give_source(layer.encoder_attn, state, index, *source)
        # fairseq's layers leave out cross-attention where no source is given; it is in the cache.
        named = {"encoder_out": [source[0]]} if self.reads_source else None
        found = decoder(tokens, named, incremental_state=state)
        scores = scores_of(decoder, found[0])[:, -1]
        present = ([caches[layer].present[kept.part] for layer in kept.layers] for kept in self.kept)
        return scores, *map(torch.stack, present)

    @staticmethod
    def of_all(model: nn.Module, tokens: Tensor, source: Any = None) -> Tensor:
        """Return the scores (B, T, V) after each token, in one pass."""
        return scores_of(model.decoder, model.decoder(tokens, source)[0])


def _give_source(cross: CrossAttention, state: dict, layer: int, keys: Tensor, values: Tensor, padding: Tensor) -> None:
    cache = {"prev_key": keys[layer], "prev_value": values[layer], "beams": 1}
    cross.set_incremental_state(state, "attn_state", cache | {"prev_key_padding_mask": padding})


class MemoryStep(_Scored):
    """A segment of a model with memory."""

    def forward(self, tokens: Tensor, states: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scores (B, T, V) of what follows each token, and the new memory.

        Args:
            tokens: (B, T), none of them padding.
            states: (layers, M, B, E) memory.
            valid: (B, M) True at slots of it that there are; a row's stand last.
        """
        memory = Memory(tuple(states.unbind(0)), valid)
        output, extra = self.model.decoder(tokens, memory=memory)
        after = extra["memory"].state_dict()
        return scores_of(self.model.decoder, output), after["states"], after["valid"]
