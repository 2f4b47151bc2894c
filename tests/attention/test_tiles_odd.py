"""What callers do beside calling: odd layouts, partial gradients, modes, threads, interruptions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from cases import Case, build
from relpos_fairseq.attention import AttentionInputs, attend
from relpos_fairseq.attention import triton as kernels
from relpos_fairseq.positions import Positions

# One scheme for each way in which tiles meet a table.
SCHEMES = ("shaw", "m4", "transformer_xl", "m4m", "m3", "rel_scalar", "m2", "tupe", "none")
LENGTH = 200  # more than one tile, and enough for those that multiply
EXACT = {"rtol": 1e-9, "atol": 1e-10}


class Call:
    """A call of a scheme whose terms are formed anew each time.

    Args:
        scheme: its name.
        length: T = S.
        options: of the inputs.
    """

    def __init__(self, scheme: str, length: int = LENGTH, **options) -> None:
        """Random parameters, queries, keys and values in fp64."""
        causal = options.get("causal", False)
        self.stack, self.layer = build(Case(scheme), causal=causal, heads=2, longest=length)
        generator = torch.Generator().manual_seed(3)
        self.qkv = [
            torch.randn(2, 2, length, 4, generator=generator, dtype=torch.float64) for _ in "qkv"
        ]
        self.positions, self.options = Positions(length, length), options
        self.parameters = [
            part for part in (*self.stack.parameters(), *self.layer.parameters())
            if part.requires_grad
        ]  # fmt: skip

    def inputs(self, q: Tensor, k: Tensor, v: Tensor) -> AttentionInputs:
        """The call of some queries, keys and values."""
        context = self.stack.context(self.positions)
        terms = context.shared + self.layer.terms(
            self.layer.prepare(self.positions), self.positions
        )
        made = AttentionInputs(q, k, v, terms, self.positions, self.stack.plan.scale)
        return replace(made, **self.options)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, backend: str = "blocked") -> Tensor:
        """(B, H, T, D)."""
        return attend(self.inputs(q, k, v), backend)[0]

    def gradients(self, leaves: list[Tensor], backend: str = "blocked") -> list[Tensor]:
        """Output, then gradients of q, k, v and the parameters."""
        leaves = [leaf.detach().requires_grad_() for leaf in leaves]
        out = self.attend(*leaves, backend)
        wanted = [*leaves, *self.parameters]
        found = torch.autograd.grad(weighted(out), wanted, allow_unused=True)
        filled = zip(found, wanted, strict=True)
        return [out.detach(), *(torch.zeros_like(w) if g is None else g for g, w in filled)]


def weighted(out: Tensor) -> Tensor:
    """A scalar that no symmetry of the output leaves unseen."""
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()


def same(found: list[Tensor], expected: list[Tensor], **tolerance) -> None:
    """All of both are equal."""
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **(tolerance or EXACT))


def in_a_thread(work: Callable[[], list[Tensor]]) -> list[Tensor]:
    """What `work` returns in a thread that has kept no storage yet."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


# --- layouts and lengths -------------------------------------------------------------------------


def permuted(x: Tensor) -> Tensor:
    """As fairseq's layers have it: (T, B, H, D) in memory."""
    return x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)


def strided(x: Tensor) -> Tensor:
    """Every second channel of something wider, at an odd offset."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.size(-1) + 1, dtype=x.dtype)
    wide[..., 1::2] = x
    return wide[..., 1::2]


def expanded(x: Tensor) -> Tensor:
    """The first row of the batch for all of them, without a copy."""
    return x[:1].expand_as(x)


@pytest.mark.parametrize("layout", [permuted, strided, expanded], ids=lambda f: f.__name__)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_layouts(scheme: str, layout: Callable[[Tensor], Tensor]) -> None:
    """Strides change nothing."""
    call = Call(scheme)
    odd = [layout(x) for x in call.qkv]
    same(call.gradients(odd), call.gradients([x.contiguous() for x in odd], "reference"))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
def test_one_token(scheme: str, causal: bool) -> None:
    """A sequence of one token, and of two, whole or as a step."""
    for length in (1, 2):
        call = Call(scheme, length, causal=causal)
        same(call.gradients(call.qkv), call.gradients(call.qkv, "reference"))


@pytest.mark.parametrize("scheme", ["shaw", "m4m", "rel_scalar", "none"])
def test_a_lone_query_in_the_middle(scheme: str) -> None:
    """T = 1 that is no step: keys stand on either side."""
    call = Call(scheme, 150)
    call.positions = Positions(1, 150, 70)
    leaves = [call.qkv[0][:, :, 70:71], *call.qkv[1:]]
    same(call.gradients(leaves), call.gradients(leaves, "reference"))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
def test_no_key_is_left(scheme: str, causal: bool) -> None:
    """A padded row gives 0 and no gradient, and never NaN; left padding leaves causal rows none."""
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[0], padding[1, :130] = True, True
    call = Call(scheme, causal=causal, key_padding=padding)
    found = call.gradients(call.qkv)
    assert not found[0][0].any() and not any(part[0].any() for part in found[1:4])
    assert not causal or not found[0][1, :, :130].any()
    same(found, call.gradients(call.qkv, "reference"))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_values_of_another_width(scheme: str) -> None:
    """Dv need not be D, where no vectors are added to values."""
    if scheme == "shaw":
        return
    call = Call(scheme)
    leaves = [*call.qkv[:2], torch.cat([call.qkv[2]] * 3, dim=-1)]
    same(call.gradients(leaves), call.gradients(leaves, "reference"))


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
def test_gradients_of_some(scheme: str) -> None:
    """Whichever of q, k, v and the parameters wants a gradient gets that of all wanting one."""
    call = Call(scheme)
    whole = call.gradients(call.qkv)[1:]
    everything = [x.clone() for x in call.qkv] + call.parameters
    for chosen in range(len(everything)):
        for number, tensor in enumerate(everything):
            tensor.requires_grad_(number == chosen)
        out = call.attend(*everything[:3])
        if not out.requires_grad:
            assert not whole[chosen].any()  # what the scheme does not use in attention
            continue
        (found,) = torch.autograd.grad(weighted(out), everything[chosen])
        torch.testing.assert_close(found, whole[chosen], **EXACT)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_tensor_thrice(scheme: str) -> None:
    """Queries, keys and values may be the same tensor."""
    call = Call(scheme)
    found = []
    for backend in ("blocked", "reference"):
        x = call.qkv[0].clone().requires_grad_()
        found.append(torch.autograd.grad(weighted(call.attend(x, x, x, backend)), x))
    same(*found)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_twice_through_one_graph(scheme: str) -> None:
    """A graph that is kept gives the same bits again; an expanded upstream gradient is one too."""
    call = Call(scheme)
    leaves = [x.clone().requires_grad_() for x in call.qkv]
    out = call.attend(*leaves)
    wanted = [*leaves, *call.parameters]
    first, again = (
        torch.autograd.grad(out.sum(), wanted, retain_graph=True, allow_unused=True) for _ in "ab"
    )
    for one, other in zip(first, again, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    dense = torch.autograd.grad(out, wanted, torch.ones_like(out), allow_unused=True)
    for one, other in zip(first, dense, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


@pytest.mark.parametrize("backend", ["blocked", "triton"])
@pytest.mark.parametrize("scheme", ["shaw", "m4m", "rel_scalar"])
def test_no_second_derivative(scheme: str, backend: str) -> None:
    """A gradient's gradient is refused, not wrong."""
    call = Call(scheme, LENGTH if backend == "blocked" else 20)
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


@pytest.mark.parametrize("scheme", ["shaw", "m4m", "tupe"])
def test_hooks_see_gradients(scheme: str) -> None:
    """Hooks on leaves, and on what autograd saves, are called and may change what they see."""
    call = Call(scheme)
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


@pytest.mark.parametrize("scheme", ["shaw", "m4m"])
def test_what_was_changed_since_is_seen(scheme: str) -> None:
    """Writing into an input between forward and backward pass is an error, as in torch."""
    call = Call(scheme)
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

    def gradients(call: Call, backend: str) -> list[Tensor]:
        dtype = call.parameters[0].dtype
        out = call.attend(*(part.to(dtype) for part in (q, k, v)), backend)
        found = torch.autograd.grad(out, call.parameters, upstream.to(dtype))
        return [part.double() for part in found]

    truth, eager = gradients(exact, "reference"), gradients(call, "reference")
    for one, other, value in zip(gradients(call, "blocked"), eager, truth, strict=True):
        rounding = 4 * torch.finfo(torch.float32).eps * value.abs().max()
        assert (one - value).abs().max() <= 2 * ((other - value).abs().max() + rounding)


# --- modes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", SCHEMES)
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


@pytest.mark.parametrize("scheme", SCHEMES)
def test_autocast(scheme: str) -> None:
    """Neither pass is touched by autocast, whether it is on around one, the other or both."""
    call = Call(scheme)
    for module in (call.stack, call.layer):
        module.float()
    leaves = [x.float() for x in call.qkv]
    plain = call.gradients(leaves)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = call.gradients(leaves)
    products = "transformer_xl", "tupe", "m4m"  # form their terms by products, which it rounds
    tolerance = {"rtol": 0.1, "atol": 0.2} if scheme in products else {"rtol": 1e-4, "atol": 1e-5}
    same(inside, plain, **tolerance)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_memory_that_was_never_written_is_never_read(scheme: str) -> None:
    """With fresh memory full of NaN, all is finite and the same."""
    call = Call(scheme)
    expected = call.gradients(call.qkv)
    torch.use_deterministic_algorithms(True)
    try:
        found = in_a_thread(lambda: call.gradients(call.qkv))
    finally:
        torch.use_deterministic_algorithms(False)
    same(found, expected, rtol=0, atol=0)


# --- threads and interruptions -------------------------------------------------------------------


def test_threads_at_once() -> None:
    """Threads that call at the same time, different shapes and schemes, do not meet."""
    calls = [Call(scheme, length) for scheme, length in zip(SCHEMES, range(193, 220), strict=False)]
    expected = [call.gradients(call.qkv) for call in calls]
    begin = threading.Barrier(len(calls))

    def work(call: Call) -> list[list[Tensor]]:
        begin.wait(timeout=60)
        return [call.gradients(call.qkv) for _ in range(3)]

    with ThreadPoolExecutor(len(calls)) as pool:
        found = list(pool.map(work, calls))
    for several, other in zip(found, expected, strict=True):
        for one in several:
            same(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_an_interruption_leaves_nothing_behind(scheme: str) -> None:
    """After an exception at any point of either pass, the next call gives the same bits."""
    call = Call(scheme)
    expected = call.gradients(call.qkv)
    for after in (1, 5, 23, 60):
        try:
            with Interrupt(after):
                call.gradients(call.qkv)
        except KeyboardInterrupt:
            pass
        same(call.gradients(call.qkv), expected, rtol=0, atol=0)


class Interrupt(torch.overrides.TorchFunctionMode):
    """Raises KeyboardInterrupt at some call of a torch function."""

    def __init__(self, after: int) -> None:
        """Count down from `after`."""
        super().__init__()
        self.left = after

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Call, or interrupt."""
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))
