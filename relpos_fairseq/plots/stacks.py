"""Find a model's stacks of layers, and record the inputs and probabilities of their attention on a sentence."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from relpos_fairseq.attention import AttentionInputs, attend
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.terms import PositionTerms
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.modules.multihead_attention import RelPosMultiheadAttention
from relpos_fairseq.nn import self_attention
from relpos_fairseq.patches.training import options_of
from relpos_fairseq.saved.model import one_line
from relpos_fairseq.text.assets import read_text
from relpos_fairseq.text.dictionary import NSPECIAL


@dataclass(frozen=True)
class Stack:
    """An encoder or a decoder: its positions, and the self-attention of each of its layers."""

    name: str
    positions: Placement
    attentions: tuple[RelPosMultiheadAttention, ...]

    @property
    def title(self) -> str:
        """The stack and its scheme."""
        return f"{self.name}, {self.positions.plan.name}"

    @property
    def causal(self) -> bool:
        """Whether queries never see the future."""
        return self.positions.plan.shape.causal

    def at(self, length: int, segments: int = 1) -> Positions:
        """Return the positions of a sequence in segments of equal length, at most as long as the scheme's tables."""
        length = min(length, self.positions.plan.longest or length)
        number = torch.arange(length) * segments // length
        return Positions(length, length, segments=number[None])

    def evaluate(self, positions: Positions) -> Iterator[tuple[str, tuple[PositionTerms, ...]]]:
        """Yield the terms that layers share, as layer `all`; then each layer's own, counted from 1.

        Where layers have different schemes, all of a layer's terms stand under its number.
        """
        context = self.positions.context(positions)
        yield "all", () if context.parts else context.shared
        for layer, attention in enumerate(self.attentions):
            shared = context.of_layer(layer).shared if context.parts else ()
            yield str(layer + 1), shared + attention.position.evaluate(positions).terms


def find_stacks(model: Any, checkpoint: Path) -> list[Stack]:
    """Return every stack of layers that has a position scheme.

    Raises:
        UserError: there is none.
    """
    modules = dict(model.named_modules())
    owners = {name.rpartition(".")[0]: module for name, module in modules.items() if isinstance(module, Placement)}
    if not owners:
        raise UserError(
            f"checkpoint {checkpoint} holds a {type(model).__name__}, which has no position "
            f"scheme: give one of a relpos model"
        )
    layers: dict[str, list[RelPosMultiheadAttention]] = {name: [] for name in owners}
    for name, module in modules.items():
        if isinstance(module, RelPosMultiheadAttention):
            inside = [owner for owner in owners if not owner or name.startswith(f"{owner}.")]
            layers[max(inside, key=len)].append(module)
    return [Stack(name.replace(".", "_") or "model", owners[name], tuple(layers[name])) for name in owners]


SPLITS = ("test", "valid", "train")
LONGEST_SENTENCE = 256  # longer samples (blocks of a language model) are cut


@dataclass(frozen=True)
class SentenceInput:
    """The input of a model."""

    net_input: dict[str, Any]  # the arguments of the model's forward
    title: str  # where it comes from


@dataclass(frozen=True)
class WatchedAttention:
    """One call of a layer's attention."""

    inputs: AttentionInputs
    probs: Tensor  # (H, T, S)


def choose_sentence(model: Any, task: Any, words: str | None, length: int, data: Path | None) -> SentenceInput:
    """Return the sentence given, read as the text of the folder `data`, else the data's first, else random tokens.

    Raises:
        UserError: the data cannot be read.
    """
    if words is not None:
        symbols = read_text(data, getattr(options_of(task), "source_lang", None)).encode(words)
        line = task.source_dictionary.encode_line(" ".join(symbols), add_if_not_exist=False).long()
        unknown = int((line == task.source_dictionary.unk()).sum())
        note = f", {unknown} of {len(line) - 1} tokens unknown" if unknown else ""
        return SentenceInput(arguments(model, task, line[:-1]), f"the given sentence{note}")
    for split in SPLITS if data else ():
        sample, problem = sample_of(task, split)
        if problem:
            raise UserError(f"--data {data}: {split} does not read, run fairseq-preprocess again ({problem})")
        if sample is None:
            continue
        return SentenceInput(cut_sample(sample), f"first sentence of {split}")
    generator = torch.Generator().manual_seed(1)
    most = max(len(task.source_dictionary) - 1, NSPECIAL + 1)
    size = max(min(length, LONGEST_SENTENCE) - (1 if hasattr(model, "decoder") else 2), 0)  # `arguments` adds the ends
    tokens = torch.randint(NSPECIAL, most, (size,), generator=generator)
    return SentenceInput(arguments(model, task, tokens), "synthetic tokens")


def further_sentences(task: Any, count: int) -> list[SentenceInput]:
    """Return up to `count` sentences after the first of the split that the first was read from.

    Raises:
        UserError: the data's first sentence was not read.
    """
    split = next((name for name in SPLITS if name in task.datasets), None)
    if split is None:
        raise UserError("--sentences: a batch of inputs is read from --data, without --sentence")
    found = (sample_of(task, split, index)[0] for index in range(1, count + 1))
    return [SentenceInput(cut_sample(one), f"more of {split}") for one in found if one is not None]


def sample_of(task: Any, split: str, index: int = 0) -> tuple[dict[str, Any] | None, str]:
    """Return a split's sample, or None; and why the split cannot be read, or an empty text."""
    # A reader that was torn open half-way would complain again when it is collected.
    with mock.patch.object(sys, "unraisablehook", lambda _: None):
        try:
            task.load_dataset(split)
            dataset = task.dataset(split)
            if hasattr(dataset, "blocks"):  # a stream, whose items are tokens
                dataset = dataset.blocks(1)
            if index >= len(dataset):
                return None, ""
            sample = dataset.collater([dataset[index]])
            return sample["net_input1" if "net_input1" in sample else "net_input"], ""  # the first choice, of a ranking
        except FileNotFoundError:
            return None, ""
        except Exception as error:  # whatever a broken binary file makes of fairseq's readers
            places = str(options_of(task).data).split(os.pathsep)
            there = any(any(Path(place).rglob(f"{split}*.idx")) for place in places)
            return None, one_line(error) if there else ""


def cut_sample(net_input: dict[str, Any]) -> dict[str, Any]:
    """Return a sample, without the tokens after the first LONGEST_SENTENCE."""
    short = {
        name: part[:, :LONGEST_SENTENCE] if isinstance(part, Tensor) and part.dim() > 1 else part
        for name, part in net_input.items()
    }
    if "src_lengths" in short:
        short["src_lengths"] = short["src_lengths"].clamp(max=LONGEST_SENTENCE)
    return short


def arguments(model: Any, task: Any, words: Tensor) -> dict[str, Any]:
    """Return a model's arguments for ids of words (L,), with the beginning and end that its kind of model has."""
    start = words.new_tensor([task.source_dictionary.bos()])
    end = words.new_tensor([task.source_dictionary.eos()])
    if not hasattr(model, "encoder"):
        return {"src_tokens": torch.cat([end, words])[None]}
    if not hasattr(model, "decoder"):
        return {"src_tokens": torch.cat([start, words, end])[None]}
    source = torch.cat([words, end])[None]
    lengths = torch.tensor([source.size(1)])
    previous = greedy_translation(model, source, lengths, task.target_dictionary.eos())
    return {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": previous}


@torch.no_grad()
def greedy_translation(model: Any, source: Tensor, lengths: Tensor, eos: int) -> Tensor:
    """Return the model's greedy translation as the decoder's input (1, T), about as long as its source."""
    encoded = model.encoder(source, lengths)
    tokens = torch.full((1, 1), eos)
    while tokens.size(1) < source.size(1):
        best = model.decoder(tokens, encoder_out=encoded)[0][:, -1].argmax(-1)
        if tokens.size(1) > 1 and int(best) == eos:
            break
        tokens = torch.cat([tokens, best[:, None]], dim=1)
    return tokens


def token_names(model: Any, task: Any, stack: Stack, sentence: SentenceInput) -> list[str]:
    """Return the tokens that a stack reads, as its dictionary writes them."""
    reads_target = stack.name.startswith("decoder") and hasattr(model, "encoder")
    tokens = sentence.net_input["prev_output_tokens" if reads_target else "src_tokens"]
    dictionary = task.target_dictionary if reads_target else task.source_dictionary
    return [dictionary[int(token)] for token in tokens[0]]


@torch.no_grad()
def record_attention(
    model: Any, stacks: list[Stack], sentence: SentenceInput
) -> dict[RelPosMultiheadAttention, WatchedAttention]:
    """Run the model on a sentence; return the inputs and probabilities of every self-attention."""
    calls: dict[RelPosMultiheadAttention, WatchedAttention] = {}
    current: list[RelPosMultiheadAttention] = []

    def enter(module: nn.Module, _: tuple) -> None:
        current[:] = [module]

    def recorded(inputs: AttentionInputs, backend: str = "auto", need_weights: bool = False):
        out, probs = attend(inputs, "auto", need_weights=True)  # not every backend has them
        calls[current[0]] = WatchedAttention(inputs, probs[0])
        return out, probs if need_weights else None

    layers = [attention for stack in stacks for attention in stack.attentions]
    hooks = [attention.register_forward_pre_hook(enter) for attention in layers]
    try:
        with mock.patch.object(self_attention, "attend", recorded):
            model(**sentence.net_input)
    finally:
        for hook in hooks:
            hook.remove()
    return calls
