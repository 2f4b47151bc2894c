"""Wrap each way to attend as a candidate: no positions, a position scheme, FlexAttention, a BERT layer around one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from relpos_fairseq.attention import AttentionInputs, attend
from relpos_fairseq.attention.api import choose
from relpos_fairseq.attention.reference import GatheredProducts, static_logits
from relpos_fairseq.core.calls import layer_call, rotated
from relpos_fairseq.core.config import PositionConfig, resolve
from relpos_fairseq.core.placement import DecodingTerms, Placement, decay_of
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped, DistanceRelation
from relpos_fairseq.core.scheme import AttentionShape
from relpos_fairseq.core.terms import PositionTerms
from relpos_fairseq.lab.benchmarks.workload import AttentionSetting, draw, draw_heads, label_of, takes_clip

BASELINE, NAIVE = "no positions", "naive"
DECODED = 8  # sentences that a step of decoding continues, at least
MODES = ("train", "forward", "decode", "memory")


class Candidate:
    """One way to attend over the queries, keys and values of a setting; `label` names its row."""

    def __init__(self, label: str, setting: AttentionSetting) -> None:
        self.label, self.setting = label, setting

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return the output (B, H, T, D)."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")

    def decoder(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """Return a step of decoding, q (B, H, 1, D), with what earlier steps left in the cache."""
        raise NotImplementedError(f"{type(self).__name__} must define decoder")

    def inputs(self) -> tuple[Tensor, ...]:
        """Draw the arguments of a call."""
        return draw_heads(self.setting)

    def parameters(self) -> list[Tensor]:
        """Return what training takes gradients of, beside the inputs."""
        return []

    def refusal(self, mode: str) -> str | None:
        """Return why a mode cannot be measured, or None."""
        return None


class NoPositions(Candidate):
    """Torch's own attention; a step of decoding is two products and a softmax."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.setting.causal)

    def decoder(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """Return scaled products of one query; the new key and value go into the cache."""
        keys, values, scale = k.clone(), v.clone(), q.size(-1) ** -0.5

        def step() -> Tensor:
            keys[:, :, -1:], values[:, :, -1:] = k[:, :, -1:], v[:, :, -1:]
            return ((q * scale) @ keys.transpose(-1, -2)).softmax(-1) @ values

        return step


class LayerCandidate(Candidate):
    """A BERT layer around a candidate: what positions cost beside the layer's other work."""

    def __init__(self, attention: Candidate) -> None:
        super().__init__(attention.label, attention.setting)
        self.attention, width = attention, self.setting.embed_dim
        sizes = {name: (width, width) for name in ("query", "key", "value", "out")}
        sizes |= {"widen": (width, 4 * width), "narrow": (4 * width, width)}
        parts = {name: nn.Linear(*size) for name, size in sizes.items()}
        parts |= {name: nn.LayerNorm(width) for name in ("first_norm", "second_norm")}
        self.body = nn.ModuleDict(parts).to(self.setting.device, self.setting.dtype)

    def inputs(self) -> tuple[Tensor, ...]:
        """Return hidden states (B, T, E)."""
        setting = self.setting
        return (draw(setting, setting.batch, setting.length, setting.embed_dim),)

    def parameters(self) -> list[Tensor]:
        return [*self.body.parameters(), *self.attention.parameters()]

    def refusal(self, mode: str) -> str | None:
        return "a layer does not decode" if mode == "decode" else self.attention.refusal(mode)

    def __call__(self, x: Tensor) -> Tensor:
        """Return hidden states (B, T, E), normalised after each half as in BERT."""
        q, k, v = (
            self.body[name](x).unflatten(-1, (self.setting.heads, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        attended = self.attention(q, k, v).transpose(1, 2).flatten(2)
        x = self.body["first_norm"](x + self.body["out"](attended))
        inner = F.gelu(self.body["widen"](x))
        return self.body["second_norm"](x + self.body["narrow"](inner))


def runner(candidate: Candidate, mode: str) -> Callable[[], object]:
    """Return what is timed in a mode: forward and backward pass, a forward pass, or a step of decoding."""
    setting = candidate.setting
    if mode == "decode":
        many = replace(setting, batch=max(setting.batch, DECODED))
        return torch.no_grad()(candidate.decoder(*draw_heads(many, queries=1)))
    given = candidate.inputs()
    if mode == "forward":
        return torch.no_grad()(lambda: candidate(*given))
    upstream = draw(setting, *given[0].shape, seed=9)  # outputs have the queries' shape

    def train() -> None:
        leaves = [part.detach().requires_grad_() for part in given]
        wanted = [*leaves, *candidate.parameters()]
        torch.autograd.grad(candidate(*leaves), wanted, upstream, allow_unused=True)

    return train


# ---------------------------------------------------------------------------------------------------------------------
# A position scheme.


class SchemeCandidate(Candidate):
    """A position scheme evaluated by a backend, as the modules of this package call attention.

    The backend `reference` is the papers' formula, with a (T, S) matrix a head.  Parameters are rounded to the
    setting's type; `dtype` is another type to compute in.
    """

    def __init__(
        self, name: str, setting: AttentionSetting, backend: str = "auto", dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(label_of(name, NAIVE if backend == "reference" else backend), setting)
        self.name, self.backend, self.dtype = name, backend, dtype
        shape = AttentionShape(
            setting.embed_dim, setting.heads, max(setting.length, 2), causal=setting.causal, seed_name="benchmark"
        )
        self.stack = Placement(resolve(_flags(name, setting), shape, "translation"))
        self.layer = self.stack.layer_schemes(0)
        for number, parameter in enumerate(self.parameters()):
            _stir(parameter, number)
        for module in (self.stack, self.layer):
            module.to(setting.device, setting.dtype).to(dtype=dtype or setting.dtype)
        # All layers of a forward pass share them.
        self.positions = Positions(setting.length, setting.length, device=setting.device)

    @cached_property
    def source(self) -> Tensor:
        """Return an input of the layer (S, B, E), for schemes whose gates depend on it."""
        size = (self.setting.length, self.setting.batch, self.setting.embed_dim)
        source = torch.randn(size, generator=torch.Generator().manual_seed(0))
        return source.to(self.setting.device, next(iter(self.parameters()), source).dtype)

    def parameters(self) -> list[Tensor]:
        both = [*self.stack.parameters(), *self.layer.parameters()]
        return list({id(part): part for part in both if part.requires_grad}.values())

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
        """Return the call of attention for a whole sequence, its terms computed anew."""
        return layer_call(self.stack, self.layer, self.stack.context(self.positions), q, k, v, self.source)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(self.call(q, k, v), self.backend)[0]

    @property
    def chosen(self) -> str:
        """Return the name of the backend that evaluates a whole sequence."""
        if self.backend != "auto":
            return self.backend
        with torch.no_grad():
            return choose(self.call(*self.inputs()))

    def decoder(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """Return a step as a model makes it: compute terms, put the last key into the cache, attend."""
        if not self.setting.causal:  # an encoder's own parts, as TUPE's reset, are in no step
            there = replace(self.setting, causal=True)
            return SchemeCandidate(self.name, there, self.backend, self.dtype).decoder(q, k, v)
        # A step needs this package's modules, hence fairseq; whole sequences need torch alone.
        from relpos_fairseq.nn.decoding_cache import DecodingCache

        length = k.size(2)
        source = self.source[:, torch.arange(k.size(0), device=q.device) % self.setting.batch]  # more rows: again
        positions = Positions(1, length, length - 1, device=q.device)
        cache = DecodingCache()
        with torch.no_grad():
            context = self.stack.context(positions, DecodingTerms())

        def advance(first: int) -> AttentionInputs:
            cache.length = first
            terms = context.shared + cache.position.evaluate(self.layer, positions).terms
            fresh, scale = (k[:, :, first:], v[:, :, first:]), self.stack.plan.scale
            new = rotated(AttentionInputs(q, *fresh, terms, positions, scale, causal=True), context)
            tensors = {"key": new.k, "content_key": new.content_k, "value": new.v}
            kept = cache.append(tensors | self.layer.gates(source[first:length], None), None)
            terms += decay_of(kept)
            tables = cache.tables(terms, positions, new.q, scale)
            return replace(
                new,
                k=kept["key"],
                v=kept["value"],
                terms=terms,
                content_k=kept["content_key"],
                clipped_key_products=cache.clipped_key_products(tables, kept["key"]),
                step_tables=tables,
            )

        with torch.no_grad():
            advance(0)
        return lambda: attend(advance(length - 1), self.backend)[0]

    def table_mebibytes(self) -> float:
        """Return the MiB of the tensors that the scheme's terms hold."""
        q, k, v = self.inputs()
        with torch.no_grad():
            terms = self.call(q, k, v).terms
        tables: dict[int, Tensor] = {}
        for term in terms:
            values = [getattr(term, part.name) for part in fields(term)]
            values += term.static_factors or ()
            tables |= {id(value): value for value in values if isinstance(value, Tensor)}
        return sum(part.numel() * part.element_size() for part in tables.values()) / 2**20


def _flags(name: str, setting: AttentionSetting) -> PositionConfig:
    """Return the scheme's options: the setting's clip distance where it takes one."""
    flags = {"position_scheme": name}
    if takes_clip(name):
        flags["position_clip_distance"] = str(setting.clip)
    return PositionConfig(**flags)


def _stir(parameter: Tensor, number: int) -> None:
    """Change a parameter in place: at a neutral start a wrong row of a table would not be seen."""
    generator = torch.Generator().manual_seed(number)
    noise = 0.2 * torch.randn(parameter.shape, generator=generator)
    with torch.no_grad():
        parameter.copy_(torch.where(parameter == 0, noise, parameter * noise.exp()))


# ---------------------------------------------------------------------------------------------------------------------
# FlexAttention, where a score_mod can express a scheme's terms.  A score_mod sees one logit at a time, and captured
# tensors: a table of scalars becomes a vector over distances, q.a_r a tensor (B, H, T, R) that a product gives before,
# a bias without a structure in distance a (T, S) matrix.  It can neither replace q.k (m3) nor change values (Shaw).

Mod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
VARIANTS = 512  # compiled versions that are kept: one for each scheme and shape


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
            if term.contextual is not None or term.mixing is not None:
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
    """Return a score_mod that changes one logit as the terms of a call do; None where they do nothing."""
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
        bias = static_logits(term, GatheredProducts(inputs)).to(inputs.q.dtype)  # (B|1, H|1, T, S)
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
    """Return a score_mod that reads a table of scalars (H|1, R) as a vector over all distances."""
    positions = inputs.positions
    low, high = positions.lowest_distance, positions.highest_distance
    relation: Any = term.relation
    vector = table[:, relation.window(low, high, table.device)].to(inputs.q.dtype)
    vector = vector.expand(inputs.q.size(1), -1)
    return lambda score, b, h, i, j: join(score, vector[h, j - i - low])


def _by_row(query: Tensor, table: Tensor, term: PositionTerms, join: Callable) -> Mod:
    """Return a score_mod that reads q.a_r (B, H, T, R) at a query's row."""
    found, column = query @ table.to(query.dtype).transpose(-1, -2), _column_of(term.relation)
    return lambda score, b, h, i, j: join(score, found[b, h, i, column(j - i)])


def _by_column(key: Tensor, table: Tensor, term: PositionTerms, join: Callable) -> Mod:
    """Return a score_mod that reads k.b_r (B, H, S, R) at a key's row."""
    found, column = key @ table.to(key.dtype).transpose(-1, -2), _column_of(term.relation)
    return lambda score, b, h, i, j: join(score, found[b, h, j, column(j - i)])


def _column_of(relation: DistanceRelation) -> Callable[[Tensor], Tensor]:
    if isinstance(relation, Clipped):
        past, future = relation.past, relation.future
        return lambda distance: torch.clamp(distance, -past, future) + past
    return relation.of_distance
