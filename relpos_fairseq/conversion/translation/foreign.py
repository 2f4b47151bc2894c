"""A translation model of another library, and its own formula.

What a conversion is measured against: it shares nothing with our model.  Vaswani et al. 2017, with
layer norm after each block (Marian) or before it (OpenNMT-py), and with Shaw's relative positions
as OpenNMT-py has them, where one table serves keys and values:

    e_ij = q_i.(k_j + a_r) / sqrt(d),   z_i = sum_j alpha_ij (v_j + a_r),   r = clip(j - i, -k, k)
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.conversion.layouts import State
from relpos_fairseq.conversion.report import ConversionError
from relpos_fairseq.conversion.vocabulary import Vocabulary

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_accurate": lambda x: F.gelu(x, approximate="tanh"),
    "swish": F.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class Form:
    """What the tensors do not say.

    Args:
        heads: number of heads of encoder and decoder.
        layers: number of layers of encoder and decoder.
        pre_norm: whether layer norm comes before each block, and after the last layer.
        activation: fairseq's name.
        scale: what embeddings are multiplied by.
        eps: of layer norms.
        start: the number that a decoder's input begins with.
        pad: the number of padding.
        source_ends: whether a source ends in </s>.
        dropout: fairseq's dropout, attention_dropout and activation_dropout.
    """

    heads: tuple[int, int]
    layers: tuple[int, int]
    pre_norm: bool
    activation: str
    scale: float
    eps: float
    start: int
    pad: int
    source_ends: bool
    dropout: tuple[float, float, float]


@dataclass
class Foreign:
    """A model of another library.

    Args:
        kind: whose, in words.
        path: the file or folder.
        weights: by fairseq's names, in the source's order of rows; `output.weight` and
            `output.bias` of the projection, `SIDE.positions` (N, E) of what is added to the input,
            `SIDE.layers.N.table` (2k + 1, D) of relative positions.
        form: the rest.
        source: its vocabulary.
        target: the decoder's.
        languages: of source and target.
        files: of text, by the names that they shall have.
        notes: what should be said of it.
    """

    kind: str
    path: Path
    weights: State
    form: Form
    source: Vocabulary
    target: Vocabulary
    languages: tuple[str, str]
    files: dict[str, Path] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @torch.no_grad()
    def logits(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (B, T, V) in the source's order of rows, in fp64.

        Sources (B, S) are padded on the right; targets (B, T) begin with `form.start`, unpadded.
        """
        return _Formula(self).logits(source, target)


class _Formula:
    def __init__(self, model: Foreign) -> None:
        self.form = model.form
        self.weights = {name: value.double() for name, value in model.weights.items()}

    def logits(self, source: Tensor, target: Tensor) -> Tensor:
        masked = (source == self.form.pad)[:, None, None]  # (B, 1, 1, S)
        memory = self._stack("encoder", source, masked)
        length = target.size(1)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        x = self._stack("decoder", target, future, memory, masked)
        return self._linear(x, "output")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        parts = (self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])
        return F.layer_norm(x, (x.size(-1),), *parts, self.form.eps)

    def _stack(
        self,
        side: str,
        tokens: Tensor,
        masked: Tensor,
        memory: Tensor | None = None,
        memory_masked: Tensor | None = None,
    ) -> Tensor:
        x = self.weights[f"{side}.embed_tokens.weight"][tokens] * self.form.scale
        if f"{side}.positions" in self.weights:
            x = x + self.weights[f"{side}.positions"][: tokens.size(1)]
        for layer in range(self.form.layers[memory is not None]):
            name = f"{side}.layers.{layer}."
            x = self._block(x, name + "self_attn", lambda y, n=name: self._attend(y, y, masked, n))
            if memory is not None:
                x = self._block(
                    x,
                    name + "encoder_attn",
                    lambda y, n=name: self._attend(y, memory, memory_masked, n, "encoder_attn"),
                )
            x = self._block(x, name + "final", lambda y, n=name: self._feed_forward(y, n))
        return self._norm(x, f"{side}.layer_norm") if self.form.pre_norm else x

    def _block(self, x: Tensor, name: str, inner) -> Tensor:
        if self.form.pre_norm:
            return x + inner(self._norm(x, f"{name}_layer_norm"))
        return self._norm(x + inner(x), f"{name}_layer_norm")

    def _feed_forward(self, x: Tensor, name: str) -> Tensor:
        act = ACTIVATIONS[self.form.activation]
        return self._linear(act(self._linear(x, f"{name}fc1")), f"{name}fc2")

    def _attend(self, x: Tensor, y: Tensor, masked: Tensor, layer: str, name: str = "self_attn") -> Tensor:
        heads = self.form.heads[layer.startswith("decoder")]
        q, k, v = (
            self._linear(part, f"{layer}{name}.{kind}_proj").unflatten(-1, (heads, -1))
            for part, kind in ((x, "q"), (y, "k"), (y, "v"))
        )  # (B, T, H, D)
        scores = torch.einsum("bihd,bjhd->bhij", q, k)
        table = self.weights.get(f"{layer}table") if name == "self_attn" else None
        if table is not None:
            reach, slot = len(table) // 2, torch.arange(x.size(1))
            distance = (slot[None] - slot[:, None]).clamp(-reach, reach)
            vectors = table[distance + reach]  # (T, T, D)
            scores = scores + torch.einsum("bihd,ijd->bhij", q, vectors)
        scores = (scores / math.sqrt(q.size(-1))).masked_fill(masked, -math.inf)
        probs = scores.softmax(-1)
        out = torch.einsum("bhij,bjhd->bihd", probs, v)
        if table is not None:
            out = out + torch.einsum("bhij,ijd->bihd", probs, vectors)
        return self._linear(out.flatten(2), f"{layer}{name}.out_proj")


def words_of(symbols: list[str], special: dict[str, str], where: str) -> Vocabulary:
    """Put a vocabulary into the order of fairseq's dictionary.

    Args:
        symbols: by their numbers.
        special: names of <s>, <pad>, </s> and <unk> in it; one that it lacks has no row.
        where: its file, for the error.

    Raises:
        ConversionError: a symbol that a line of dict.txt cannot hold, or that is there twice.
    """
    numbers: dict[str, int] = {}
    for number, symbol in enumerate(symbols):
        broken = "\n" in symbol or "\r" in symbol
        taken = symbol in special and special[symbol] != symbol
        if symbol in numbers or broken or taken:
            why = "holds a line break" if broken else "is there twice or fairseq's own"
            raise ConversionError(f"{where}: symbol {symbol!r} {why}: dict.txt cannot hold it")
        numbers[symbol] = number
    first = [numbers.get(name, -1) for name in special.values()]
    rest = [number for symbol, number in numbers.items() if symbol not in special.values()]
    return Vocabulary([symbols[number] for number in rest], first + rest)
