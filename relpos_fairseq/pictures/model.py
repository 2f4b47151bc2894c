"""A checkpoint's stacks of layers.

Importing relpos_fairseq registers its models and lets their checkpoints load safely.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fairseq import checkpoint_utils
from torch import nn

from relpos_fairseq.inference import provenance
from relpos_fairseq.inference.checkpoints.trusted import read_trusted
from relpos_fairseq.modules.multihead_attention import RelPosMultiheadAttention
from relpos_fairseq.placement import Placement
from relpos_fairseq.positions import Positions
from relpos_fairseq.terms import PositionTerms

SPECIALS = 4  # fairseq's own symbols: <s>, <pad>, </s>, <unk>


class PlotError(ValueError):
    """What the user gave cannot be drawn; the message is one line that says why and what to do."""


@dataclass(frozen=True)
class Stack:
    """An encoder or a decoder: its positions, and the self-attention of each of its layers."""

    name: str
    positions: Placement
    attentions: tuple[RelPosMultiheadAttention, ...]

    @property
    def title(self) -> str:
        return f"{self.name}, {self.positions.plan.name}"

    @property
    def causal(self) -> bool:
        """Whether queries never see the future."""
        return self.positions.plan.shape.causal

    def at(self, length: int, segments: int = 1) -> Positions:
        """Positions of a run of tokens in segments of equal length, within the scheme's tables."""
        length = min(length, self.positions.plan.longest or length)
        number = torch.arange(length) * segments // length
        return Positions(length, length, segments=number[None])

    def terms(self, positions: Positions) -> Iterator[tuple[str, tuple[PositionTerms, ...]]]:
        """What layers share, as layer `all`; then each layer's own, counted from 1.

        Where layers have different schemes, all of a layer's terms stand under its number.
        """
        context = self.positions.context(positions)
        yield "all", () if context.parts else context.shared
        for layer, attention in enumerate(self.attentions):
            shared = context.of_layer(layer).shared if context.parts else ()
            yield str(layer + 1), shared + attention.position.evaluate(positions).terms


def load(checkpoint: Path, data: Path | None) -> tuple[nn.Module, Any]:
    """Loads a checkpoint's model and task; without `data` dictionaries of the right size stand in.

    Raises:
        PlotError: either is not what it should be.
    """
    if not checkpoint.is_file():
        raise PlotError(f"checkpoint {checkpoint} is not a file: give one that fairseq-train wrote")
    if data is not None and not (data.is_dir() and any(data.rglob("dict*.txt"))):
        raise PlotError(f"--data {data} has no dict*.txt: give a folder of fairseq-preprocess")
    with tempfile.TemporaryDirectory() as folder:
        try:
            state = read_trusted(checkpoint, {"data": folder if data is None else str(data)})
        except ValueError as error:
            raise PlotError(one_line(error)) from error
        if data is None:
            stand_in(Path(folder), state)
            state.pop(provenance.KEY, None)  # the dictionaries that stand in are no training's
        try:
            models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], state=state)
        except Exception as error:  # whatever fairseq finds wrong, of many types
            remedy = f"--data {data} may be another model's" if data else "give its --data"
            raise PlotError(f"checkpoint {checkpoint} does not load: {remedy} ({one_line(error)})") from error
    return models[0].eval(), task


def one_line(error: Exception) -> str:
    """The first lines of an error's message, as one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:2]) or type(error).__name__


def stand_in(folder: Path, state: dict) -> None:
    """Writes dictionaries as large as the checkpoint's embeddings."""
    rows = {
        key.partition(".")[0]: len(value)
        for key, value in state["model"].items()
        if key.endswith("embed_tokens.weight")
    }
    task = state["cfg"]["task"] if state.get("cfg") is not None else vars(state["args"])
    source, target = task.get("source_lang") or "source", task.get("target_lang") or "target"
    # fairseq infers languages that it was not told from the name of any such file.
    (folder / f"languages.{source}-{target}.txt").touch()
    names = {"encoder": source, "decoder": target}
    for side, count in rows.items():
        # Tasks that mask add <mask> themselves where the dictionary lacks it.
        words = [f"word{i}" for i in range(count - SPECIALS - 1)] + ["<mask>"]
        text = "".join(f"{word} 1\n" for word in words)
        for name in ("dict.txt", f"dict.{names.get(side)}.txt"):
            (folder / name).write_text(text, encoding="utf-8")


def find_stacks(model: nn.Module, checkpoint: Path) -> list[Stack]:
    """Every stack of layers that has a position scheme.

    Raises:
        PlotError: there is none.
    """
    modules = dict(model.named_modules())
    owners = {name.rpartition(".")[0]: module for name, module in modules.items() if isinstance(module, Placement)}
    if not owners:
        raise PlotError(
            f"checkpoint {checkpoint} holds a {type(model).__name__}, which has no position "
            f"scheme: give one of a relpos model"
        )
    layers: dict[str, list[RelPosMultiheadAttention]] = {name: [] for name in owners}
    for name, module in modules.items():
        if isinstance(module, RelPosMultiheadAttention):
            inside = [owner for owner in owners if not owner or name.startswith(f"{owner}.")]
            layers[max(inside, key=len)].append(module)
    return [Stack(name.replace(".", "_") or "model", owners[name], tuple(layers[name])) for name in owners]
