"""What the native kernel is handed means what the terms say: held against the reference, in fp64.

The kernel's formula is evaluated densely by torch here (`native_formula`), so that lowering, the
call and autograd's part are tested without a compiler.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from cases import CASES, INPUT, Case
from helpers.forms import told_apart
from helpers.native_calls import ODD, make_call, make_terms, parameters_of
from helpers.native_formula import Libraries
from helpers.scheme_calls import hold, hold_case
from relpos_fairseq.attention import AttentionInputs, attend, native
from relpos_fairseq.attention.step import supports_step
from relpos_fairseq.core.relations import Clipped, Segments
from relpos_fairseq.core.terms import Decay, PositionTerms, Reset

pytestmark = pytest.mark.usefixtures("formula")
IN_ATTENTION = told_apart(case for case in CASES if case.scheme not in INPUT and not case.without_kernel)
KINDS = ("square", "causal", "causal_memory", "pad_left", "block", "step_padded")
HEAD = {"segment_encoding": "head"}


def cases() -> Iterator[object]:
    """Every scheme in every kind of call; other forms in a square one, and one other in turn."""
    seen: set[str] = set()
    for number, case in enumerate(IN_ATTENTION):
        kinds = ("square", KINDS[1 + number % 5]) if case.scheme in seen else KINDS
        seen.add(case.scheme)
        for kind in kinds:
            yield pytest.param(case, kind, id=f"{case}-{kind}")


@pytest.mark.parametrize(("case", "kind"), list(cases()))
def test_every_case(case: Case, kind: str, formula: Libraries) -> None:
    """Every scheme and form of terms."""
    inputs = hold_case("native", case, kind)
    step = inputs.positions.is_step and supports_step(inputs.terms, inputs.positions)
    assert formula[torch.float64].calls == {"forward": not step, "backward": not step}


def hold_call(terms: tuple[PositionTerms, ...], **chosen) -> None:
    """Values and all gradients of a call whose terms are its leaves."""
    hold("native", make_call(terms, **chosen), parameters_of(terms))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", ODD)
def test_terms_that_no_scheme_has(kind: str, wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several relations in one window, narrow or of all distances; offsets; mixed resets."""
    monkeypatch.setattr(native.call, "MAX_CLIPPED_WIDTH", 0 if wide else 192)
    hold_call(make_terms(kind))


@pytest.mark.parametrize("mask", ["padding", "dead", "window", "documents", "all"])
def test_masks(mask: str) -> None:
    """Every mask, alone and together; a row without keys gives 0."""
    chosen = {}
    if mask in ("padding", "dead", "all"):
        padding = torch.zeros(2, 9, dtype=torch.bool)
        padding[1, : 9 if mask == "dead" else 4] = True
        chosen["key_padding"] = padding
    if mask in ("window", "all"):
        chosen["window"] = 3
    if mask in ("documents", "all"):
        chosen["documents"] = torch.tensor([[0, 0, 0, 4, 4, 4, 7, 7, 7]], dtype=torch.int32)
    chosen["causal"] = mask == "all"
    hold_call(make_terms("several"), **chosen)


@pytest.mark.parametrize(
    "case",
    [
        Case("tupe", HEAD),
        Case("tupe_a", HEAD),
        Case("m4", {"position_reset_cls": "on", **HEAD}),
        Case("rope+transformer_xl"),
        Case("rope+transformer_xl+m2"),
        Case("m3+transformer_xl"),
        Case("tupe+transformer_xl", {"position_reset_cls": "on", "position_scale": "2"}),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["square", "pad_left"])
def test_hybrids(case: Case, kind: str) -> None:
    """Segments beside a reset; u and v where the content is rotated or multiplied."""
    hold_case("native", case, kind)


def test_refusals() -> None:
    """What the kernel has no form for is said by name."""

    def refused(inputs: AttentionInputs, reason: str) -> None:
        with pytest.raises(ValueError, match=f"backend native cannot evaluate .*{reason}"):
            attend(inputs, "native")

    reset = Reset(torch.zeros(1), torch.zeros(1), torch.tensor([0]))
    table, pairs = torch.zeros(1, 4).double(), Segments(2)
    vectors = torch.zeros(1, 4, 4).double()
    static = PositionTerms(Clipped(2, 1), static=table)
    product = PositionTerms(Clipped(2, 1), query_vectors=vectors, key_vectors=vectors, product=True)
    trilinear = PositionTerms(Clipped(2, 1), trilinear=vectors)
    decay = PositionTerms(decay=Decay(torch.zeros(1, 1, 9)))
    held = functools.partial(replace, reset=reset)
    other = replace(reset, first=torch.tensor([0, 1]))
    for terms, reason in (
        ((PositionTerms(pairs, query_vectors=vectors),), "query_vectors over Segments"),
        ((PositionTerms(pairs, gate=table),), "gate over Segments"),
        ((product, product), "2 product terms"),
        ((trilinear,) * 3, "3 trilinear terms"),
        ((decay, decay), "2 decay terms"),
        ((held(static), replace(static, reset=other)), "resets of several first tokens"),
    ):
        refused(make_call(terms), reason)
    refused(make_call((), dropout=1.0), "a dropout of 1,")
    small = make_call(())
    refused(replace(small, q=small.q.to("meta")), "tensors on meta")
    refused(replace(small, q=small.q.to(torch.complex128)), "inputs of torch.complex128")
    with pytest.raises(ValueError, match="backend native cannot .*need_weights"):
        attend(small, "native", need_weights=True)
