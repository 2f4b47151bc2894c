"""Share, lengthen and rescale position tables: heads, positions, and the constant C of 1/sqrt(C d).

Relative tables need no lengthening: beyond their reach they read their ends, and an unclipped table grows by repeating
them. A table with a row per position is made longer by

    tile          row i is row i mod N: locally the same pattern, as fairseq users tile RoBERTa
    interpolate   N rows stretched linearly over N' (the first and last rows stay)

DeBERTa's C is 3, TUPE's 2, all others' 1. With f = sqrt(C' / C), the projections of q and k grow by f_q and f_k,
f_q f_k = f, and every logit stays what it was if tables follow:

    q.a_r            (f_q q).a' = f q.a                 a' = f_k a    (shaw, XL's W_R, W^R)
    k.b_r            (f_k k).b' = f k.b                 b' = f_q b    (W^T)
    q.a_r + k.a_r    one table multiplies both          f_q = f_k     (m4)
    u.k, v.(W_R R)   (f_q q + u').(f_k k)               u' = f_q u, v' = f_q v
    (q.k)(q.a)(k.a)  f (f_q f_k) (q.a')(k.a') = f ...   a' = a / sqrt(f)    (m4m)
    s / sqrt(C d)    s' / sqrt(C' d) = s / sqrt(C d)    s' = f s      (t5, TUPE's U^Q)

Tables in logit units (rel_scalar, abs_scalar, TUPE's s, theta, segments) and gates stay. All of f goes to q unless a
scheme has one table for q and k.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from relpos_fairseq.conversion.layouts import ENCODER, Params, State, Tables, count_layers, places
from relpos_fairseq.conversion.report import ConversionReport
from relpos_fairseq.core.plan import PositionPlan
from relpos_fairseq.core.scheme import PositionScheme

FILLS = ("tile", "interpolate")


def spread_heads(params: Params, scheme: PositionScheme, report: ConversionReport) -> Params:
    """Copy or average tables to the number that `scheme` has: one, or one per head."""
    result = {}
    for name, value in params.items():
        table = scheme.table_of(name)
        if not table.has_heads:
            result[name] = value
            continue
        tables = table.by_head(value, scheme.shape.head_dim)
        if scheme.own_scale is not None and tables.size(0) != scheme.table_heads:
            if tables.size(0) == 1:
                tables = tables.expand(scheme.table_heads, *tables.shape[1:])
            else:
                tables = _merged(tables, f"{scheme.name}: {name} of all heads", report)[None]
        result[name] = table.stored(tables)
    return result


def merge_layers(layers: list[Params], parts: tuple[str, ...], name: str, report: ConversionReport) -> list[Params]:
    """Make one of the parameters `parts`, which the target's layers share; return all layers' parameters."""
    merged = {
        part: _merged(torch.stack([p[part] for p in layers if p]), f"{name}: {part} of all layers", report)
        for part in parts
    }
    return [params | merged if params else {} for params in layers]


def _merged(tables: Tensor, what: str, report: ConversionReport) -> Tensor:
    """Return the table that all are equal to, or else their mean, which is reported as lost."""
    if bool((tables == tables[:1]).all()):
        return tables[0]
    mean = tables.mean(0)
    error = float((tables - mean).abs().max())
    report.lose(f"{what} become one table, their mean", error)
    return mean


def resize(table: Tensor, length: int, fill: str | None, report: ConversionReport, axis: int = 0) -> Tensor:
    """Resize a table to `length` positions along `axis`; `fill` says how further positions are made.

    Raises:
        ValueError: more positions are wanted and `fill` does not say how, or an unknown `fill`.
    """
    if fill not in (None, *FILLS):
        raise ValueError(f"positions are filled by one of {', '.join(FILLS)}, got {fill}")
    known = table.size(axis)
    if length == known:
        return table
    if length < known:
        report.step(f"absolute positions cut from {known} to {length}")
        report.limit(length)
        return table.narrow(axis, 0, length)
    if fill is None:
        raise ValueError(
            f"the source knows {known} absolute positions and {length} are wanted: fill the rest "
            f"(relpos convert --positions {length} --fill tile or --fill "
            f"interpolate), keep to {known} (--max-positions), or choose a relative scheme, which "
            f"takes any length"
        )
    if fill == "tile":
        report.step(f"absolute positions {known}..{length - 1} repeat those from 0")
        report.limit(known)
        return table.index_select(axis, torch.arange(length, device=table.device) % known)
    report.lose(f"{known} absolute positions are stretched over {length}")
    where = torch.arange(length, dtype=torch.float64, device=table.device) * (known - 1) / (length - 1)
    below = where.floor().long().clamp(max=max(known - 2, 0))
    share = (where - below).to(table.dtype).view(-1, *[1] * (table.dim() - axis - 1))
    above = (below + 1).clamp(max=known - 1)
    return torch.lerp(table.index_select(axis, below), table.index_select(axis, above), share)


def fold(
    content: State, tables: Tables, source: PositionPlan, target: PositionPlan, report: ConversionReport
) -> tuple[State, Tables]:
    """Bring a model from the scale of `source` to that of `target`, every logit unchanged."""
    content, scaled = dict(content), {name: list(rows) for name, rows in tables.items()}
    for layer in range(count_layers(content)):
        old, new = source.of_layer(layer), target.of_layer(layer)
        factor = math.sqrt(new.scale_constant / old.scale_constant)
        if factor == 1.0:
            continue
        bent = [m.scheme.name for m in old.members if m.scheme.nonlinear_qk]
        if bent:
            report.lose(f"another scale under {bent[0]}, whose logits do not grow with q")
            continue
        every = [
            place.scheme.table_of(name)
            for plan in (old, new)
            for place in places(plan)
            for name, _ in place.build(plan, 0).named_parameters()
        ]
        query = math.sqrt(factor) if any(table.multiplies_both for table in every) else factor
        key = factor / query
        for projection, by in (("q_proj", query), ("k_proj", key)):
            for part in ("weight", "bias"):
                name = f"{ENCODER}.layers.{layer}.self_attn.{projection}.{part}"
                content[name] = content[name] * by
        for place in places(source):
            if layer < len(scaled[place.name]):
                params = scaled[place.name][layer]
                powers = {name: place.scheme.table_of(name).grows for name in params}
                factors = {name: query**of_query * key**of_key for name, (of_query, of_key) in powers.items()}
                scaled[place.name][layer] = {name: value * factors[name] for name, value in params.items()}
        report.step(
            f"scale 1/sqrt({old.scale_constant:g}d) -> 1/sqrt({new.scale_constant:g}d), folded "
            f"into the projection of q (times {query:.6g})" + (f" and of k (times {key:.6g})" if key != 1 else "")
        )
    return content, scaled
