"""What one scheme can say in another's words, exactly: the table of rules.

Everything is written for one layer's parameters.  With q, k the projections, r = clip(j - i) and
C the constant of the target's scale 1/sqrt(C d) (`scales` has brought the source to it):

    same scheme      tables are read again by the target's relation (`reread`): a larger clip
                     repeats the ends, which is what clipping does; heads or layers that shared a
                     table get copies of it
    shaw_keys -> shaw        a^V = 0
    m1 -> m2                 w_r = w_|r|
    m1, m2 -> m3             w_{r,c} = w_r: sum_c q_c k_c w_r = (q.k) w_r
    t5 -> rel_scalar         s'_r = s_bucket(r) / sqrt(C d)
    shaw_keys -> deberta     W^R = 1, W^T = 0
    m4 -> deberta            W^R = W^T = 1 (with the paper's p2c index)
    tupe_a -> tupe           s = 0
    rel_scalar -> tupe       U^Q = 0 (without reset, unless both reset)
    abs_scalar -> tupe_a, tupe    p = P, U^Q = sqrt(C d), U^K = 1, where P's rank is at most d
    sinusoidal -> learned    w_i = the sinusoid at i, up to the table's length
    anything -> anything+X   X at its neutral values (`NEUTRAL`), where it adds 0 or multiplies by 1

Neutral values are chosen so that gradients still reach every table that should learn: DeBERTa's a
and TUPE's U^Q are zero, not their other factor.  M4M, RoPE, ALiBi and KERPLE change the logits
whatever their parameters; abs_scalar's P = 0 is neutral but a point from which it never moves.

BERT's relative_key and relative_key_query are shaw_keys and m4 with the table read over i - j:
`huggingface` flips it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from relpos_fairseq.conversion.distances import relation_of, reread
from relpos_fairseq.conversion.layouts import Params
from relpos_fairseq.conversion.report import ConversionReport
from relpos_fairseq.scheme import PositionScheme
from relpos_fairseq.schemes.absolute import FAIRSEQ_OFFSET, sinusoid

# Parameters whose rows are read by distance; all others of a scheme are taken as they are.
BY_DISTANCE = {
    "shaw_keys": ("key_table",),
    "shaw": ("key_table", "value_table"),
    "t5": ("bias_table",),
    "m1": ("gate_table",),
    "m2": ("gate_table",),
    "m3": ("trilinear_table",),
    "m4": ("table",),
    "m4m": ("table",),
    "deberta": ("table",),
    "tupe": ("bias_table",),
    "rel_scalar": ("bias_table",),
}
# Parameters with a row a position: name, and the axis of the rows.
BY_POSITION = {
    "learned": ("table", 0),
    "sentence": ("table", 0),
    "tupe_a": ("position_table", 1),
    "tupe": ("position_table", 1),
    "abs_scalar": ("position_table", 1),
}
# Values at which a scheme changes no logit; a parameter that is not named keeps its initial value.
NEUTRAL: dict[str, dict[str, float]] = {
    "none": {},
    "learned": {"table": 0.0},
    "sentence": {"table": 0.0},
    "shaw_keys": {"key_table": 0.0},
    "shaw": {"key_table": 0.0, "value_table": 0.0},
    "transformer_xl": {"projection": 0.0, "content_bias": 0.0, "position_bias": 0.0},
    "t5": {"bias_table": 0.0},
    "m1": {"gate_table": 1.0},
    "m2": {"gate_table": 1.0},
    "m3": {"trilinear_table": 1.0},
    "m4": {"table": 0.0},
    "deberta": {"table": 0.0},
    "tupe_a": {"query_projection": 0.0},
    "tupe": {"query_projection": 0.0, "bias_table": 0.0},
    "rel_scalar": {"bias_table": 0.0},
    "segment_head": {"pair_table": 0.0},
    "segment_input": {"table": 0.0},
}
NOT_NEUTRAL = {
    "m4m": "it multiplies q.k by (q.a)(k.a), which is 1 for no table",
    "rope": "it has no parameter, and rotates q and k",
    "alibi": "it has no parameter, and penalises distance",
    "kerple": "its penalty is kept above zero",
    "sinusoidal": "it has no parameter, and adds its waves to the input",
    "abs_scalar": "P = 0 is neutral, but no gradient leaves it",
}


def neutral(scheme: PositionScheme) -> Params | None:
    """Parameters at which `scheme` changes nothing, or None where there are none."""
    values = NEUTRAL.get(scheme.name)
    if values is None:
        return None
    params = {name: value.detach().clone() for name, value in scheme.named_parameters()}
    for name, value in (values | {"theta": 0.0}).items():
        if name in params:
            params[name].fill_(value)
    return params


def is_neutral(scheme: PositionScheme, params: Params) -> bool:
    """Whether `params` change nothing, so that a scheme may be left out."""
    values = NEUTRAL.get(scheme.name)
    if values is None:
        return False
    values = values | {"theta": 0.0}
    return all(
        bool((params[name] == value).all()) for name, value in values.items() if name in params
    )


Rule = Callable[[Params, PositionScheme, PositionScheme, ConversionReport], Params]


def _across(
    params: Params, name: str, old: PositionScheme, new: PositionScheme, report: ConversionReport
) -> Tensor:
    """One table over distances, read again."""
    length = new.shape.max_positions
    table, error, beyond = reread(params[name], relation_of(old), relation_of(new), length)
    if error:
        report.lose(
            f"{old.name}: {name} over {relation_of(old)} is averaged over {relation_of(new)}", error
        )
    elif beyond:
        report.limit(f"inputs of up to {length} tokens ({new.name} reads its ends beyond)")
    return table


def same(
    params: Params, old: PositionScheme, new: PositionScheme, report: ConversionReport
) -> Params:
    """The same scheme under other options."""
    result = dict(params)
    for name in BY_DISTANCE.get(old.name, ()):
        result[name] = _across(params, name, old, new, report)
    return result


def _shaw(params, old, new, report):
    table = _across(params, "key_table", old, new, report)
    return params | {"key_table": table, "value_table": torch.zeros_like(table)}


def _m2(params, old, new, report):
    return {"gate_table": _across(params, "gate_table", old, new, report)}


def _m3(params, old, new, report):
    gate = _across(params, "gate_table", old, new, report)
    return {"trilinear_table": gate[..., None].expand(*gate.shape, new.shape.head_dim)}


def _t5_scalar(params, old, new, report):
    return params | {"bias_table": _across(params, "bias_table", old, new, report) * new.scale}


def _identity(like: Tensor, dim: int) -> Tensor:
    return torch.eye(dim, dtype=like.dtype, device=like.device).expand(like.size(0), dim, dim)


def _keys_deberta(params, old, new, report):
    table = _across(params, "key_table", old, new, report)
    one = _identity(table, new.shape.head_dim)
    kept = {name: value for name, value in params.items() if name == "theta"}
    return kept | {"table": table, "query_projection": one, "key_projection": one * 0}


def _m4_deberta(params, old, new, report):
    table = _across(params, "table", old, new, report)
    one = _identity(table, new.shape.head_dim)
    if new.options.p2c_index == "mirrored" and not torch.equal(table, table.flip(1)):
        report.lose("deberta: the mirrored key term reads a_{-r}, where m4 reads a_r")
    return params | {"table": table, "query_projection": one, "key_projection": one}


def _tupe(params, old, new, report):
    return params | {"bias_table": _zeros(params["position_table"], new, "bias_table")}


def _scalar_tupe(params, old, new, report):
    fresh = {name: value.detach() for name, value in new.named_parameters()}
    table = _across(params, "bias_table", old, new, report)
    projection = torch.zeros_like(fresh["query_projection"])
    return fresh | params | {"bias_table": table, "query_projection": projection}


def _abs_tupe(params, old, new, report):
    table, dim = params["position_table"], new.shape.head_dim
    rank = table.size(-1)
    if rank > dim:
        report.lose(f"abs_scalar: rank {rank} exceeds {dim}, the width of TUPE's positions")
        table = table[..., :dim]
    elif rank < dim:
        table = torch.nn.functional.pad(table, (0, dim - rank))
    one = _identity(table, dim)
    made = {"position_table": table, "query_projection": one / new.scale, "key_projection": one}
    if new.name == "tupe":
        made["bias_table"] = _zeros(table, new, "bias_table")
    return {key: value for key, value in params.items() if key == "theta"} | made


def _zeros(like: Tensor, new: PositionScheme, name: str) -> Tensor:
    return like.new_zeros(like.size(0), *getattr(new, name).shape[1:])


def _waves(params, old, new, report):
    shape = new.shape
    index = torch.arange(shape.max_positions) + FAIRSEQ_OFFSET
    report.limit(f"inputs of up to {shape.max_positions} tokens (the table of {new.name})")
    return {"table": sinusoid(index, shape.embed_dim)}


RULES: dict[tuple[str, str], Rule] = {
    ("shaw_keys", "shaw"): _shaw,
    ("m1", "m2"): _m2,
    ("m1", "m3"): _m3,
    ("m2", "m3"): _m3,
    ("t5", "rel_scalar"): _t5_scalar,
    ("shaw_keys", "deberta"): _keys_deberta,
    ("m4", "deberta"): _m4_deberta,
    ("tupe_a", "tupe"): _tupe,
    ("rel_scalar", "tupe"): _scalar_tupe,
    ("abs_scalar", "tupe_a"): _abs_tupe,
    ("abs_scalar", "tupe"): _abs_tupe,
    ("sinusoidal", "learned"): _waves,
}


def rule_for(source: str, target: str) -> Rule | None:
    """How `source` is said in the words of `target`, or None."""
    return same if source == target else RULES.get((source, target))


def assign(sources: list[str], targets: list[str]) -> dict[str, str]:
    """Which member of the target takes over which of the source (target -> source).

    A member of the same name comes first, then rules in the order of their table.
    """
    taken = {name: name for name in targets if name in sources}
    for source, target in RULES:
        free = source in sources and source not in taken.values()
        if free and target in targets and target not in taken:
            taken[target] = source
    return taken
