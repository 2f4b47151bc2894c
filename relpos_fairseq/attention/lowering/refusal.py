"""The terms that no kernel has a form for: they remain for `blocked` and `reference`.

- Tables over a relation that is none of distances: a pair's row follows from no distance.  `static`
  over pairs of segments is served, as factors.
- Several product terms, or several trilinear ones: a kernel multiplies or replaces content once.
- Resets of several first tokens: a kernel replaces one row and one column.

No scheme or hybrid of this package needs any of these.
"""

from __future__ import annotations

from relpos_fairseq.attention.inputs import AttentionInputs
from relpos_fairseq.attention.lowering.factors import is_segments
from relpos_fairseq.relations import DistanceRelation


def refusal(inputs: AttentionInputs) -> str | None:
    """Return what kernels over distances have no form for, or None."""
    products = trilinear = 0
    reset = None
    for term in inputs.terms:
        products += term.product
        trilinear += term.trilinear is not None
        if term.reset is not None:
            first = term.reset.first
            if reset is not None and first is not reset and (first != reset).any():
                return "resets of several first tokens"
            reset = first
        if term.relation is None or isinstance(term.relation, DistanceRelation):
            continue
        odd = [field for field in term.present if field not in ("static", "reset")]
        if odd or not is_segments(term):
            return f"{' and '.join(odd) or 'static'} over {term.relation}"
    for name, count in (("product", products), ("trilinear", trilinear)):
        if count > 1:
            return f"{count} {name} terms"
    return None
