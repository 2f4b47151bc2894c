"""Pictures of how alike absolute positions are.  004: Chen et al. 2021."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.pictures.drawing import Absent, Panel, Picture
from relpos_fairseq.pictures.logits import input_positions, square
from relpos_fairseq.pictures.model import Stack


def cosines(stack: Stack, length: int) -> Iterator[Picture]:
    """Cosine similarity of absolute positions: of each pair, and its distribution (004 Fig. 5)."""
    groups = {f"{name}-position": [("all", values[None])] for name, values in input_positions(stack, length)}
    for layer, terms in stack.terms(stack.at(length)):
        for term in terms:
            if term.static_factors is None:
                continue
            query, key = (factor[0] for factor in term.static_factors)
            groups.setdefault("query-factor", []).append((layer, query))
            if not torch.equal(query, key):
                groups.setdefault("key-factor", []).append((layer, key))
    if not groups:
        raise Absent("cosine similarity of positions: there is no absolute position")
    for name, layers in groups.items():
        similar = [(layer, _cosine(vectors)) for layer, vectors in layers]
        words = (f"cosine similarity of {name.replace('-', ' ')}s", stack.title)
        picture = square(f"{stack.name}-{name}-cosine", words, similar, "cosine")
        axes = ("position (tokens)", "position (tokens)", "cosine")
        yield replace(picture, row="position", column="position", axes=axes)
        yield distribution(picture)


def distribution(picture: Picture) -> Picture:
    """Return how many of all pairs of two positions have a similarity of -1, -0.9, ..., 1."""
    tenths = list(range(-10, 11))
    panels = []
    for panel in picture.panels:
        pairs = torch.from_numpy(panel.values)[torch.ones(panel.values.shape).triu(1) > 0]
        counts = torch.histc(pairs, len(tenths), -1.05, 1.05)
        panels.append(Panel(panel.key, ["pairs"], tenths, (counts / len(pairs))[None].numpy()))
    return replace(
        picture,
        name=f"{picture.name}-distribution",
        title=f"distribution of {picture.title}",
        kind="lines",
        panels=panels,
        row="share",
        column="tenths",
        axes=("cosine, in tenths", "", "share of all pairs"),
        neutral=None,
    )


def _cosine(vectors: Tensor) -> Tensor:
    unit = F.normalize(vectors.detach().double(), dim=-1)
    return unit @ unit.transpose(-1, -2)
