"""What the native kernel is handed means what the terms say: held against the reference, in fp64.

The kernel's formula is evaluated densely by torch here (`native_formula`), so that lowering, the
call and autograd's part are tested without a compiler.
"""

from __future__ import annotations

import pytest
import torch
from cases import CASES, INPUT, Case
from native_formula import Formula
from test_backends import gradients, remaker
from test_schemes import call

from relpos_fairseq.attention import AttentionInputs, native

EXACT = {"rtol": 1e-10, "atol": 1e-10}
IN_ATTENTION = [case for case in CASES if case.scheme not in INPUT]
KINDS = ("square", "causal", "causal_memory", "pad_left", "block", "step_padded")
CLIPPED = {"shaw", "m2", "m3", "m4", "m4m", "deberta", "tupe", "rel_scalar"}


@pytest.fixture(autouse=True)
def formula(monkeypatch: pytest.MonkeyPatch) -> dict[torch.dtype, Formula]:
    """Libraries that evaluate the formula, in place of compiled ones."""
    libraries = {dtype: Formula(dtype) for dtype in (torch.float32, torch.float64)}
    monkeypatch.setattr(native.build, "problem", lambda dtype: None)
    monkeypatch.setattr(native.function.calls, "kernel", libraries.__getitem__)
    return libraries


def compare(inputs: AttentionInputs, parameters: list, remake) -> None:
    """Values and all gradients."""
    expected, wanted = gradients(inputs, "reference", parameters, remake)
    got, found = gradients(inputs, "native", parameters, remake)
    torch.testing.assert_close(got, expected, **EXACT)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", IN_ATTENTION, ids=str)
def test_every_case(case: Case, kind: str, formula: dict[torch.dtype, Formula]) -> None:
    """Every scheme and option, for every kind of call."""
    inputs, stack, layer, _ = call(case, kind)
    compare(inputs, [*stack.parameters(), *layer.parameters()], remaker(inputs, stack, layer))
    step = inputs.positions.is_step and native.serves(inputs.terms, inputs.positions)
    assert formula[torch.float64].calls == {"forward": not step, "backward": not step}
