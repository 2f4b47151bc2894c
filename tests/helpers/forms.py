"""Cases that attention can tell apart: it sees terms, and neither schemes nor options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass

from torch import Tensor

from cases import Case
from helpers import FULL
from helpers.scheme_calls import call

_FORMS: dict[str, object] = {}  # what many files ask for as they are collected, by the case's name


def form_of(value: object) -> object:
    """Terms, or a part of them, with the shapes of their tensors in place of their numbers."""
    if isinstance(value, Tensor):
        return tuple(value.shape)
    if isinstance(value, tuple):
        return tuple(map(form_of, value))
    if is_dataclass(value):
        parts = (form_of(getattr(value, part.name)) for part in fields(value))
        return (type(value).__name__, *parts)
    return repr(value)


def told_apart(cases: Iterable[Case]) -> list[Case]:
    """Every scheme and hybrid as it is, and of those with options the first of each form.

    Options that change numbers alone, or give a table the shape that another option gives it,
    are the same call to a backend: that their numbers are right is tested against the papers.
    """
    seen, kept = set(), []
    for case in cases:
        if (form := _FORMS.get(str(case))) is None:
            inputs, *_ = call(case, "causal" if case.gated else "square")
            form = _FORMS[str(case)] = (form_of(inputs.terms), inputs.content_q is None)
        if not case.flags or form not in seen:
            kept.append(case)
        seen.add(form)
    return kept


def in_turn(cases: Iterable[Case], kinds: tuple[str, ...], others: int = 1) -> list[tuple[Case, str]]:
    """Every scheme and hybrid in all kinds of calls; other options in the first kind and `others` in turn.

    With RELPOS_ONNX=full all cases are in all kinds.
    """
    found = []
    for place, case in enumerate(cases):
        own = FULL or not case.flags or "+" in case.scheme
        rest = len(kinds) - 1
        turns = range(rest) if own else sorted({(place + 2 * turn) % rest for turn in range(others)})
        found += [(case, kinds[0]), *((case, kinds[1 + turn]) for turn in turns)]
    return found
