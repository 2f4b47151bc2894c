"""What plot_positions.py shows: every function turns a stack into pictures.

Nothing here knows a scheme: tables are the fields of PositionTerms over relations of distance, and
logits are what the reference makes of the terms.  A function that finds nothing raises `Absent`,
whose message says what is not there and why.  Layers, heads and matrices count from 1.

000: Huang 2020; 004: Chen 2021 (see relpos_fairseq/schemes/huang.py and chen.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F  # noqa: N812
from _plot_model import Call, Stack
from _plots import Panel, Picture
from torch import Tensor

from relpos_fairseq.attention import AttentionInputs, reference
from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import DistanceRelation, Segments
from relpos_fairseq.terms import PositionTerms

# Fields of PositionTerms, what each is, and the value that does nothing.
SCALARS = {"static": ("added to the logits", 0.0), "gate": ("multiplies q·k", 1.0)}
VECTORS = {
    "query_vectors": ("a in q·a", 0.0),
    "key_vectors": ("b in k·b", 0.0),
    "trilinear": ("w in Σ q k w", 1.0),
    "value_vectors": ("added to values", 0.0),
}
DISTANCE = "distance j − i (tokens; negative: past)"
QUERY, KEY = "query position (tokens)", "key position (tokens)"


class Absent(Exception):  # noqa: N818
    """There is nothing of the kind to draw; the message says what and why."""


@dataclass(frozen=True)
class Table:
    """One field of one layer's terms over distance: values (H|1, N) or (H|1, N, D)."""

    layer: str
    distances: list[int]
    values: Tensor

    @property
    def heads(self) -> list[str]:
        """Names of the heads."""
        return head_names(self.values.size(0))


def head_names(count: int) -> list[str]:
    """1..H, or `all` where heads share what is drawn."""
    return ["all"] if count == 1 else [str(head) for head in range(1, count + 1)]


def tables(stack: Stack, fields: dict, reach: int) -> dict[str, list[Table]]:
    """The tables of the given fields, by name of field; a second term's are numbered.

    Args:
        stack: whose tables.
        fields: SCALARS or VECTORS.
        reach: the largest distance.
    """
    found: dict[str, list[Table]] = defaultdict(list)
    shared: Counter = Counter()
    for layer, terms in stack.terms(stack.at(reach + 1)):
        seen = Counter() if layer == "all" else shared.copy()
        for term in terms:
            if not isinstance(term.relation, DistanceRelation):
                continue
            for field in fields:
                values = getattr(term, field)
                # M4 reads one table twice: it is drawn once.
                if values is None or field == "key_vectors" and values is term.query_vectors:
                    continue
                seen[field] += 1
                name = field if seen[field] == 1 else f"{field}_{seen[field]}"
                found[name].append(_table(layer, term.relation, values, reach, stack.causal))
        shared = seen if layer == "all" else shared
    return found


def _table(
    layer: str, relation: DistanceRelation, values: Tensor, reach: int, causal: bool
) -> Table:
    low = max(relation.lowest, -reach)
    high = min(relation.highest, 0 if causal else reach)
    distances = torch.arange(low, high + 1)
    read = values[:, relation.of_distance(distances)].detach()
    return Table(layer, distances.tolist(), read)


def scalar_tables(stack: Stack, reach: int) -> Iterator[Picture]:
    """A line for every head, a panel for every layer."""
    found = tables(stack, SCALARS, reach)
    if not found:
        raise Absent("scalars over distance: no term has any")
    for name, group in found.items():
        meaning, neutral = SCALARS[_field(name)]
        panels = [
            Panel({"layer": t.layer}, t.heads, t.distances, t.values.double().numpy())
            for t in group
        ]
        yield Picture(
            name=f"{stack.name}-{name}",
            title=f"{name} by distance, {meaning} ({stack.title})",
            kind="lines",
            panels=panels,
            row="head",
            column="distance",
            axes=(DISTANCE, "", "logit" if neutral == 0 else "factor"),
            neutral=neutral,
        )


def vector_tables(stack: Stack, reach: int) -> Iterator[Picture]:
    """The first head's channels (000 Fig. 4), and every head's norm."""
    found = tables(stack, VECTORS, reach)
    if not found:
        raise Absent("vectors over distance: no term has any")
    for name, group in found.items():
        meaning, neutral = VECTORS[_field(name)]
        channels = [
            Panel(
                {"layer": t.layer, "head": t.heads[0]},
                list(range(t.values.size(-1))),
                t.distances,
                t.values[0].t().double().numpy(),
            )
            for t in group
        ]
        common = {"column": "distance", "neutral": neutral}
        yield Picture(
            name=f"{stack.name}-{name}-channels",
            title=f"{name} by distance, {meaning} ({stack.title})",
            kind="signed",
            panels=channels,
            row="channel",
            axes=(DISTANCE, "channel", "weight"),
            **common,
        )
        norms = [
            Panel({"layer": t.layer}, t.heads, t.distances, t.values.double().norm(dim=-1).numpy())
            for t in group
        ]
        yield Picture(
            name=f"{stack.name}-{name}-norm",
            title=f"norm of {name} by distance ({stack.title})",
            kind="lines",
            panels=norms,
            row="head",
            axes=(DISTANCE, "", "Euclidean norm"),
            **(common | {"neutral": None}),
        )


def _field(name: str) -> str:
    return name.rstrip("0123456789").rstrip("_") if name[-1].isdigit() else name


def attention_probabilities(
    stack: Stack, calls: dict, tokens: list[str], title: str
) -> Iterator[Picture]:
    """Probabilities averaged over heads, a panel for every layer (000 Fig. 5)."""
    panels = []
    for number, attention in enumerate(stack.attentions, 1):
        probs = calls[attention].probs.double().mean(0)
        if stack.causal:
            start = calls[attention].inputs.positions.query_start
            future = torch.ones_like(probs).triu(start + 1) > 0
            probs = probs.masked_fill(future, float("nan"))
        slots = list(range(probs.size(1)))
        rows = slots[-probs.size(0) :]
        named = tokens if len(tokens) == len(rows) == len(slots) else None
        panels.append(Panel({"layer": str(number)}, rows, slots, probs.numpy(), named))
    yield Picture(
        name=f"{stack.name}-attention",
        title=f"attention, mean over heads ({stack.title}; {title})",
        kind="positive",
        panels=panels,
        row="query",
        column="key",
        axes=("key (token)", "query (token)", "probability"),
    )


def without_content(stack: Stack, terms: tuple[PositionTerms, ...], at: Positions) -> Tensor:
    """(H|1, T, S) logits of q = k = 0, NaN where a decoder must not look."""
    zeros = torch.zeros(1, 1, at.src_len, stack.positions.plan.shape.head_dim).double()
    scale = stack.positions.plan.scale
    inputs = AttentionInputs(zeros, zeros, zeros, terms, at, scale, causal=stack.causal)
    logits, excluded = reference.logits(inputs)[0], inputs.excluded()
    return logits if excluded is None else logits.masked_fill(excluded[0], float("nan"))


def adds_alone(term: PositionTerms) -> bool:
    """Whether a term adds to the logits even where there is no content."""
    return any(
        part is not None for part in (term.static, term.static_factors, term.query_offset)
    )


def logits_by_layer(
    stack: Stack, at: Positions, segments: bool
) -> list[tuple[str, Tensor]]:
    """Content-free logits (H|1, T, S) of every layer, or of `all` where layers share them."""

    def chosen(terms: tuple[PositionTerms, ...]) -> tuple[PositionTerms, ...]:
        return tuple(t for t in terms if segments or not isinstance(t.relation, Segments))

    (_, shared), *own = ((layer, chosen(terms)) for layer, terms in stack.terms(at))
    if not any(adds_alone(term) for _, terms in own for term in terms):
        own = [("all", ())]
        if not any(adds_alone(term) for term in shared):
            return []
    return [(layer, without_content(stack, shared + terms, at)) for layer, terms in own]


def position_logits(stack: Stack, length: int) -> Iterator[Picture]:
    """What terms add to the logits without any content (004 Fig. 4)."""
    at = stack.at(length, segments=torch.zeros(1, length, dtype=torch.long))
    layers = logits_by_layer(stack, at, segments=False)
    if not layers:
        raise Absent(f"position logits: {_why_none(stack, at)}")
    left_out = sorted(_content_fields(stack, at))
    note = f"; not shown, as they need content: {', '.join(left_out)}" if left_out else ""
    title = f"position logits, q = k = 0 ({stack.title}{note})"
    yield _square(f"{stack.name}-position-logits", title, "signed", layers, "logit")


def segment_logits(stack: Stack, length: int, segments: int) -> Iterator[Picture]:
    """Position logits and those of segments of equal length (004 Fig. 6)."""
    length = stack.at(length).src_len
    number = torch.arange(length) * segments // length
    at = stack.at(length, segments=number[None])
    relations = [t.relation for _, terms in stack.terms(at) for t in terms]
    counts = [r.count for r in relations if isinstance(r, Segments)]
    if not counts:
        raise Absent("segment logits: no term is over segments")
    if segments > min(counts):
        raise ValueError(f"--segments {segments}: the model has {min(counts)}; give no more")
    starts = ", ".join(str(int((number < s).sum())) for s in range(1, segments))
    title = f"position and segment logits, q = k = 0 ({stack.title}; segments start at 0, {starts})"
    layers = logits_by_layer(stack, at, segments=True)
    yield _square(f"{stack.name}-segment-logits", title, "signed", layers, "logit")


def _content_fields(stack: Stack, at: Positions) -> set[str]:
    """Names of the fields that act through content alone."""
    fields = {name for _, terms in stack.terms(at) for term in terms for name in term.present}
    if stack.positions.context(at).rotation is not None:
        fields.add("rotation of q and k")
    alone = ("static", "static_factors", "query_offset", "value_vectors", "reset", "relation")
    return fields - set(alone)


def _why_none(stack: Stack, at: Positions) -> str:
    fields = sorted(_content_fields(stack, at))
    if not fields:
        return "no term adds to the logits"
    return f"positions act through content alone, by {', '.join(fields)}"


def _square(
    name: str, title: str, kind: str, layers: list[tuple[str, Tensor]], value: str
) -> Picture:
    """A panel for every layer and head of (H|1, T, S) matrices, a row of panels a layer."""
    panels = [
        Panel(
            {"layer": layer, "head": head},
            list(range(matrix.size(0))),
            list(range(matrix.size(1))),
            matrix.detach().double().numpy(),
        )
        for layer, heads in layers
        for head, matrix in zip(head_names(heads.size(0)), heads, strict=True)
    ]
    heads = layers[0][1].size(0)
    across = heads if heads > 1 else None
    return Picture(name, title, kind, panels, "query", "key", (KEY, QUERY, value), across)


def input_positions(stack: Stack, length: int) -> list[tuple[str, Tensor]]:
    """(name, (T, E)) of every member that adds absolute positions to the input."""
    at = stack.at(length)
    members = [scheme for scheme in stack.positions.shared if scheme.absolute]
    pairs = [(scheme.name, scheme.embed(at)) for scheme in members]
    return [(name, added[0].detach()) for name, added in pairs if added is not None]


def projected_positions(stack: Stack, length: int) -> Tensor | None:
    """(H, T, T) logits of positions at the input alone, by the first layer's projections (004)."""
    added = [values for _, values in input_positions(stack, length)]
    if not added:
        return None
    attention, total = stack.attentions[0], sum(added)
    q, k = (
        F.linear(total.double(), projection.weight.detach().double())
        .unflatten(-1, (attention.num_heads, attention.head_dim))
        .transpose(0, 1)
        for projection in (attention.q_proj, attention.k_proj)
    )
    return attention.scale * q @ k.transpose(-1, -2)


def input_logits(stack: Stack, length: int) -> Iterator[Picture]:
    """Logits that positions at the input alone make in the first layer (004 section 2.4)."""
    logits = projected_positions(stack, length)
    if logits is None:
        raise Absent("logits of input positions: nothing absolute is added to the input")
    if stack.causal:
        future = torch.ones_like(logits[0]).triu(1) > 0
        logits = logits.masked_fill(future, float("nan"))
    title = f"logits of the input's positions p alone, (pW_Q)·(pW_K)·scale ({stack.title})"
    yield _square(f"{stack.name}-input-logits", title, "signed", [("1", logits)], "logit")


def ranks(stack: Stack, calls: dict) -> Iterator[Picture]:
    """Numerical ranks of logits on the sentence, before masking (004 Fig. 2)."""
    panels = []
    for number, attention in enumerate(stack.attentions, 1):
        matrices = logit_parts(calls[attention])
        length = calls[attention].inputs.positions.src_len
        if number == 1 and (alone := projected_positions(stack, length)) is not None:
            matrices["input positions alone"] = alone
        found = {name: rank(matrix) for name, matrix in matrices.items()}
        values = torch.stack([r.expand(attention.num_heads) for r in found.values()])
        heads = list(range(1, attention.num_heads + 1))
        panels.append(Panel({"layer": str(number)}, list(found), heads, values.double().numpy()))
    inputs = calls[stack.attentions[0]].inputs
    size = f"{inputs.positions.src_len} tokens, head_dim {inputs.q.size(-1)}"
    yield Picture(
        name=f"{stack.name}-ranks",
        title=f"rank of logits before masking ({stack.title}; {size})",
        kind="dots",
        panels=panels,
        row="matrix",
        column="head",
        axes=("head", "", "numerical rank"),
    )


def logit_parts(call: Call) -> dict[str, Tensor]:
    """(H|1, T, S) logits of the content q·k, of what positions add, and of all where it differs."""
    inputs = call.inputs
    exact = replace(inputs, q=inputs.q.double(), k=inputs.k.double())
    exact = replace(exact, key_padding=None, causal=False)
    plain = replace(exact, terms=(), content_q=None, content_k=None)
    parts = {"content": reference.logits(plain)[0]}
    if any(term.adds_to_logits or term.content_offset is not None for term in exact.terms):
        # Without content, gates and products have nothing to multiply: what is added is left.
        zeros = torch.zeros_like(exact.q), torch.zeros_like(exact.k)
        added = reference.logits(replace(exact, content_q=zeros[0], content_k=zeros[1]))
        parts["added by positions"] = added[0]
    if len(parts) > 1 or inputs.rotated or any(term.present for term in exact.terms):
        if inputs.rotated:
            turned = inputs.content_q.double(), inputs.content_k.double()
            exact = replace(exact, content_q=turned[0], content_k=turned[1])
        parts["logits"] = reference.logits(exact)[0]
    return parts


def rank(matrix: Tensor) -> Tensor:
    """Rank of (..., T, S), as far as fp32 values can tell."""
    tolerance = max(matrix.shape[-2:]) * torch.finfo(torch.float32).eps
    return torch.linalg.matrix_rank(matrix.detach().double(), rtol=tolerance)


def cosines(stack: Stack, length: int) -> Iterator[Picture]:
    """Cosine similarity between all pairs of absolute positions (004 Fig. 5)."""
    groups = {
        f"{name}-position": [("all", values[None])]
        for name, values in input_positions(stack, length)
    }
    for layer, terms in stack.terms(stack.at(length, torch.zeros(1, length, dtype=torch.long))):
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
        title = f"cosine similarity of {name.replace('-', ' ')}s ({stack.title})"
        picture = _square(f"{stack.name}-{name}-cosine", title, "signed", similar, "cosine")
        axes = ("position (tokens)", "position (tokens)", "cosine")
        yield replace(picture, row="position", column="position", axes=axes)


def _cosine(vectors: Tensor) -> Tensor:
    unit = F.normalize(vectors.detach().double(), dim=-1)
    return unit @ unit.transpose(-1, -2)
