"""Slices of queries equal the reference whatever their size, and whatever callers do beside."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cases import CLIPPED, Case, build
from helpers.attention_calls import Call, Interrupt, expanded, in_a_thread, permuted, same, strided, weighted
from helpers.native_calls import ODD, make_terms, parameters_of
from helpers.native_calls import make_call as make_odd
from helpers.scheme_calls import gradients, remaker
from relpos_fairseq.attention import AttentionInputs, attend, blocked, relative_shift
from relpos_fairseq.attention import triton as kernels
from relpos_fairseq.core.positions import Positions

EXACT = {"rtol": 1e-10, "atol": 1e-10}
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


def make_call(case: Case, tgt_len: int, memory: int, causal: bool, mask: str, batch: int = 3):
    """A call in fp64 with random parameters, and what remakes it."""
    stack, layer = build(case, causal=causal, heads=3, dim=4, longest=tgt_len + memory)
    src_len = tgt_len + memory
    generator = torch.Generator().manual_seed(tgt_len * 31 + src_len)

    def draw(length: int) -> torch.Tensor:
        return torch.randn(batch, 3, length, 4, generator=generator, dtype=torch.float64)

    segments = (torch.arange(src_len) > src_len // 2).long().expand(batch, -1)
    index = torch.arange(src_len).expand(batch, -1).clone()
    if mask == "padding" and not causal:  # one row is padded on the left
        index[2] = (index[2] - src_len // 4).clamp(min=0)
    positions = Positions(tgt_len, src_len, memory, token_index=index, segments=segments)
    chosen = {}
    if mask == "padding":
        padding = torch.zeros(batch, src_len, dtype=torch.bool)
        padding[1, src_len - src_len // 3 :] = True
        padding[2, : 0 if causal else src_len // 4] = True
        chosen["key_padding"] = padding
    elif mask == "dead":
        chosen["key_padding"] = torch.zeros(batch, src_len, dtype=torch.bool)
        chosen["key_padding"][0] = True
    elif mask == "window" and causal:
        chosen["window"] = max(1, src_len // 3)
    elif mask == "documents":
        edges = torch.rand(batch, src_len, generator=generator) < 0.2
        chosen["documents"] = edges.long().cumsum(1)
    q, k, v = draw(tgt_len), draw(src_len), draw(src_len)
    inputs = AttentionInputs(q, k, v, (), positions, stack.plan.scale, causal=causal, **chosen)
    remake = remaker(inputs, stack, layer)
    return remake(q, k, v), [*stack.parameters(), *layer.parameters()], remake


def compare(inputs: AttentionInputs, parameters: list, remake) -> None:
    """Hold values and gradients against the reference's."""
    expected, wanted = gradients(inputs, "reference", parameters, remake)
    got, found = gradients(inputs, "blocked", parameters, remake)
    torch.testing.assert_close(got, expected, **EXACT)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, **EXACT)


def filled(grads: Iterable[Tensor | None], wanted: Iterable[Tensor]) -> list[Tensor]:
    """Zeros in place of gradients that are None."""
    return [torch.zeros_like(w) if g is None else g for g, w in zip(grads, wanted, strict=True)]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    """Output and all gradients, for any lengths, clip distance, mask, slices and chunks of keys."""
    name = data.draw(st.sampled_from(SCHEMES))
    flags = {}
    if set(CLIPPED) & set(name.split("+")):
        flags["position_clip_distance"] = str(data.draw(st.sampled_from([0, 1, 2, 3, 9, 16, 40])))
        if "+" not in name:
            flags["position_share"] = data.draw(st.sampled_from(["none", "heads"]))
    tgt_len, causal = data.draw(st.integers(1, 70)), data.draw(st.booleans())
    memory = data.draw(st.integers(0, 40)) if "tupe" not in name and "abs" not in name else 0
    call = make_call(Case(name, flags), tgt_len, memory, causal, data.draw(st.sampled_from(MASKS)))
    rows = data.draw(st.sampled_from([1, 2, 5, 16, 33, 128]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocked, "slice_rows", lambda _: rows)
        patch.setattr(relative_shift, "LEAST_KEYS", data.draw(st.sampled_from([1, 7, 64])))
        compare(*call)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scheme", RICH)
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
def test_every_mask(scheme: str, mask: str, causal: bool) -> None:
    """Padding, windows, documents, and a row of the batch without any key."""
    memory = 0 if scheme == "tupe" else 9
    compare(*make_call(Case(scheme), 67, memory, causal, mask))


@pytest.mark.parametrize("kind", ODD)
def test_terms_of_no_scheme(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several terms of a kind, resets of all kinds, segments; values are wider than queries."""
    monkeypatch.setattr(blocked, "slice_rows", lambda _: 3)
    terms = make_terms(kind)
    found = []
    for backend in ("blocked", "reference"):
        inputs = make_odd(terms)
        leaves = [x.requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out, _ = attend(inputs, backend)
        wanted = [*leaves, *parameters_of(terms)]
        grads = torch.autograd.grad(weighted(out), wanted, allow_unused=True)
        found.append([out.detach(), *filled(grads, wanted)])
    same(*found)


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
        grads = torch.autograd.grad(weighted(out) + 3 * weighted(probs), wanted, allow_unused=True)
        again = attend(call.inputs(*leaves), backend, need_weights=True)[1]
        of_probs = torch.autograd.grad(weighted(again), leaves[0])
        found.append([out.detach(), probs.detach(), *filled(grads, wanted), *of_probs])
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


# --- what callers do beside ----------------------------------------------------------------------


@pytest.mark.parametrize("layout", [permuted, strided, expanded], ids=lambda f: f.__name__)
@pytest.mark.parametrize("scheme", RICH)
def test_layouts(scheme: str, layout: Callable[[Tensor], Tensor]) -> None:
    """Strides change nothing."""
    call = Call(scheme)
    odd = [layout(x) for x in call.qkv]
    same(call.gradients(odd), call.gradients([x.contiguous() for x in odd], "reference"))


@pytest.mark.parametrize("scheme", RICH)
def test_few_tokens(scheme: str) -> None:
    """A sequence of one token and of two, whole or as a step; T = 1 that is no step."""
    for length in (1, 2):
        for causal in (False, True):
            call = Call(scheme, length, causal=causal)
            same(call.gradients(call.qkv), call.gradients(call.qkv, "reference"))
    call = Call(scheme, 150)
    call.positions = Positions(1, 150, 70)
    leaves = [call.qkv[0][:, :, 70:71], *call.qkv[1:]]
    same(call.gradients(leaves), call.gradients(leaves, "reference"))


@pytest.mark.parametrize("scheme", RICH)
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
def test_no_key_is_left(scheme: str, causal: bool) -> None:
    """A padded row gives 0 and no gradient, and never NaN; left padding leaves causal rows none."""
    padding = torch.zeros(2, 200, dtype=torch.bool)
    padding[0], padding[1, :130] = True, True
    call = Call(scheme, causal=causal, key_padding=padding)
    found = call.gradients(call.qkv)
    assert not found[0][0].any() and not any(part[0].any() for part in found[1:4])
    assert not causal or not found[0][1, :, :130].any()
    same(found, call.gradients(call.qkv, "reference"))


@pytest.mark.parametrize("scheme", RICH)
def test_gradients_of_some(scheme: str) -> None:
    """Whichever of q, k, v and the parameters wants a gradient gets that of all wanting one."""
    call = Call(scheme, 100)
    whole = call.gradients(call.qkv)[1:]
    everything = [x.clone() for x in call.qkv] + call.parameters
    for chosen in range(len(everything)):
        for number, tensor in enumerate(everything):
            tensor.requires_grad_(number == chosen)
        out = call.attend(*everything[:3])
        (found,) = torch.autograd.grad(weighted(out), everything[chosen])
        torch.testing.assert_close(found, whole[chosen], **EXACT)


def test_one_tensor_thrice() -> None:
    """Queries, keys and values may be the same tensor."""
    call = Call("shaw")
    found = []
    for backend in ("blocked", "reference"):
        x = call.qkv[0].clone().requires_grad_()
        found.append(torch.autograd.grad(weighted(call.attend(x, x, x, backend)), x))
    same(*found)


@pytest.mark.parametrize("scheme", RICH)
def test_twice_through_one_graph(scheme: str) -> None:
    """A graph that is kept gives the same bits again; an expanded upstream gradient is one too."""
    call = Call(scheme)
    leaves = [x.clone().requires_grad_() for x in call.qkv]
    out = call.attend(*leaves)
    wanted = [*leaves, *call.parameters]
    first, again = (torch.autograd.grad(out.sum(), wanted, retain_graph=True, allow_unused=True) for _ in "ab")
    dense = torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)
    for one, two, three in zip(first, again, dense, strict=True):
        assert one is two is three is None or torch.equal(one, two) and torch.equal(one, three)


@pytest.mark.parametrize(
    ("scheme", "backend"), [("shaw", "blocked"), ("m3", "blocked"), ("rel_scalar", "blocked"), ("m4m", "triton")]
)
def test_no_second_derivative(scheme: str, backend: str) -> None:
    """A gradient's gradient is refused, not wrong."""
    call = Call(scheme, 200 if backend == "blocked" else 20)
    if backend == "triton":
        pytest.importorskip("triton")
        if not kernels.interpreted():
            pytest.skip("needs the interpreter (TRITON_INTERPRET=1)")
    q = call.qkv[0].clone().requires_grad_()
    out = call.attend(q, *call.qkv[1:], backend)
    (first,) = torch.autograd.grad(weighted(out), q, create_graph=True)
    torch.testing.assert_close(first, call.gradients(call.qkv, backend)[1], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(first.square().sum(), q)


def test_hooks_see_gradients() -> None:
    """Hooks on leaves, and on what autograd saves, are called and may change what they see."""
    call = Call("tupe")
    plain = call.gradients(call.qkv)
    q = call.qkv[0].clone().requires_grad_()
    q.register_hook(lambda grad: 2 * grad)
    packed = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x.shape)
        return x.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = call.attend(q, *call.qkv[1:])
    (found,) = torch.autograd.grad(weighted(out), q)
    torch.testing.assert_close(found, 2 * plain[1], **EXACT)
    assert packed


def test_what_was_changed_since_is_seen() -> None:
    """Writing into an input between forward and backward pass is an error, as in torch."""
    call = Call("shaw")
    k = call.qkv[1].clone()
    q = call.qkv[0].clone().requires_grad_()
    out = call.attend(q, k, call.qkv[2])
    k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


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


# --- modes, threads and interruptions ------------------------------------------------------------


@pytest.mark.parametrize("scheme", RICH)
def test_inference_mode_and_back(scheme: str) -> None:
    """Evaluation in inference mode, then training, then evaluation, in one thread."""
    call = Call(scheme)
    expected = call.gradients(call.qkv, "reference")

    def work() -> list[Tensor]:
        found = []
        for _ in range(2):
            for mode in (torch.inference_mode, torch.no_grad):
                with mode():
                    found.append(call.attend(*call.qkv))
            found += call.gradients(call.qkv)
        return [part.clone() for part in found]

    same(in_a_thread(work), 2 * [expected[0], expected[0], *expected])


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
    call, *_ = make_call(Case("m4"), 6 * ROWS, 0, False, "none")
    with torch.set_grad_enabled(graph):
        out, probs = attend(call, "blocked", need_weights=False)
        if graph:
            out.sum().backward()
    assert probs is None and len(formed) == 6 * (1 + graph)
    assert max(alive) <= 1


@pytest.mark.parametrize("scheme", ["m4", "shaw", "m3", "rel_scalar"])
def test_autocast(scheme: str) -> None:
    """Neither pass is touched by autocast, whether it is on around one, the other or both."""
    call = Call(scheme)
    for module in (call.stack, call.layer):
        module.float()
    leaves = [x.float() for x in call.qkv]
    plain = call.gradients(leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = call.gradients(leaves)
    same(inside, plain, rtol=1e-4, atol=1e-5)


def test_threads_at_once() -> None:
    """Threads that call at the same time, different shapes and schemes, do not meet."""
    names = ("shaw", "m4", "transformer_xl", "m4m", "m3", "rel_scalar", "m2", "tupe", "none")
    calls = [Call(scheme, length) for length, scheme in enumerate(names, 93)]
    expected = [call.gradients(call.qkv) for call in calls]
    begin = threading.Barrier(len(calls))

    def work(call: Call) -> list[Tensor]:
        begin.wait(timeout=60)
        return call.gradients(call.qkv)

    with ThreadPoolExecutor(len(calls)) as pool:
        found = list(pool.map(work, calls))
    for one, other in zip(found, expected, strict=True):
        same(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("scheme", RICH)
def test_nothing_is_left_behind(scheme: str) -> None:
    """After an exception in either pass, or a call full of NaN, the next gives the same bits."""
    call = Call(scheme, 100)
    expected = call.gradients(call.qkv)
    for after in (1, 5, 23, 60, 150):
        try:
            with Interrupt(after):
                call.gradients(call.qkv)
        except KeyboardInterrupt:
            pass
        same(call.gradients(call.qkv), expected, rtol=0, atol=0)
    call.gradients([x * float("nan") for x in call.qkv])
    same(call.gradients(call.qkv), expected, rtol=0, atol=0)
