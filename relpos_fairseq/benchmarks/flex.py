"""The same terms by torch's FlexAttention, where a score_mod can express them.

A score_mod sees one logit at a time, and tensors that were captured: a table of scalars becomes a
vector over distances, q.a_r a tensor (B, H, T, R) formed beforehand by a product, a bias without a
structure in distance a (T, S) matrix.  It can neither replace q.k (m3) nor reach the values (Shaw).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from relpos_fairseq.attention import AttentionInputs
from relpos_fairseq.attention.formula import static_logits
from relpos_fairseq.attention.reference import Gathered
from relpos_fairseq.benchmarks.scheme_candidate import SchemeCandidate
from relpos_fairseq.benchmarks.settings import AttentionSetting
from relpos_fairseq.relations import Clipped, DistanceRelation
from relpos_fairseq.terms import PositionTerms

Mod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
VARIANTS = 512  # compiled versions that are kept: one a scheme and shape


class Flex(SchemeCandidate):
    """A position scheme by FlexAttention."""

    def __init__(self, name: str, setting: AttentionSetting) -> None:
        super().__init__(name, setting)
        self.label = f"{name}, FlexAttention"
        torch._dynamo.config.recompile_limit = VARIANTS
        torch._dynamo.config.accumulated_recompile_limit = VARIANTS
        self.compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        self.block_mask = None
        if setting.causal:
            self.block_mask = create_block_mask(
                lambda batch, head, query, key: query >= key,
                None,
                None,
                setting.length,
                setting.length,
                device=setting.device.type,
            )

    def refusal(self, mode: str) -> str | None:
        with torch.no_grad():
            terms = self.call(*self.inputs()).terms
        for term in terms:
            if term.trilinear is not None:
                return "a score_mod cannot replace q.k"
            if term.value_vectors is not None:
                return "a score_mod cannot reach the values"
            if term.contextual is not None:
                return "a score_mod sees one logit, not a row"
        if mode in ("train", "memory") and self.setting.device.type == "cpu":
            return "it has no backward pass on a CPU"
        return "only whole sequences are compared" if mode == "decode" else None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = self.call(q, k, v)
        content_q, content_k = (made.content_q, made.content_k) if made.rotated else (made.q, made.k)
        return self.compiled(
            content_q, content_k, v, score_mod=score_mod(made), block_mask=self.block_mask, scale=made.scale
        )


def score_mod(inputs: AttentionInputs) -> Mod | None:
    """What the terms of a call do to one logit; None where they do nothing."""
    mods: list[Mod] = []
    for term in inputs.terms:
        if term.gate is not None:
            mods.append(_over_distances(term.gate, term, inputs, torch.mul))
        if term.product:
            mods.append(_by_row(inputs.q, term.query_vectors, term, torch.mul))
            mods.append(_by_column(inputs.k, term.key_vectors, term, torch.mul))
    for term in inputs.terms:
        mods += _added(term, inputs)
    return _in_turn(mods) if mods else None


def _added(term: PositionTerms, inputs: AttentionInputs) -> list[Mod]:
    mods: list[Mod] = []
    if term.content_offset is not None:
        offset = (inputs.k @ term.content_offset[..., None]).squeeze(-1) * inputs.scale  # (B, H, S)
        mods.append(lambda score, b, h, i, j: score + offset[b, h, j])
    if term.product or not term.adds_to_logits:
        return mods
    whole = (term.static_factors, term.decay, term.reset)
    if any(part is not None for part in whole):
        bias = static_logits(term, Gathered(inputs)).to(inputs.q.dtype)  # (B|1, H|1, T, S)
        bias = bias.expand(*inputs.q.shape[:2], -1, -1)
        return [*mods, lambda score, b, h, i, j: score + bias[b, h, i, j]]
    if term.query_vectors is not None:
        query = inputs.q
        if term.query_offset is not None:
            query = query + term.query_offset[:, None]
        mods.append(_by_row(query * inputs.scale, term.query_vectors, term, torch.add))
    if term.key_vectors is not None:
        mods.append(_by_column(inputs.k * inputs.scale, term.key_vectors, term, torch.add))
    if term.static is not None:
        mods.append(_over_distances(term.static, term, inputs, torch.add))
    return mods


def _in_turn(mods: list[Mod]) -> Mod:
    first, *rest = mods
    if not rest:
        return first
    then = _in_turn(rest)
    return lambda score, b, h, i, j: then(first(score, b, h, i, j), b, h, i, j)


def _over_distances(table: Tensor, term: PositionTerms, inputs: AttentionInputs, join: Callable) -> Mod:
    """A table of scalars (H|1, R) as a vector over all distances that occur."""
    positions = inputs.positions
    low, high = positions.lowest_distance, positions.highest_distance
    vector = table[:, term.relation.window(low, high, table.device)].to(inputs.q.dtype)
    vector = vector.expand(inputs.q.size(1), -1)
    return lambda score, b, h, i, j: join(score, vector[h, j - i - low])


def _by_row(query: Tensor, table: Tensor, term: PositionTerms, join: Callable) -> Mod:
    """q.a_r, read at a query's row."""
    found, column = query @ table.to(query.dtype).transpose(-1, -2), _column_of(term.relation)
    return lambda score, b, h, i, j: join(score, found[b, h, i, column(j - i)])


def _by_column(key: Tensor, table: Tensor, term: PositionTerms, join: Callable) -> Mod:
    """k.b_r, read at a key's row."""
    found, column = key @ table.to(key.dtype).transpose(-1, -2), _column_of(term.relation)
    return lambda score, b, h, i, j: join(score, found[b, h, j, column(j - i)])


def _column_of(relation: DistanceRelation) -> Callable[[Tensor], Tensor]:
    if isinstance(relation, Clipped):
        past, future = relation.past, relation.future
        return lambda distance: torch.clamp(distance, -past, future) + past
    return relation.of_distance
