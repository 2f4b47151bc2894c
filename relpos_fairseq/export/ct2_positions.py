"""A stack's positions as CTranslate2 holds them.

CTranslate2 knows four forms: a table added to the input; rotations of adjacent channels; vectors
for clipped distances, one table for all heads of a layer (Shaw); and T5's bias by bucket, a table
a layer.  T5's buckets are exact below half of their number.  A table whose logarithmic half is
filled with the tail is therefore any function of distance: exact up to `reach`, constant beyond.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from relpos_fairseq.export.extras import ExportError
from relpos_fairseq.placement import Placement
from relpos_fairseq.positions import Positions
from relpos_fairseq.relations import DistanceRelation
from relpos_fairseq.rotation import Rotary
from relpos_fairseq.terms import PositionTerms

HELD = {"query_vectors", "value_vectors", "static"}
DEFAULT_LENGTH = 1024  # rows of tables that a scheme does not limit itself; the engine's own cut


@dataclass(frozen=True)
class LayerForm:
    """What a layer adds; absent parts are None.

    Args:
        keys: (2K + 1, D) vectors that meet the query, by clipped distance.
        values: (2K + 1, D) vectors added to the values; zeros where there are only keys.
        bias: (rows, H) in the order of T5's buckets.
        reach: distance up to which the bias is exact.
    """

    keys: Tensor | None = None
    values: Tensor | None = None
    bias: Tensor | None = None
    reach: int = 0


@dataclass(frozen=True)
class StackForm:
    """An encoder's or decoder's positions.

    Args:
        added: (N, E) added to the input's embedding, or None.
        rotary: the rotation, or None.
        layers: what each layer adds.
    """

    added: Tensor | None
    rotary: Rotary | None
    layers: tuple[LayerForm, ...]

    @property
    def relative(self) -> bool:
        """Whether attention itself knows positions; the engine then adds nothing to the input."""
        return self.rotary is not None or any(layer.keys is not None or layer.bias is not None for layer in self.layers)


@torch.no_grad()
def stack_form(placement: Placement, attentions: list[Any], name: str) -> StackForm:
    """Read the positions of a stack from its schemes and its layers' self-attention.

    Raises:
        ExportError: what CTranslate2 cannot hold, by name, and where to go instead.
    """
    plan = placement.plan
    length = plan.longest or max(plan.shape.max_positions, DEFAULT_LENGTH)
    positions = Positions(length, length)
    context, source = placement.context(positions), torch.zeros(length, 1, plan.shape.embed_dim)
    rotating = [scheme for scheme in placement.shared if scheme.rotates]
    terms = [
        context.of_layer(layer).shared + attention.position.evaluate(positions).terms + attention.position.gated(source)
        for layer, attention in enumerate(attentions)
    ]
    problem = _problem(terms, rotating)
    turning = [scheme for layer in range(len(attentions)) for scheme in placement.shared_by(layer)]
    if any(turning.count(scheme) < len(attentions) for scheme in rotating):
        problem = problem or "a rotation in some of its layers"
    layers: tuple[LayerForm, ...] = ()
    if problem is None:
        layers = tuple(_layer(own, plan.shape.num_heads, plan.shape.causal) for own in terms)
        if len({(layer.keys is None, layer.bias is None) for layer in layers}) > 1:
            problem = "vectors or a bias in some of its layers"
    added = placement.embed(positions)
    form = StackForm(None if added is None else added[0].float(), rotating[0].rotary() if rotating else None, layers)
    if problem is None and added is not None and form.relative:
        problem = "a position added to the input beside one in attention"
    if problem is not None:
        raise ExportError(
            f"CTranslate2 cannot hold the {name}'s position scheme {plan.name}: it has {problem}; "
            f"relpos export onnx holds every scheme"
        )
    return form


def _problem(terms: list[tuple[PositionTerms, ...]], rotating: list[Any]) -> str | None:
    """Name what of the terms the engine cannot hold, or None."""
    every = [term for own in terms for term in own]
    for term in every:
        unknown = [name for name in term.present if name not in HELD]
        if unknown:
            return unknown[0]
        if term.present and not isinstance(term.relation, DistanceRelation):
            return f"a relation that is not of distance ({type(term.relation).__name__})"
        for name in ("query_vectors", "value_vectors"):
            if name in term.present and getattr(term, name).size(0) > 1:
                return f"{name} of each head (--position-share heads or both has them in common)"
        if rotating and term.has_vectors:
            return "vectors beside a rotation"
        if term.has_vectors and any("static" in other.present for other in every):
            return "vectors beside a bias"  # the engine then reads layer 0's bias in every layer
    if any(scheme.rotary() is None for scheme in rotating):
        return "a rotation of its own kind"
    if any(scheme.rotary().channels < scheme.shape.head_dim for scheme in rotating):
        return "channels that are not rotated"
    return None


def _layer(terms: tuple[PositionTerms, ...], heads: int, causal: bool) -> LayerForm:
    """Return the sum of terms by distance."""
    keys = _by_distance(terms, "query_vectors")
    values = _by_distance(terms, "value_vectors", least=0 if keys is None else len(keys) // 2)
    if values is not None and (keys is None or len(keys) < len(values)):
        keys = _by_distance(terms, "query_vectors", least=len(values) // 2)
    given = next((part for part in (keys, values) if part is not None), None)
    if given is not None:
        keys, values = (torch.zeros_like(given) if part is None else part for part in (keys, values))
        keys, values = keys[:, 0], values[:, 0]
    static = _by_distance(terms, "static")
    if static is None:
        return LayerForm(keys, values)
    reach = len(static) // 2
    past = _bucketed(static[: reach + 1].flip(0))
    bias = past if causal else torch.cat([past, _bucketed(static[reach:])])
    return LayerForm(keys, values, bias.expand(-1, heads).contiguous(), reach)


def _by_distance(terms: tuple[PositionTerms, ...], name: str, least: int = 0) -> Tensor | None:
    """Sum a field of terms over distances -K..K; beyond, it is constant: (2K + 1, H|1, ...)."""
    given = [term for term in terms if name in term.present]
    if not given:
        return None
    ends = (end for term in given for end in (-term.relation.lowest, term.relation.highest))
    reach = max(1, least, *ends)
    distance = torch.arange(-reach, reach + 1)
    tables = [getattr(term, name)[:, term.relation.of_distance(distance)] for term in given]
    return sum(table.float() for table in tables).transpose(0, 1)


def _bucketed(values: Tensor) -> Tensor:
    """Values (K + 1, H) of distances 0..K as 2K buckets: 0..K-1 exactly, then the tail."""
    tail = values[-1:].expand(len(values) - 1, -1)
    return torch.cat([values[:-1], tail])
