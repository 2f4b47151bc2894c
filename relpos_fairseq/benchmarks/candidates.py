"""Ways to attend that are timed side by side, and what is timed of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from relpos_fairseq.attention import AttentionInputs, attend
from relpos_fairseq.attention.api import choose
from relpos_fairseq.attention.step import tail_products
from relpos_fairseq.benchmarks.settings import (
    DECODED,
    Setting,
    draw,
    draw_heads,
    flags_of,
    label_of,
)
from relpos_fairseq.config import resolve
from relpos_fairseq.modules.decoding_cache import DecodingCache
from relpos_fairseq.placement import DecodingTerms, Placement
from relpos_fairseq.positions import Positions
from relpos_fairseq.scheme import AttentionShape

BASELINE, NAIVE = "no positions", "naive"
MODES = ("train", "forward", "decode", "memory")


class Candidate:
    """One way to attend over the queries, keys and values of a setting.

    Args:
        label: the row's name.
        setting: what is measured.
    """

    def __init__(self, label: str, setting: Setting) -> None:
        """Keep both."""
        self.label, self.setting = label, setting

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, T, D)."""
        raise NotImplementedError(f"{type(self).__name__} must define __call__")

    def decoder(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """One step of decoding, q (B, H, 1, D), with what earlier steps left in the cache."""
        raise NotImplementedError(f"{type(self).__name__} must define decoder")

    def inputs(self) -> tuple[Tensor, ...]:
        """What a call takes."""
        return draw_heads(self.setting)

    def parameters(self) -> list[Tensor]:
        """What training takes gradients of, beside the inputs."""
        return []

    def refusal(self, mode: str) -> str | None:
        """Why a mode cannot be measured, or None."""
        return None


class NoPositions(Candidate):
    """Torch's own attention; where it decodes, two products and a softmax."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, T, D)."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=self.setting.causal)

    def decoder(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """Scaled products of one query; the new key and value are written into the cache."""
        keys, values, scale = k.clone(), v.clone(), q.size(-1) ** -0.5

        def step() -> Tensor:
            keys[:, :, -1:], values[:, :, -1:] = k[:, :, -1:], v[:, :, -1:]
            return ((q * scale) @ keys.transpose(-1, -2)).softmax(-1) @ values

        return step


class Scheme(Candidate):
    """A position scheme, by a backend.

    Args:
        name: scheme or hybrid.
        setting: what is measured.
        backend: how; `reference` is the papers' formula, with a (T, S) matrix a head.
        dtype: the setting's, or another that its rounded parameters are given in.
    """

    def __init__(
        self,
        name: str,
        setting: Setting,
        backend: str = "auto",
        dtype: torch.dtype | None = None,
    ) -> None:
        """Build the scheme."""
        super().__init__(label_of(name, NAIVE if backend == "reference" else backend), setting)
        self.name, self.backend = name, backend
        shape = AttentionShape(
            setting.embed_dim,
            setting.heads,
            max(setting.length, 2),
            causal=setting.causal,
            seed_name="benchmark",
        )
        self.stack = Placement(resolve(flags_of(name, setting), shape, "translation"))
        self.layer = self.stack.layer_schemes(0)
        for number, parameter in enumerate(self.parameters()):
            _stir(parameter, number)
        for module in (self.stack, self.layer):
            module.to(setting.device, setting.dtype).to(dtype=dtype or setting.dtype)
        # As all layers of a forward pass share it.
        self.positions = Positions(setting.length, setting.length, device=setting.device)

    def parameters(self) -> list[Tensor]:
        """The scheme's parameters."""
        both = [*self.stack.parameters(), *self.layer.parameters()]
        return list({id(part): part for part in both if part.requires_grad}.values())

    def call(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
        """The call of a whole sequence, its terms formed anew."""
        context = self.stack.context(self.positions)
        terms = context.shared + self.layer.evaluate(self.positions)[1]
        made = AttentionInputs(
            q, k, v, terms, self.positions, self.stack.plan.scale, self.setting.causal
        )
        if context.rotation is None:
            return made
        scheme, prepared = context.rotation
        turned = scheme.transform_query(q, prepared, 0), scheme.transform_key(k, prepared, 0)
        if any(term.meets_vectors for term in terms):
            return replace(made, content_q=turned[0], content_k=turned[1])
        return replace(made, q=turned[0], k=turned[1])

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(B, H, T, D)."""
        return attend(self.call(q, k, v), self.backend)[0]

    @property
    def chosen(self) -> str:
        """The backend that evaluates a whole sequence."""
        if self.backend != "auto":
            return self.backend
        with torch.no_grad():
            return choose(self.call(*self.inputs()))

    def decoder(self, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
        """A step as the plugin's attention makes it: terms, the new key into the cache, attention.

        The last of the keys is new at every step.
        """
        length = k.size(2)
        positions = Positions(1, length, length - 1, device=q.device)
        cache = DecodingCache()
        with torch.no_grad():
            context = self.stack.context(positions, DecodingTerms())

        def advance(first: int) -> AttentionInputs:
            cache.length = first
            terms = context.shared + cache.position.evaluate(self.layer, positions)[1]
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
            new["key_tails"] = tail_products(terms, new["key"])
            kept, scale = cache.append(new, None), self.stack.plan.scale
            return AttentionInputs(
                query, kept["key"], kept["value"], terms, positions, scale, True,
                content_q=content_q, content_k=kept["content_key"], key_tails=kept["key_tails"],
                step_tables=cache.tables(terms, positions, query, scale),
            )  # fmt: skip

        with torch.no_grad():
            advance(0)
        return lambda: attend(advance(length - 1), self.backend)[0]

    def table_mebibytes(self) -> float:
        """MiB of the tables that the scheme's terms hold."""
        q, k, v = self.inputs()
        with torch.no_grad():
            terms = self.call(q, k, v).terms
        tables: dict[int, Tensor] = {}
        for term in terms:
            values = [getattr(term, part.name) for part in fields(term)]
            values += term.static_factors or ()
            tables |= {id(value): value for value in values if isinstance(value, Tensor)}
        return sum(part.numel() * part.element_size() for part in tables.values()) / 2**20


def _stir(parameter: Tensor, number: int) -> None:
    """Move a parameter off its neutral start, where a wrong row of a table would not be seen."""
    generator = torch.Generator().manual_seed(number)
    noise = 0.2 * torch.randn(parameter.shape, generator=generator)
    with torch.no_grad():
        parameter.copy_(torch.where(parameter == 0, noise, parameter * noise.exp()))


def runner(candidate: Candidate, mode: str) -> Callable[[], object]:
    """What is timed: forward and backward pass, a forward pass, or a step of decoding."""
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
