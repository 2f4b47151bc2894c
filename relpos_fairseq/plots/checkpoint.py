"""Draw what a checkpoint's positions have learned: tables, similarities, logits, attention, ranks."""

from __future__ import annotations

import argparse
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.plots.axes import Absent, Panel, Picture, head_names, write_picture
from relpos_fairseq.plots.logits import (
    attention_probabilities,
    input_logits,
    input_positions,
    position_logits,
    ranks,
    segment_logits,
    square,
)
from relpos_fairseq.plots.stacks import (
    PlotError,
    Stack,
    choose_sentence,
    find_stacks,
    further_sentences,
    load_checkpoint,
    record_attention,
    token_names,
)
from relpos_fairseq.relations import DistanceRelation

# ---- Pictures of tables over distance: fields of PositionTerms over relations of distance.
# Nothing here knows a scheme: a field that a new scheme fills is drawn.  000: Huang et al. 2020.


# Fields of PositionTerms (`vectors`: query_vectors and key_vectors in one table), what each is, and
# the value that does nothing.
SCALARS = {"static": ("added to the logits", 0.0), "gate": ("multiplies q·k", 1.0)}
VECTORS = {
    "query_vectors": ("a in q·a", 0.0),
    "key_vectors": ("b in k·b", 0.0),
    "vectors": ("a in q·a and k·a", 0.0),
    "trilinear": ("w in Σ q k w", 1.0),
    "value_vectors": ("added to values", 0.0),
}
DISTANCE = "distance j − i (tokens; negative: past)"


@dataclass(frozen=True)
class DistanceTable:
    """One field of one layer's terms over distance: values (H|1, N) or (H|1, N, D)."""

    layer: str
    distances: list[int]
    values: Tensor

    @property
    def heads(self) -> list[str]:
        return head_names(self.values.size(0))


def distance_tables(stack: Stack, fields: dict, reach: int) -> dict[str, list[DistanceTable]]:
    """The tables of SCALARS or VECTORS up to `reach`, by field; second ones are numbered."""
    found: dict[str, list[DistanceTable]] = defaultdict(list)
    shared: Counter = Counter()
    for layer, terms in stack.terms(stack.at(reach + 1)):
        seen = Counter() if layer == "all" else shared.copy()
        for term in terms:
            if not isinstance(term.relation, DistanceRelation):
                continue
            for field in fields:
                values = getattr(term, field, None)
                # M4 reads one table twice: it is drawn once.
                same = term.key_vectors is term.query_vectors
                if values is None or (same and field == "key_vectors"):
                    continue
                kind = "vectors" if same and field == "query_vectors" else field
                seen[kind] += 1
                name = kind if seen[kind] == 1 else f"{kind}_{seen[kind]}"
                found[name].append(_table(layer, term.relation, values, reach, stack.causal))
        shared = seen if layer == "all" else shared
    return found


def _table(layer: str, relation: DistanceRelation, values: Tensor, reach: int, causal: bool) -> DistanceTable:
    low = max(relation.lowest, -reach)
    high = min(relation.highest, 0 if causal else reach)
    distances = torch.arange(low, high + 1)
    read = values[:, relation.of_distance(distances)].detach()
    return DistanceTable(layer, distances.tolist(), read)


def scalar_tables(stack: Stack, reach: int) -> Iterator[Picture]:
    """A line for every head, a panel for every layer."""
    found = distance_tables(stack, SCALARS, reach)
    if not found:
        raise Absent("scalars over distance: no term has any")
    for name, group in found.items():
        meaning, neutral = SCALARS[_field(name)]
        panels = [Panel({"layer": t.layer}, t.heads, t.distances, t.values.double().numpy()) for t in group]
        axes = (DISTANCE, "", "logit" if neutral == 0 else "factor")
        words = (f"{stack.name}-{name}", f"{name} by distance: {meaning}", stack.title)
        yield Picture(*words, "lines", panels, "head", "distance", axes, neutral=neutral)


def vector_tables(stack: Stack, reach: int) -> Iterator[Picture]:
    """Every head's channels (000 Fig. 4) and norm."""
    found = distance_tables(stack, VECTORS, reach)
    if not found:
        raise Absent("vectors over distance: no term has any")
    for name, group in found.items():
        meaning, neutral = VECTORS[_field(name)]
        panels = [panel for t in group for panel in _channels(t)]
        heads = len(group[0].heads)
        across = heads if heads > 1 else None
        axes = (DISTANCE, "channel", "weight")
        words = (f"{stack.name}-{name}-channels", f"{name} by distance: {meaning}", stack.title)
        yield Picture(*words, "signed", panels, "channel", "distance", axes, across, neutral)
        norms = [Panel({"layer": t.layer}, t.heads, t.distances, t.values.double().norm(dim=-1).numpy()) for t in group]
        axes = (DISTANCE, "", "Euclidean norm")
        words = (f"{stack.name}-{name}-norm", f"norm of {name} by distance", stack.title)
        yield Picture(*words, "lines", norms, "head", "distance", axes, neutral=None)


def _channels(found: DistanceTable) -> Iterator[Panel]:
    """Every head's vectors: channels down, distances across."""
    channels = list(range(found.values.size(-1)))
    for head, values in zip(found.heads, found.values, strict=True):
        key = {"layer": found.layer, "head": head}
        yield Panel(key, channels, found.distances, values.t().double().numpy())


def _field(name: str) -> str:
    return name.rstrip("0123456789").rstrip("_") if name[-1].isdigit() else name


# ---- Pictures of how alike absolute positions are.  004: Chen et al. 2021.


def position_similarity(stack: Stack, length: int) -> Iterator[Picture]:
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
        similar = [(layer, cosine_similarity(vectors)) for layer, vectors in layers]
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


def cosine_similarity(vectors: Tensor) -> Tensor:
    unit = F.normalize(vectors.detach().double(), dim=-1)
    return unit @ unit.transpose(-1, -2)


# ---- All pictures of a checkpoint, with a CSV of the same numbers each.


COSINE_POSITIONS = 64


@torch.no_grad()
def draw_checkpoint(args: argparse.Namespace) -> None:
    """Draw all that `relpos plot` asks for; nothing is written before all could be computed.

    Raises:
        PlotError: one line that says what cannot be drawn and what to do.
    """
    if args.out.exists() and not args.out.is_dir():
        raise PlotError(f"--out {args.out} is a file: give a folder")
    if args.sentence is not None and not (args.data and args.sentence.split()):
        raise PlotError(f"--sentence {args.sentence!r}: give words, and --data for the checkpoint's dictionary")
    if args.checkpoint is None:
        raise PlotError("give a checkpoint, or logs of fairseq-train with --curves")
    model, task = load_checkpoint(args.checkpoint, args.data)
    ready = []
    for stack, found in pictures(model, task, find_stacks(model, args.checkpoint), args):
        try:
            ready += list(found)
        except Absent as reason:
            print(f"skipped ({stack.title}): {reason}")
    args.out.mkdir(parents=True, exist_ok=True)
    files = [path for picture in ready for path in write_picture(picture, args.out)]
    print(f"wrote {len(files)} files to {args.out}:")
    print("\n".join(f"  {path.name}" for path in files), flush=True)


def pictures(
    model: Any, task: Any, stacks: list[Stack], args: argparse.Namespace
) -> Iterator[tuple[Stack, Iterator[Picture]]]:
    """Yield every kind of picture of every stack; taking one may raise Absent."""
    length = min(stack.at(args.length).src_len for stack in stacks)
    sentence = choose_sentence(model, task, args.sentence, length, args.data)
    print(f"attention and ranks on: {sentence.title}")
    watched = record_attention(model, stacks, sentence)
    more = further_sentences(task, args.sentences - 1) if args.sentences > 1 else []
    batch = [watched, *(record_attention(model, stacks, one) for one in more)]
    if more:
        print(f"ranks on {len(batch)} sentences")
    for stack in stacks:
        tokens = token_names(model, task, stack, sentence)
        yield stack, scalar_tables(stack, args.distance)
        yield stack, vector_tables(stack, args.distance)
        yield stack, position_logits(stack, args.length)
        yield stack, segment_logits(stack, args.length, args.segments)
        yield stack, input_logits(stack, args.length)
        yield stack, position_similarity(stack, COSINE_POSITIONS)
        title = sentence.title
        yield stack, attention_probabilities(stack, watched, tokens, title, args.tokens)
        yield stack, ranks(stack, batch)
