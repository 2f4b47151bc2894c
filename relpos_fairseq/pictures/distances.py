"""Pictures of tables over distance: fields of PositionTerms over relations of distance.

Nothing here knows a scheme: a field that a new scheme fills is drawn.  000: Huang et al. 2020.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from relpos_fairseq.pictures.drawing import Absent, Panel, Picture, head_names
from relpos_fairseq.pictures.model import Stack
from relpos_fairseq.relations import DistanceRelation

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


def tables(stack: Stack, fields: dict, reach: int) -> dict[str, list[DistanceTable]]:
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
    found = tables(stack, SCALARS, reach)
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
    found = tables(stack, VECTORS, reach)
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
