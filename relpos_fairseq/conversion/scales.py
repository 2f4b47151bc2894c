"""Another constant C in 1/sqrt(C d), folded into projections and tables.

DeBERTa's C is 3, TUPE's 2, all others' 1.  With f = sqrt(C' / C), the projections of q and k grow
by f_q and f_k, f_q f_k = f, and every logit stays what it was if tables follow:

    q.a_r            (f_q q).a' = f q.a                 a' = f_k a    (shaw, XL's W_R, W^R)
    k.b_r            (f_k k).b' = f k.b                 b' = f_q b    (W^T)
    q.a_r + k.a_r    one table meets both               f_q = f_k     (m4)
    u.k, v.(W_R R)   (f_q q + u').(f_k k)               u' = f_q u, v' = f_q v
    (q.k)(q.a)(k.a)  f (f_q f_k) (q.a')(k.a') = f ...   a' = a / sqrt(f)    (m4m)
    s / sqrt(C d)    s' / sqrt(C' d) = s / sqrt(C d)    s' = f s      (t5, TUPE's U^Q)

Tables in logit units (rel_scalar, abs_scalar, TUPE's s, theta, segments) and gates stay.  All of f
goes to q unless a scheme has one table for q and k.
"""

from __future__ import annotations

import math

from relpos_fairseq.conversion.layouts import ENCODER, Params, Place, State, Tables, count_layers, places
from relpos_fairseq.conversion.report import ConversionReport
from relpos_fairseq.plan import PositionPlan
from relpos_fairseq.tables import Table


def fold(
    content: State, tables: Tables, source: PositionPlan, target: PositionPlan, report: ConversionReport
) -> tuple[State, Tables]:
    """Bring a model from the scale of `source` to that of `target`, every logit unchanged."""
    content, scaled, said = dict(content), dict(tables), {}
    for layer in range(count_layers(content)):
        old, new = source.of_layer(layer), target.of_layer(layer)
        factor = math.sqrt(new.scale_constant / old.scale_constant)
        if factor == 1.0:
            continue
        bent = [m.scheme.name for m in old.members if m.scheme.bends_content]
        if bent:
            report.lose(f"another scale under {bent[0]}, whose logits do not grow with q")
            continue
        every = [table for plan in (old, new) for table in _tables(plan)]
        query = math.sqrt(factor) if any(table.meets_both for table in every) else factor
        key = factor / query
        for projection, by in (("q_proj", query), ("k_proj", key)):
            for part in ("weight", "bias"):
                name = f"{ENCODER}.layers.{layer}.self_attn.{projection}.{part}"
                content[name] = content[name] * by
        for place in places(source):
            if layer < len(scaled[place.name]):
                scaled[place.name] = [
                    _grown(place, params, query, key) if number == layer else params
                    for number, params in enumerate(scaled[place.name])
                ]
        said[
            f"scale 1/sqrt({old.scale_constant:g}d) -> 1/sqrt({new.scale_constant:g}d), folded "
            f"into the projection of q (times {query:.6g})" + (f" and of k (times {key:.6g})" if key != 1 else "")
        ] = None
    for line in said:
        report.step(line)
    return content, scaled


def _grown(place: Place, params: Params, query: float, key: float) -> Params:
    powers = {name: place.scheme.table_of(name).grows for name in params}
    return {name: value * (query ** powers[name][0] * key ** powers[name][1]) for name, value in params.items()}


def _tables(plan: PositionPlan) -> list[Table]:
    return [
        place.scheme.table_of(name) for place in places(plan) for name, _ in place.build(plan, 0).named_parameters()
    ]
