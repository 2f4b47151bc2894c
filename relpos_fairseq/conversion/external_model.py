"""Import a translation model of another library as a `relpos_transformer`, exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.conversion.layouts import State
from relpos_fairseq.conversion.report import ConversionError, ConversionReport
from relpos_fairseq.conversion.vocabulary import Vocabulary, take_rows
from relpos_fairseq.conversion.writer import GeneratingModel, build_generating
from relpos_fairseq.schemes import named_elsewhere

# ---- A translation model of another library, and its own formula.
# What a conversion is measured against: it shares nothing with our model.  Vaswani et al. 2017, with
# layer norm after each block (Marian) or before it (OpenNMT-py), and with Shaw's relative positions
# as OpenNMT-py has them, where one table serves keys and values:
#
#     e_ij = q_i.(k_j + a_r) / sqrt(d),   z_i = sum_j alpha_ij (v_j + a_r),   r = clip(j - i, -k, k)


ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_accurate": lambda x: F.gelu(x, approximate="tanh"),
    "swish": F.silu,
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class Architecture:
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
class ExternalModel:
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
    form: Architecture
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
    def __init__(self, model: ExternalModel) -> None:
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


# ---- A foreign translation model as a `relpos_transformer`, exactly.
# Rows come into fairseq's order.  fairseq begins a target with </s>: in the decoder's embedding its
# row is that of the source's own first symbol.  </s> is no other input of a decoder, but an output:
# embeddings and output projection are three matrices.
#
# The output's bias c has no place in fairseq's projection W.  With z the normalised state, whose
# channels add to 0, and g, b the last layer norm, which become 1 and 1:
#
#     W' = W diag(g) + (W b + c - W g) 1^T / E,   W' (z + 1) = W (g z + b) + c
#
# A row that the source has not gets the logit NEVER.
#
# fairseq's layer norms have eps 1e-5.  Where they come before blocks, all that reads the residual
# stream is one, and norm_eps(x) = norm_1e-5(x sqrt(1e-5 / eps)): embeddings, positions and what
# blocks add are multiplied by that factor.
#
# What is added to the input is a table of `learned` positions; the one table of OpenNMT-py's relative
# positions serves as both of Shaw's.


EPSILON = 1e-5  # of fairseq's layer norms
NEVER = -1e4  # the logit of a row that the source has not; its probability is 0 in every type
END = 2
ABSOLUTE = named_elsewhere("transformers")["absolute"]
RELATIVE = named_elsewhere("OpenNMT-py")["max_relative_positions"]
SIDES = ("encoder", "decoder")


def import_weights(model: ExternalModel, length: int, report: ConversionReport) -> GeneratingModel:
    """Return a foreign model as ours, with `length` positions.

    Raises:
        ConversionError: a layer norm after each block whose eps is not fairseq's.
    """
    form, state = model.form, dict(model.weights)
    factor = math.sqrt(EPSILON / form.eps)
    if form.eps != EPSILON:
        if not form.pre_norm:
            raise ConversionError(
                f"{model.path}: layer norms after blocks have eps {form.eps:g}, and fairseq's {EPSILON:g}"
            )
        _widen(state, factor)
        report.step(f"residual streams times {factor:.4g}: layer norms' eps becomes {EPSILON:g}")
    for side, words in zip(SIDES, (model.source, model.target), strict=True):
        table = state[f"{side}.embed_tokens.weight"].float()
        state[f"{side}.embed_tokens.weight"] = words.take(table)
    state["decoder.embed_tokens.weight"][END] = table[form.start]
    report.step("the decoder's </s> is the source's first symbol of a target")
    _fold_bias(state, model)
    report.step("the output's bias is folded into its matrix and the last layer norm")
    values = _values(model, length) | _positions(state, length, report)
    if not form.source_ends:
        values["encoder_skips_end"] = True
        report.step("the encoder takes </s> for padding, since no source had one")
    rows = (len(model.source.rows), len(model.target.rows))
    state = {name: value.float().contiguous() for name, value in state.items()}
    ours = build_generating("translation", values, rows).state_dict()
    state |= {name: value for name, value in ours.items() if name.endswith("version")}
    missing = {name: value for name, value in ours.items() if name not in state}
    if any(not name.endswith(".bias") for name in missing):
        raise ConversionError(f"{model.path} has no tensor for {min(missing)}")
    state |= {name: torch.zeros_like(value) for name, value in missing.items()}
    return GeneratingModel("translation", values, rows, state, task=_task(model, length), files=dict(model.files))


def _widen(state: State, factor: float) -> None:
    """Multiply the residual streams, in place."""
    added = ("out_proj.weight", "out_proj.bias", "fc2.weight", "fc2.bias")
    for name in list(state):
        if name.endswith(("embed_tokens.weight", ".positions", *added)):
            state[name] = state[name].double() * factor


def _fold_bias(state: State, model: ExternalModel) -> None:
    """Make the output projection one without a bias, in place."""
    last = model.form.layers[1] - 1
    norm = "layer_norm" if model.form.pre_norm else f"layers.{last}.final_layer_norm"
    gain, shift = (state[f"decoder.{norm}.{part}"].double() for part in ("weight", "bias"))
    matrix = state.pop("output.weight").double()
    bias = state.pop("output.bias", matrix.new_zeros(len(matrix))).double().flatten()
    column = (matrix @ (shift - gain) + bias) / len(gain)
    folded = matrix * gain + column[:, None]
    taken = take_rows(folded, model.target.rows, NEVER / len(gain))
    state["decoder.output_projection.weight"] = taken
    for part in ("weight", "bias"):
        state[f"decoder.{norm}.{part}"] = torch.ones_like(gain)


def _positions(state: State, length: int, report: ConversionReport) -> dict[str, Any]:
    """Name the tables as ours, in place; returns the values of our config that they need."""
    absolute = "encoder.positions" in state
    tables = [name for name in state if name.endswith(".table")]
    if absolute:
        for side in SIDES:
            table = state.pop(f"{side}.positions")
            if len(table) < length:
                raise ConversionError(f"--positions {length}: the source has {len(table)}")
            state[f"{side}.positions.shared.0.table"] = table[:length]
        report.limit(f"inputs of up to {length} tokens (--positions)")
    clip = 0
    for name in tables:
        table, place = state.pop(name)[None], name.removesuffix(".table")
        clip = table.size(1) // 2
        for kind in ("key", "value"):
            state[f"{place}.self_attn.position.0.{kind}_table"] = table.clone()
    scheme = "+".join([ABSOLUTE] * absolute + [RELATIVE] * bool(tables))
    return {"position_scheme": scheme} | ({"position_clip_distance": str(clip)} if tables else {})


def _values(model: ExternalModel, length: int) -> dict[str, Any]:
    form = model.form
    values: dict[str, Any] = {
        "activation_fn": form.activation,
        "no_scale_embedding": form.scale == 1.0,
        "max_source_positions": length,
        "max_target_positions": length,
    }
    values |= zip(("dropout", "attention_dropout", "activation_dropout"), form.dropout, strict=True)
    for number, side in enumerate(SIDES):
        values |= {
            f"{side}_embed_dim": model.weights[f"{side}.embed_tokens.weight"].size(1),
            f"{side}_ffn_embed_dim": len(model.weights[f"{side}.layers.0.fc1.weight"]),
            f"{side}_attention_heads": form.heads[number],
            f"{side}_layers": form.layers[number],
            f"{side}_normalize_before": form.pre_norm,
        }
    return values


def _task(model: ExternalModel, length: int) -> dict[str, Any]:
    source, target = model.languages
    limits = dict.fromkeys(("max_source_positions", "max_target_positions"), length)
    return {"_name": "translation", "source_lang": source, "target_lang": target} | limits
