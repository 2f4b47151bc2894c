"""A position scheme as a candidate: attention as the plugin's modules call it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cached_property

import torch
from torch import Tensor

from relpos_fairseq.attention import AttentionInputs, attend
from relpos_fairseq.attention.api import choose
from relpos_fairseq.benchmarks.candidates import NAIVE, Candidate
from relpos_fairseq.benchmarks.settings import AttentionSetting, label_of, takes_clip
from relpos_fairseq.config import PositionConfig, resolve
from relpos_fairseq.placement import Placement
from relpos_fairseq.positions import Positions
from relpos_fairseq.scheme import AttentionShape
from relpos_fairseq.stack import DecodingTerms, decay_of


class SchemeCandidate(Candidate):
    """A position scheme, by a backend.

    `reference` is the papers' formula, with a (T, S) matrix a head; `dtype` is the setting's, or
    another that its rounded parameters are given in.
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
        # As all layers of a forward pass share it.
        self.positions = Positions(setting.length, setting.length, device=setting.device)

    @cached_property
    def source(self) -> Tensor:
        """Return an input of the layer (S, B, E), for schemes that read it."""
        size = (self.setting.length, self.setting.batch, self.setting.embed_dim)
        source = torch.randn(size, generator=torch.Generator().manual_seed(0))
        return source.to(self.setting.device, next(iter(self.parameters()), source).dtype)

    def parameters(self) -> list[Tensor]:
        both = [*self.stack.parameters(), *self.layer.parameters()]
        return list({id(part): part for part in both if part.requires_grad}.values())

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
        """Return the call of a whole sequence, its terms formed anew."""
        context = self.stack.context(self.positions)
        own = self.layer.evaluate(self.positions).terms + self.layer.gated(self.source)
        terms = context.shared + own
        made = AttentionInputs(q, k, v, terms, self.positions, self.stack.plan.scale, self.setting.causal)
        if context.rotation is None:
            return made
        scheme, prepared = context.rotation
        turned = scheme.transform_query(q, prepared, 0), scheme.transform_key(k, prepared, 0)
        if any(term.meets_vectors for term in terms):
            return replace(made, content_q=turned[0], content_k=turned[1])
        return replace(made, q=turned[0], k=turned[1])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(self.call(q, k, v), self.backend)[0]

    @property
    def chosen(self) -> str:
        """The backend that evaluates a whole sequence."""
        if self.backend != "auto":
            return self.backend
        with torch.no_grad():
            return choose(self.call(*self.inputs()))

    def decoder(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """Return a step as the plugin makes it: terms, the new key into the cache, attention.

        The last of the keys is new at every step.
        """
        if not self.setting.causal:  # what an encoder alone has, as TUPE's reset, no step meets
            there = replace(self.setting, causal=True)
            return SchemeCandidate(self.name, there, self.backend, self.dtype).decoder(q, k, v)
        # A step needs the plugin's modules, hence fairseq; whole sequences need torch alone.
        from relpos_fairseq.modules.decoding_cache import DecodingCache

        length = k.size(2)
        positions = Positions(1, length, length - 1, device=q.device)
        cache = DecodingCache()
        with torch.no_grad():
            context = self.stack.context(positions, DecodingTerms())

        def advance(first: int) -> AttentionInputs:
            cache.length = first
            terms = context.shared + cache.position.evaluate(self.layer, positions).terms
            new = {"key": k[:, :, first:], "content_key": None, "value": v[:, :, first:]}
            query, content_q = q, None
            if context.rotation is not None:
                scheme, prepared = context.rotation
                turned = scheme.transform_key(new["key"], prepared, first)
                if any(term.meets_vectors for term in terms):
                    new["content_key"] = turned
                    content_q = scheme.transform_query(q, prepared, length - 1)
                else:
                    new["key"], query = turned, scheme.transform_query(q, prepared, length - 1)
            new["log_gates"] = self.layer.log_gates(self.source[first:length])
            kept, scale = cache.append(new, None), self.stack.plan.scale
            terms += decay_of(kept["log_gates"])
            tables = cache.tables(terms, positions, query, scale)
            inputs = AttentionInputs(query, kept["key"], kept["value"], terms, positions, scale, causal=True)
            return replace(
                inputs,
                content_q=content_q,
                content_k=kept["content_key"],
                key_tails=cache.key_tails(tables, kept["key"]),
                step_tables=tables,
            )

        with torch.no_grad():
            advance(0)
        return lambda: attend(advance(length - 1), self.backend)[0]

    def table_mebibytes(self) -> float:
        """Return the MiB of the tables that the scheme's terms hold."""
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
    """Return the scheme's flags: the setting's clip distance where it takes one."""
    flags = {"position_scheme": name}
    if takes_clip(name):
        flags["position_clip_distance"] = str(setting.clip)
    return PositionConfig(**flags)


def _stir(parameter: Tensor, number: int) -> None:
    """Move a parameter off its neutral start, where a wrong row of a table would not be seen."""
    generator = torch.Generator().manual_seed(number)
    noise = 0.2 * torch.randn(parameter.shape, generator=generator)
    with torch.no_grad():
        parameter.copy_(torch.where(parameter == 0, noise, parameter * noise.exp()))
