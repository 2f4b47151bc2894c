"""Draw logits: attention, logits of positions alone, ranks.

No scheme is named: logits are computed by the reference from the terms, with or without content.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.attention import AttentionInputs
from relpos_fairseq.attention.reference import GatheredProducts
from relpos_fairseq.attention.reference import logits as logits_of
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Segments
from relpos_fairseq.core.terms import PositionTerms
from relpos_fairseq.plots.axes import Absent, Panel, Picture, head_names
from relpos_fairseq.plots.stacks import Stack, WatchedAttention

QUERY, KEY = "query position (tokens)", "key position (tokens)"


def attention_probabilities(stack: Stack, calls: dict, tokens: list[str], title: str, most: int) -> Iterator[Picture]:
    """Yield attention probabilities averaged over heads, of the first `most` queries, by layer (Huang2020, Fig. 5)."""
    panels = []
    for number, attention in enumerate(stack.attentions, 1):
        probs = calls[attention].probs.double().mean(0)
        if stack.causal:
            start = calls[attention].inputs.positions.query_start
            future = torch.ones_like(probs).triu(start + 1) > 0
            probs = probs.masked_fill(future, float("nan"))
        memory = probs.size(1) - probs.size(0)
        probs = probs[:most, : memory + most]
        slots = list(range(probs.size(1)))
        rows = slots[memory:]
        named = tokens[:most] if len(tokens[:most]) == len(rows) == len(slots) else None
        panels.append(Panel({"layer": str(number)}, rows, slots, probs.numpy(), named))
    yield Picture(
        name=f"{stack.name}-attention",
        title="attention, mean over heads",
        detail=f"{stack.title}; {title}",
        kind="positive",
        panels=panels,
        row="query",
        column="key",
        axes=("key (token)", "query (token)", "probability"),
    )


def without_content(stack: Stack, layer: str, terms: tuple[PositionTerms, ...], at: Positions) -> Tensor:
    """Return the logits (H|1, T, S) of q = k = 0, NaN where attention is masked."""
    zeros = torch.zeros(1, 1, at.src_len, stack.positions.plan.shape.head_dim).double()
    plan = stack.positions.plan
    scale = plan.scale if layer == "all" else plan.of_layer(int(layer) - 1).scale
    inputs = AttentionInputs(zeros, zeros, zeros, terms, at, scale, causal=stack.causal)
    logits, excluded = logits_of(GatheredProducts(inputs))[0], inputs.excluded()
    return logits if excluded is None else logits.masked_fill(excluded[0], float("nan"))


def adds_alone(term: PositionTerms) -> bool:
    """Return whether a term adds to the logits without content."""
    return any(part is not None for part in (term.static, term.static_factors, term.query_offset))


def logits_by_layer(stack: Stack, at: Positions, segments: bool) -> list[tuple[str, Tensor]]:
    """Return the logits (H|1, T, S) without content of every layer, or of `all` where layers share them."""

    def chosen(terms: tuple[PositionTerms, ...]) -> tuple[PositionTerms, ...]:
        return tuple(t for t in terms if segments or not isinstance(t.relation, Segments))

    (_, shared), *own = ((layer, chosen(terms)) for layer, terms in stack.evaluate(at))
    if not any(adds_alone(term) for _, terms in own for term in terms):
        own = [("all", ())]
        if not any(adds_alone(term) for term in shared):
            return []
    return [(layer, without_content(stack, layer, shared + terms, at)) for layer, terms in own]


def position_logits(stack: Stack, length: int) -> Iterator[Picture]:
    """Yield what terms add to the logits without any content (Chen2021, Fig. 4)."""
    at = stack.at(length)
    layers = logits_by_layer(stack, at, segments=False)
    if not layers:
        raise Absent(f"position logits: {_why_none(stack, at)}")
    left_out = sorted(_content_fields(stack, at))
    note = f"; not shown, as they need content: {', '.join(left_out)}" if left_out else ""
    words = ("position logits without content (q = k = 0)", stack.title + note)
    yield square(f"{stack.name}-position-logits", words, layers, "logit")


def probabilities(logits: Tensor) -> Tensor:
    """Return the softmax over keys, NaN where attention is masked."""
    probs = logits.masked_fill(logits.isnan(), float("-inf")).softmax(-1)
    return probs.masked_fill(logits.isnan(), float("nan"))


def segment_logits(stack: Stack, length: int, segments: int) -> Iterator[Picture]:
    """Yield logits of positions and segments of equal length, and their softmax (Chen2021, Fig. 6)."""
    at = stack.at(length, segments)
    relations = [t.relation for _, terms in stack.evaluate(at) for t in terms]
    counts = [r.count for r in relations if isinstance(r, Segments)]
    if not counts:
        raise Absent("segment logits: no term is over segments")
    if segments > min(counts):
        raise ValueError(f"--segments {segments}: the model has {min(counts)}; give no more")
    starts = ", ".join(str(int((at.segments < s).sum())) for s in range(1, segments))
    words = ("position and segment logits without content (q = k = 0)", f"{stack.title}; segments start at 0, {starts}")
    layers = logits_by_layer(stack, at, segments=True)
    yield square(f"{stack.name}-segment-logits", words, layers, "logit")
    probs = [(layer, probabilities(logits)) for layer, logits in layers]
    words = ("attention by positions and segments alone (q = k = 0)", words[1])
    name = f"{stack.name}-segment-attention"
    yield replace(square(name, words, probs, "probability"), kind="positive")


def _content_fields(stack: Stack, at: Positions) -> set[str]:
    """Return the names of the fields that only act on content."""
    fields = {name for _, terms in stack.evaluate(at) for term in terms for name in term.present}
    if stack.positions.context(at).rotation is not None:
        fields.add("rotation of q and k")
    alone = ("static", "static_factors", "query_offset", "value_vectors", "reset", "relation")
    return fields - set(alone)


def _why_none(stack: Stack, at: Positions) -> str:
    fields = sorted(_content_fields(stack, at))
    if not fields:
        return "no term adds to the logits"
    return f"positions act through content alone, by {', '.join(fields)}"


def square(name: str, words: tuple[str, str], layers: list[tuple[str, Tensor]], value: str) -> Picture:
    """Return a picture of matrices (H|1, T, S): a panel for every layer and head, a row of panels a layer."""
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
    return Picture(name, *words, "signed", panels, "query", "key", (KEY, QUERY, value), across)


def input_positions(stack: Stack, length: int) -> list[tuple[str, Tensor]]:
    """Return (name, vectors (T, E)) of every scheme of the stack that adds absolute positions to the input."""
    at = stack.at(length)
    members = [scheme for scheme in stack.positions.shared if scheme.absolute]
    pairs = [(scheme.name, scheme.embed(at)) for scheme in members]
    return [(name, added[0].detach()) for name, added in pairs if added is not None]


def projected_positions(stack: Stack, length: int) -> Tensor | None:
    """Return the logits (H, T, T) of the positions at the input alone, by the first layer's projections (Chen2021)."""
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
    """Yield the logits that positions at the input alone make in the first layer (Chen2021, section 2.4)."""
    logits = projected_positions(stack, length)
    if logits is None:
        raise Absent("logits of input positions: nothing absolute is added to the input")
    if stack.causal:
        future = torch.ones_like(logits[0]).triu(1) > 0
        logits = logits.masked_fill(future, float("nan"))
    words = ("logits of the input's positions p alone, (p W_Q)·(p W_K)·scale", stack.title)
    yield square(f"{stack.name}-input-logits", words, [("1", logits)], "logit")


def ranks(stack: Stack, batch: list[dict]) -> Iterator[Picture]:
    """Yield numerical ranks of logits before masking, the mean of a batch's sentences (Chen2021, Fig. 2)."""
    lengths = [calls[stack.attentions[0]].inputs.positions.src_len for calls in batch]
    panels, full = [], True
    for number, attention in enumerate(stack.attentions, 1):
        found = [ranks_of(stack, number, calls[attention]) for calls in batch]
        each = [torch.stack(list(one.values())).double() for one in found]
        full &= all(bool((r == size).all()) for r, size in zip(each, lengths, strict=True))
        heads = list(range(1, attention.num_heads + 1))
        values = torch.stack(each).mean(0).numpy()
        panels.append(Panel({"layer": str(number)}, list(found[0]), heads, values))
    tokens = "-".join(map(str, sorted({min(lengths), max(lengths)})))
    size = f"{tokens} tokens, head_dim {stack.positions.plan.shape.head_dim}"
    if len(batch) > 1:
        size += f"; mean over {len(batch)} sentences"
    if full:
        size += "; all ranks are full: a longer sentence may tell matrices apart"
    yield Picture(
        name=f"{stack.name}-ranks",
        title="rank of logits before masking",
        detail=f"{stack.title}; {size}",
        kind="dots",
        panels=panels,
        row="matrix",
        column="head",
        axes=("head", "", "numerical rank"),
    )


def ranks_of(stack: Stack, layer: int, call: WatchedAttention) -> dict[str, Tensor]:
    """Return the ranks (H,) of one sentence's matrices of logits by their names."""
    matrices = logit_parts(call)
    length = call.inputs.positions.src_len
    if layer == 1 and (alone := projected_positions(stack, length)) is not None:
        matrices["input positions alone"] = alone
    heads = stack.attentions[layer - 1].num_heads
    return {name: rank(matrix).expand(heads) for name, matrix in matrices.items()}


def logit_parts(call: WatchedAttention) -> dict[str, Tensor]:
    """Return logits (H|1, T, S) of the content q·k, of what positions add, and of both where they differ."""
    inputs = call.inputs
    exact = replace(inputs, q=inputs.q.double(), k=inputs.k.double())
    exact = replace(exact, key_padding=None, causal=False)
    plain = replace(exact, terms=(), content_q=None, content_k=None)
    parts = {"content": logits_of(GatheredProducts(plain))[0]}
    if any(term.adds_to_logits or term.content_offset is not None for term in exact.terms):
        # Without content, gates and products have nothing to multiply: what is added is left.
        zeros = torch.zeros_like(exact.q), torch.zeros_like(exact.k)
        added = logits_of(GatheredProducts(replace(exact, content_q=zeros[0], content_k=zeros[1])))
        parts["added by positions"] = added[0]
    if len(parts) > 1 or inputs.rotated or any(term.present for term in exact.terms):
        if inputs.rotated:
            turned = inputs.content_q.double(), inputs.content_k.double()
            exact = replace(exact, content_q=turned[0], content_k=turned[1])
        parts["logits"] = logits_of(GatheredProducts(exact))[0]
    return parts


def rank(matrix: Tensor) -> Tensor:
    """Return the rank of matrices (..., T, S), of values with the precision of fp32."""
    tolerance = max(matrix.shape[-2:]) * torch.finfo(torch.float32).eps
    return torch.linalg.matrix_rank(matrix.detach().double(), rtol=tolerance)
