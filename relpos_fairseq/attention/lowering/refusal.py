"""The terms that no kernel has a form for: they remain for `blocked` and `reference`.

- Tables over a relation that is none of distances: a pair's row follows from no distance.  `static`
  over pairs of segments is served, as factors.
- Logits by row, which are no function of the distance.
- Content of another width than the queries and keys that vectors meet.
- Distances between positions drawn at random: they are not those of slots.
- Contextual positions: each needs the logits of all keys after it.
- Decays without a causal mask: one side's sums are no factors.
- Several product terms, or several trilinear ones: a kernel multiplies or replaces content once.
- Resets of several first tokens: a kernel replaces one row and one column.

No scheme or hybrid of this package needs any of these.
"""

from __future__ import annotations

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering.factors import is_segments
from relpos_fairseq.positions import is_captured
from relpos_fairseq.relations import DistanceRelation


def refusal(inputs: AttentionInputs) -> str | None:
    """Return what kernels over distances have no form for, or None."""
    wider = inputs.rotated and inputs.content_q.size(-1) != inputs.q.size(-1)
    if wider and any(term.meets_vectors for term in inputs.terms):
        widths = inputs.content_q.size(-1), inputs.q.size(-1)
        return "content of {} channels beside vectors of {}".format(*widths)
    products = trilinear = 0
    reset = None
    for term in inputs.terms:
        if term.contextual is not None:
            return "contextual positions, which need all logits of a row first"
        if term.decay is not None and not inputs.causal:
            return "decay on both sides of a query"
        products += term.product
        trilinear += term.trilinear is not None
        if term.reset is not None:
            first = term.reset.first
            if reset is not None and first is not reset:
                if is_captured() or (first != reset).any():  # a graph cannot tell
                    return "resets of several first tokens"
            reset = first
        if term.by_row is not None:
            return "logits by row (by_row), which no table over distances holds"
        if term.relation is None:
            continue
        if isinstance(term.relation, DistanceRelation):
            if inputs.positions.drawn is not None:
                return "distances between positions drawn at random (--position-random-range)"
            continue
        odd = [field for field in term.present if field not in ("static", "reset")]
        if odd or not is_segments(term):
            return f"{' and '.join(odd) or 'static'} over {term.relation}"
    for name, count in (("product", products), ("trilinear", trilinear)):
        if count > 1:
            return f"{count} {name} terms"
    return None
