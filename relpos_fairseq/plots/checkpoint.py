"""Draw what a checkpoint's positions have learned: tables over distance, similarities, logits, attention, ranks.

No scheme is named: a field of PositionTerms that a new scheme fills is drawn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.core.relations import DistanceRelation
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.progress import progress, say
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
    Stack,
    choose_sentence,
    find_stacks,
    further_sentences,
    record_attention,
    token_names,
)
from relpos_fairseq.saved.model import SavedModel

# Fields of PositionTerms (`vectors`: query_vectors and key_vectors that share a table), the meaning of each, and the
# value that has no effect.
SCALARS = {"static": ("added to the logits", 0.0), "gate": ("multiplies q·k", 1.0)}
VECTORS = {
    "query_vectors": ("a in q·a", 0.0),
    "key_vectors": ("b in k·b", 0.0),
    "vectors": ("a in q·a and k·a", 0.0),
    "trilinear": ("w in Σ q k w", 1.0),
    "value_vectors": ("added to values", 0.0),
}
DISTANCE = "distance j − i (tokens; negative: past)"
COSINE_POSITIONS = 64  # absolute positions whose similarity is drawn


@dataclass(frozen=True)
class DistanceTable:
    """One field of one layer's terms over distance."""

    layer: str
    distances: list[int]  # N of them
    values: Tensor  # (H|1, N) or (H|1, N, D)

    @property
    def heads(self) -> list[str]:
        """The names of the heads."""
        return head_names(self.values.size(0))


def distance_tables(stack: Stack, fields: dict, max_distance: int) -> dict[str, list[DistanceTable]]:
    """Return the tables of SCALARS or VECTORS by field, up to a distance; a field's second table is numbered."""
    found: dict[str, list[DistanceTable]] = defaultdict(list)
    shared: Counter = Counter()
    for layer, terms in stack.evaluate(stack.at(max_distance + 1)):
        seen = Counter() if layer == "all" else shared.copy()
        for term in terms:
            if not isinstance(term.relation, DistanceRelation):
                continue
            for field in fields:
                values = getattr(term, field, None)
                # A table that both queries and keys are multiplied by is drawn once.
                same = term.key_vectors is term.query_vectors
                if values is None or (same and field == "key_vectors"):
                    continue
                kind = "vectors" if same and field == "query_vectors" else field
                seen[kind] += 1
                name = kind if seen[kind] == 1 else f"{kind}_{seen[kind]}"
                found[name].append(_table(layer, term.relation, values, max_distance, stack.causal))
        shared = seen if layer == "all" else shared
    return found


def _table(layer: str, relation: DistanceRelation, values: Tensor, max_distance: int, causal: bool) -> DistanceTable:
    """Return a field's rows by distance."""
    low = max(relation.lowest, -max_distance)
    high = min(relation.highest, 0 if causal else max_distance)
    distances = torch.arange(low, high + 1)
    read = values[:, relation.of_distance(distances)].detach()
    return DistanceTable(layer, distances.tolist(), read)


def scalar_tables(stack: Stack, max_distance: int) -> Iterator[Picture]:
    """Yield scalars over distance: a line for every head, a panel for every layer."""
    found = distance_tables(stack, SCALARS, max_distance)
    if not found:
        raise Absent("scalars over distance: no term has any")
    for name, group in found.items():
        meaning, neutral = SCALARS[_field(name)]
        panels = [Panel({"layer": t.layer}, t.heads, t.distances, t.values.double().numpy()) for t in group]
        axes = (DISTANCE, "", "logit" if neutral == 0 else "factor")
        words = (f"{stack.name}-{name}", f"{name} by distance: {meaning}", stack.title)
        yield Picture(*words, "lines", panels, "head", "distance", axes, neutral=neutral)


def vector_tables(stack: Stack, max_distance: int) -> Iterator[Picture]:
    """Yield every head's vectors over distance: their channels (Huang2020, Fig. 4) and their norm."""
    found = distance_tables(stack, VECTORS, max_distance)
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
        words = (f"{stack.name}-{name}-norm", f"norm of {name.replace('_', ' ')} by distance", stack.title)
        yield Picture(*words, "lines", norms, "head", "distance", axes, neutral=None)


def _channels(found: DistanceTable) -> Iterator[Panel]:
    """Yield a panel for every head: channels down, distances across."""
    channels = list(range(found.values.size(-1)))
    for head, values in zip(found.heads, found.values, strict=True):
        key = {"layer": found.layer, "head": head}
        yield Panel(key, channels, found.distances, values.t().double().numpy())


def _field(name: str) -> str:
    """Return the field of a name that may end in a number."""
    return name.rstrip("0123456789").rstrip("_") if name[-1].isdigit() else name


def position_similarity(stack: Stack, length: int) -> Iterator[Picture]:
    """Yield the cosine similarity of absolute positions: of each pair, and its distribution (Chen2021, Fig. 5)."""
    groups = {f"{name}-position": [("all", values[None])] for name, values in input_positions(stack, length)}
    for layer, terms in stack.evaluate(stack.at(length)):
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
    """Return the cosine (..., T, T) of every pair of vectors (..., T, D), in fp64."""
    unit = F.normalize(vectors.detach().double(), dim=-1)
    return unit @ unit.transpose(-1, -2)


@torch.no_grad()
def draw_checkpoint(given: Any) -> None:
    """Draw all pictures of a checkpoint; nothing is written before all could be computed.

    Args:
        given: the options of `relpos plot`.

    Raises:
        UserError: what cannot be drawn, and what to do.
    """
    if given.sentence is not None and not given.sentence.split():
        raise UserError(f"--sentence {given.sentence!r}: give words")
    if given.checkpoint is None:
        raise UserError("give a checkpoint, or logs of fairseq-train with --curves")
    saved = SavedModel.open(given.checkpoint)
    if given.sentence is not None:
        given = replace(given, data=given.data or saved.find_text(None))
    model, task = saved.build_anyway(given.data)
    ready = []
    drawn = pictures(model, task, find_stacks(model, given.checkpoint), given)
    for stack, found in progress(drawn, description="draw", unit="kinds of pictures"):
        try:
            ready += list(found)
        except Absent as reason:
            say(f"skipped ({stack.title}): {reason}")
    given.out.mkdir(parents=True, exist_ok=True)
    files = [path for picture in ready for path in write_picture(picture, given.out)]
    print(f"wrote {len(files)} files to {given.out}:")
    print("\n".join(f"  {path.name}" for path in files), flush=True)


def pictures(model: Any, task: Any, stacks: list[Stack], given: Any) -> Iterator[tuple[Stack, Iterator[Picture]]]:
    """Yield every kind of picture of every stack; iterating over the pictures may raise Absent."""
    length = min(stack.at(given.length).src_len for stack in stacks)
    sentence = choose_sentence(model, task, given.sentence, length, given.data)
    print(f"attention and ranks on: {sentence.title}")
    watched = record_attention(model, stacks, sentence)
    more = further_sentences(task, given.sentences - 1) if given.sentences > 1 else []
    batch = [watched, *(record_attention(model, stacks, one) for one in more)]
    if more:
        print(f"ranks on {len(batch)} sentences")
    for stack in stacks:
        tokens = token_names(model, task, stack, sentence)
        yield stack, scalar_tables(stack, given.distance)
        yield stack, vector_tables(stack, given.distance)
        yield stack, position_logits(stack, given.length)
        yield stack, segment_logits(stack, given.length, given.segments)
        yield stack, input_logits(stack, given.length)
        yield stack, position_similarity(stack, COSINE_POSITIONS)
        title = sentence.title
        yield stack, attention_probabilities(stack, watched, tokens, title, given.tokens)
        yield stack, ranks(stack, batch)
