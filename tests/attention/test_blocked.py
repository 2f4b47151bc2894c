"""Slices of queries equal the reference whatever their size, and whatever callers do beside."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import CLIPPED
from helpers.attention_calls import Call, same
from helpers.native_calls import ODD, make_call, make_terms, parameters_of
from helpers.scheme_calls import as_leaves, hold, weighted
from helpers.shaped_calls import Shape, compare, make_inputs
from relpos_fairseq.attention import AttentionInputs, attend, blocked, relative_shift
from relpos_fairseq.core.positions import Positions

# Every kind of term, alone and beside others.
SCHEMES = (
    *("none", "shaw", "shaw_keys", "transformer_xl", "t5", "m1", "m2", "m3", "m4", "m4m"),
    *("deberta", "tupe", "abs_scalar", "rel_scalar", "alibi", "kerple", "rope+m4"),
    *("m2+m3", "m2+m4m", "m3+rel_scalar+shaw", "transformer_xl+m2+t5"),
)
MASKS = ("none", "padding", "window", "documents", "dead")
RICH = ("m3+rel_scalar+shaw", "transformer_xl", "tupe")  # together every kind of operand
ROWS = 48  # of a slice below: several, and a shorter one at the end


@pytest.fixture(autouse=True)
def _several_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "slice_rows", lambda _: ROWS)


def masked(mask: str, tgt_len: int, before: int, causal: bool) -> Shape:
    """Three rows of three heads under a mask; a window is for causal calls."""
    masks = {"padding": ("left", "right"), "dead": ("dead",), "documents": ("documents",)}.get(mask, ())
    window = max(1, (tgt_len + before) // 3) if mask == "window" and causal else None
    return Shape(tgt_len, before, batch=3, heads=3, causal=causal, masks=masks, window=window)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    """Output and all gradients, for any lengths, clip distance, mask, slices and chunks of keys."""
    name = data.draw(st.sampled_from(SCHEMES))
    shared = {"share": data.draw(st.sampled_from(["none", "heads"]))} if name in CLIPPED else {}
    causal, clip = data.draw(st.booleans()), data.draw(st.sampled_from([0, 1, 2, 3, 9, 16, 40]))
    shape = masked(
        data.draw(st.sampled_from(MASKS)), data.draw(st.integers(1, 70)), data.draw(st.integers(0, 40)), causal
    )
    rows = data.draw(st.sampled_from([1, 2, 5, 16, 33, 128]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "slice_rows", lambda _: rows)
        patch.setattr(relative_shift, "LEAST_KEYS", data.draw(st.sampled_from([1, 7, 64])))
        compare(make_inputs(name, replace(shape, clip=clip), **shared), backend="blocked")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scheme", RICH)
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
def test_every_mask(scheme: str, mask: str, causal: bool) -> None:
    """Padding, windows, documents, and a row of the batch without any key."""
    compare(make_inputs(scheme, masked(mask, 67, 9, causal)), backend="blocked")


@pytest.mark.parametrize("kind", ODD)
def test_terms_of_no_scheme(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several terms of a kind, resets of all kinds, segments; values are wider than queries."""
    monkeypatch.setattr(blocked, "slice_rows", lambda _: 3)
    terms = make_terms(kind)
    hold("blocked", make_call(terms), parameters_of(terms))


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9),
    keys=st.integers(1, 12),
    span=st.integers(1, 8),
    first=st.integers(-12, 20),
    shared=st.booleans(),
)
def test_a_band_is_its_scalar_loop(rows: int, keys: int, span: int, first: int, shared: bool) -> None:
    """Keys that do not exist count as 0, wherever the band stands."""
    generator = torch.Generator().manual_seed(rows)
    q, k = (torch.randn(1, 2, n, 3, generator=generator).double() for n in (rows, keys))
    w = torch.randn(1 if shared else 2, span, 3, generator=generator).double()
    found = relative_shift.trilinear_band(q, k, w, first)
    for h in range(2):
        for t in range(rows):
            for m in range(span):
                j = t + m - (rows - 1) + first
                real = 0 <= j < keys
                wanted = (q[0, h, t] * k[0, h, j] * w[h % len(w), m]).sum() if real else 0.0
                assert abs(found[0, h, t, m] - wanted) < 1e-12


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("scheme", RICH)
def test_probabilities_have_gradients(scheme: str, causal: bool) -> None:
    """They are those of the reference for all keys, also where a slice saw the first ones alone."""
    call = Call(scheme, causal=causal)
    found = []
    for backend in ("blocked", "reference"):
        leaves = [x.clone().requires_grad_() for x in call.qkv]
        out, probs = attend(call.inputs(*leaves), backend, need_weights=True)
        wanted = [*leaves, *call.parameters]
        grads = torch.autograd.grad(weighted(out) + 3 * weighted(probs), wanted, materialize_grads=True)
        again = attend(call.inputs(*leaves), backend, need_weights=True)[1]
        of_probs = torch.autograd.grad(weighted(again), leaves[0])
        found.append([out.detach(), probs.detach(), *grads, *of_probs])
    same(*found)


def test_dropout_is_drawn_anew_for_every_slice_and_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two slices, and no two calls, drop the same cells; the rate is the asked one."""
    monkeypatch.setattr(blocked, "slice_rows", lambda _: 16)
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 64, 4).double(), torch.randn(2, 2, 64, 4).double()
    v = torch.eye(64).double().expand(2, 2, -1, -1)
    inputs = AttentionInputs(q, k, v, (), Positions(64, 64), 0.5, dropout=0.25)
    first, second = (attend(inputs, "blocked")[0] == 0 for _ in range(2))
    assert abs(float(first.double().mean()) - 0.25) < 0.02
    assert (first != second).any()
    patterns = {bytes(part.flatten().tolist()) for part in first.view(4, 4, 16, 64).flatten(0, 1)}
    assert len(patterns) == 16


def test_long_sums_round_little() -> None:
    """A table's gradient is a sum over all queries, yet rounds about as the formula's does."""
    exact, call = Call("shaw", 130), Call("shaw", 130)
    for schemes in (exact.stack, exact.layer, call.stack, call.layer):
        schemes.float()
    for schemes in (exact.stack, exact.layer):
        schemes.double()
    generator = torch.Generator().manual_seed(5)
    q, k, v, upstream = torch.randn(4, 96, 2, 130, 4, generator=generator).unbind()

    def of_tables(call: Call, backend: str) -> list[Tensor]:
        dtype = call.parameters[0].dtype
        out = call.attend(*(part.to(dtype) for part in (q, k, v)), backend)
        found = torch.autograd.grad(out, call.parameters, upstream.to(dtype))
        return [part.double() for part in found]

    truth, eager = of_tables(exact, "reference"), of_tables(call, "reference")
    for one, other, value in zip(of_tables(call, "blocked"), eager, truth, strict=True):
        rounding = 4 * torch.finfo(torch.float32).eps * value.abs().max()
        assert (one - value).abs().max() <= 2 * ((other - value).abs().max() + rounding)


@pytest.mark.parametrize("graph", [False, True])
def test_no_more_than_two_slices_are_held(graph: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is linear in length: a slice's probabilities are let go before the one after the next is formed."""
    formed, alive, attend_slice = [], [], blocked._attend_slice

    def watched(*given: object) -> tuple[Tensor, Tensor]:
        alive.append(sum(held() is not None for held in formed))
        out, probs = attend_slice(*given)
        formed.append(weakref.ref(probs))
        return out, probs

    monkeypatch.setattr(blocked, "_attend_slice", watched)
    call, _ = as_leaves(make_inputs("m4", Shape(6 * ROWS)), torch.float64)
    with torch.set_grad_enabled(graph):
        out, probs = attend(call, "blocked", need_weights=False)
        if graph:
            out.sum().backward()
    assert probs is None and len(formed) == 6 * (1 + graph)
    assert max(alive) <= 1


def test_no_generator_without_dropout(monkeypatch):
    """One would be made for each slice of each layer, and no CUDA graph takes one."""
    inputs = make_inputs("m4", Shape(5))
    monkeypatch.setattr(torch, "Generator", None)
    attend(inputs, "blocked")
