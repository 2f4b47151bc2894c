"""What one scheme's tables can say in another's, exactly.

The rules stand in the schemes' own files (`takes_over`, `tables`); together they are:

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
    m4 -> deberta            W^R = W^T = 1 (where both read the same row)
    tupe_a -> tupe           s = 0
    rel_scalar -> tupe       U^Q = 0 (without reset, unless both reset)
    abs_scalar -> tupe_a, tupe    p = P, U^Q = sqrt(C d), U^K = 1, where P's rank is at most d
    sinusoidal -> learned    w_i = the sinusoid at i, up to the table's length
    alibi -> fox             w = 0, b = -log(e^m - 1)
    rope -> rope             other angles by length: exact up to the trained length
    rope -> xpos             s = 0: no decay
    anything -> anything+X   X at its neutral values (`Table.neutral`): it adds 0 or multiplies by 1

Neutral values are chosen so that gradients still reach every table that should learn: DeBERTa's a
and TUPE's U^Q are zero, not their other factor.  M4M, RoPE, xPos, PoPE, ALiBi, KERPLE and others
(`never_neutral`) change the logits whatever their parameters; abs_scalar's P = 0 is neutral but a
point from which it never moves.

BERT's relative_key and relative_key_query are shaw_keys and m4 with the table read over i - j:
`huggingface` flips it.
"""

from __future__ import annotations

from relpos_fairseq.conversion.layouts import Params, Place
from relpos_fairseq.scheme import PositionScheme
from relpos_fairseq.takeover import Takeover


def neutral(scheme: PositionScheme) -> Params | None:
    """Return parameters at which `scheme` changes nothing, or None where there are none."""
    if scheme.never_neutral:
        return None
    scheme.start_neutral()
    return {name: value.detach().clone() for name, value in scheme.named_parameters()}


def is_neutral(scheme: PositionScheme, params: Params) -> bool:
    """Tell whether `params` change nothing, so that a scheme may be left out."""
    wanted = ((value, scheme.table_of(name).neutral) for name, value in params.items())
    return not scheme.never_neutral and all(
        neutral is None or bool((value == neutral).all()) for value, neutral in wanted
    )


def take_over(source: Takeover) -> Params:
    """Return the source's parameters in the target's tables, as far as a rule goes."""
    old, new = source.old, source.new
    if old.name != new.name:
        return new.takes_over[old.name](source)
    made = dict(source.params)
    for name in source.params:
        if old.table_of(name).rows == "distance":
            made[name] = source.across(name)
        if set(old.table_of(name).copies) <= new._parameters.keys():
            made |= {copy: made[name] for copy in old.table_of(name).copies}
            if old.table_of(name).copies:
                del made[name]
    return made


def assign(sources: list[Place], targets: list[Place]) -> dict[str, str]:
    """Decide which member of the target takes over which of the source (target -> source).

    A member of the same name comes first, then what the members of the target take over.
    """
    names = [place.name for place in sources]
    taken = {place.name: place.name for place in targets if place.name in names}
    for place in sorted(targets, key=_row):
        for source in place.scheme.takes_over:
            if source in names and source not in taken.values() and place.name not in taken:
                taken[place.name] = source
    return taken


def _row(place: Place) -> int:
    card = getattr(place.scheme, "card", None)
    return 0 if card is None else card.row
