"""What callers do beside calling attention changes nothing: layouts, modes, threads, gradients of some."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from helpers import ROOT
from helpers.attention_calls import Call, Interrupt, expanded, in_a_thread, permuted, same, strided, turned
from helpers.scheme_calls import as_leaves, weighted
from helpers.shaped_calls import EXACT, Shape, compare, make_inputs, results
from relpos_fairseq.attention import attend, blocked, native, triton
from relpos_fairseq.core.positions import Positions

SCHEMES = ("none", "shaw", "m2", "m3", "m4", "m4m", "tupe", "rel_scalar", "transformer_xl")
RICH = ("m3+rel_scalar+shaw", "transformer_xl", "tupe")  # together every kind of operand
BITS = {"rtol": 0, "atol": 0}
OF_TORCH = ("0.query_offset", "0.query_vectors")  # meet one another before the kernel
needs_compiler = pytest.mark.skipif(native.build.problem() is not None, reason="no C compiler")
NATIVE = pytest.param("native", marks=needs_compiler)
BACKENDS = pytest.mark.parametrize("backend", ["blocked", NATIVE])
TYPES = pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        pytest.param("blocked", torch.float64, id="blocked"),
        pytest.param("native", torch.float64, id="native-fp64", marks=needs_compiler),
        pytest.param("native", torch.float32, id="native-fp32", marks=needs_compiler),
    ],
)
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])


@pytest.fixture(autouse=True)
def _several_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked, "slice_rows", lambda _: 48)


# --- what is given -------------------------------------------------------------------------------


@TYPES
@pytest.mark.parametrize("layout", [permuted, strided, expanded, turned], ids=lambda f: f.__name__)
@pytest.mark.parametrize("scheme", ["none", "shaw", "m3", "rope+m4", *RICH])
def test_layouts(scheme: str, layout: Callable[[Tensor], Tensor], backend: str, dtype: torch.dtype) -> None:
    """Strides change nothing, and no copy is written to."""
    inputs, leaves = as_leaves(make_inputs(scheme, Shape(109, after=4)), dtype)
    names = [n for n in ("q", "k", "v", "content_q", "content_k") if n in leaves]
    odd = [replace(inputs, **{name: layout(leaves[name]) for name in names}) for _ in range(2)]
    found, expected = (results(x, leaves, b) for x, b in zip(odd, (backend, "reference"), strict=True))
    for name, right in expected.items():
        rough = EXACT if dtype == torch.float64 else {"rtol": 0, "atol": 1e-4 * float(right.abs().max()) + 1e-6}
        torch.testing.assert_close(found[name], right, **rough)


@BACKENDS
@pytest.mark.parametrize("scheme", RICH)
def test_few_tokens(scheme: str, backend: str) -> None:
    """A sequence of one token and of two, whole or as a step; T = 1 that is no step."""
    for length in (1, 2):
        for causal in (False, True):
            call = Call(scheme, length, causal=causal)
            same(call.gradients(call.qkv, backend), call.gradients(call.qkv, "reference"))
    call = Call(scheme, 150)
    call.positions = Positions(1, 150, 70)
    leaves = [call.qkv[0][:, :, 70:71], *call.qkv[1:]]
    same(call.gradients(leaves, backend), call.gradients(leaves, "reference"))


@TYPES
@CAUSAL
@pytest.mark.parametrize("scheme", ["none", "shaw", "m2", "m3", "m4", "m4m", "rel_scalar", "rope+m4", *RICH])
def test_rows_without_keys(scheme: str, causal: bool, backend: str, dtype: torch.dtype) -> None:
    """Give 0, no gradient and never NaN, beside rows that have keys; left padding leaves causal rows none."""
    padding = torch.zeros(3, 105, dtype=torch.bool)
    padding[0], padding[1, :98] = True, True
    inputs = replace(make_inputs(scheme, Shape(103, after=2, batch=3, causal=causal)), key_padding=padding)
    found = compare(inputs, dtype, backend)
    assert not any(found[name][0].any() for name in ("output", *"qkv"))
    assert not causal or not found["output"][1, :, :98].any()
    assert all(x.isfinite().all() for x in found.values())


@BACKENDS
def test_one_tensor_thrice(backend: str) -> None:
    """Queries, keys and values may be the same tensor."""
    call = Call("shaw")
    x = call.qkv[0].clone().requires_grad_()
    same(*(torch.autograd.grad(weighted(call.attend(x, x, x, one)), x) for one in (backend, "reference")))


# --- gradients -----------------------------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("scheme", ["shaw", "m3", "m2+m4m+shaw", "tupe", "rope+m4", *RICH[:2]])
def test_some_gradients(scheme: str, backend: str) -> None:
    """Any one operand may want a gradient alone, and it is that of all wanting one; the native kernel's to the bit."""
    near = BITS if backend == "native" else EXACT
    inputs, leaves = as_leaves(make_inputs(scheme, Shape(101, after=490, heads=1)), torch.float64)
    whole = results(inputs, leaves, backend)
    for name in leaves:
        for other, leaf in leaves.items():
            leaf.requires_grad_(other == name)
        alone = results(inputs, {name: leaves[name]}, backend)
        torch.testing.assert_close(alone[name], whole[name], **near)
    with torch.no_grad():
        torch.testing.assert_close(attend(inputs, backend)[0], whole["output"], **near)


@BACKENDS
@pytest.mark.parametrize("scheme", RICH)
def test_twice_through_one_graph(scheme: str, backend: str) -> None:
    """A graph that is kept gives the same bits again; an expanded upstream gradient is one too."""
    call = Call(scheme)
    leaves = [x.clone().requires_grad_() for x in call.qkv]
    out = call.attend(*leaves, backend)
    wanted = [*leaves, *call.parameters]
    first, again = (torch.autograd.grad(out.sum(), wanted, retain_graph=True, materialize_grads=True) for _ in "ab")
    dense = torch.autograd.grad(out, wanted, torch.ones_like(out), materialize_grads=True)
    for others in (again, dense):
        assert all(map(torch.equal, first, others))


@pytest.mark.parametrize(
    ("scheme", "backend"),
    [
        *((scheme, "blocked") for scheme in ("shaw", "m3", "rel_scalar")),
        pytest.param("none", "native", marks=needs_compiler),
        ("m4m", "triton"),
    ],
)
def test_no_second_derivative(scheme: str, backend: str) -> None:
    """A gradient's gradient is refused, not wrong."""
    call = Call(scheme, 20 if backend == "triton" else 200)
    if backend == "triton" and not triton.interpreted():
        pytest.skip("needs the interpreter (TRITON_INTERPRET=1)")
    q = call.qkv[0].clone().requires_grad_()
    out = call.attend(q, *call.qkv[1:], backend)
    (first,) = torch.autograd.grad(weighted(out), q, create_graph=True)
    torch.testing.assert_close(first, call.gradients(call.qkv, backend)[1], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match=r"no second derivative.*reference"):
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


@BACKENDS
@pytest.mark.parametrize("scheme", ["shaw", "m4m"])
def test_what_was_changed_since_is_seen(scheme: str, backend: str) -> None:
    """Writing into an input between forward and backward pass is an error, as in torch."""
    call = Call(scheme)
    k = call.qkv[1].clone()
    out = call.attend(call.qkv[0].clone().requires_grad_(), k, call.qkv[2], backend)
    k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


# --- modes, threads and interruptions ------------------------------------------------------------


@BACKENDS
@pytest.mark.parametrize("scheme", [*SCHEMES, RICH[0]])
def test_inference_mode_and_back(scheme: str, backend: str) -> None:
    """Evaluation in inference mode, then training, then evaluation, in one thread."""
    call = Call(scheme)
    expected = call.gradients(call.qkv, "reference")

    def work() -> list[Tensor]:
        found = []
        for _ in range(2):
            for mode in (torch.inference_mode, torch.no_grad):
                with mode():
                    found.append(call.attend(*call.qkv, backend))
            found += call.gradients(call.qkv, backend)
        return [part.clone() for part in found]

    same(in_a_thread(work), 2 * [expected[0], expected[0], *expected])


@pytest.mark.parametrize(
    ("scheme", "backend"),
    [
        *((scheme, "blocked") for scheme in ("m4", "shaw", "m3", "rel_scalar")),
        *(pytest.param(scheme, "native", marks=needs_compiler) for scheme in SCHEMES),
    ],
)
def test_autocast(scheme: str, backend: str) -> None:
    """Neither pass is touched by autocast, whether it is on around one, the other or both."""
    inputs, leaves = as_leaves(make_inputs(scheme, Shape(120, after=3)), torch.float32)
    plain = results(inputs, leaves, backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = results(inputs, leaves, backend)
    for name, right in plain.items():
        near = BITS if backend == "native" else {"rtol": 1e-4, "atol": 1e-5}
        if scheme == "transformer_xl" and name in OF_TORCH:  # in torch, whose backward pass autocast does round
            near = {"rtol": 0, "atol": 0.05 * float(right.abs().max())}
        torch.testing.assert_close(inside[name], right, **near)


@BACKENDS
@pytest.mark.parametrize("scheme", ["shaw", "m4m", *RICH])
def test_nothing_is_left_behind(scheme: str, backend: str) -> None:
    """After an exception in either pass, or a call full of NaN, the next gives the same bits."""
    call = Call(scheme, 100)
    expected = call.gradients(call.qkv, backend)
    for after in (1, 5, 23, 60, 150):
        try:
            with Interrupt(after):
                call.gradients(call.qkv, backend)
        except KeyboardInterrupt:
            pass
        same(call.gradients(call.qkv, backend), expected, **BITS)
    call.gradients([x * float("nan") for x in call.qkv], backend)
    same(call.gradients(call.qkv, backend), expected, **BITS)


@BACKENDS
def test_threads_at_once(backend: str) -> None:
    """Threads that call at the same time, different shapes and schemes, do not meet."""
    calls = [Call(scheme, length) for length, scheme in enumerate(SCHEMES, 93)]
    expected = [call.gradients(call.qkv, backend) for call in calls]
    begin = threading.Barrier(len(calls))

    def work(call: Call) -> list[Tensor]:
        begin.wait(timeout=60)
        return call.gradients(call.qkv, backend)

    with ThreadPoolExecutor(len(calls)) as pool:
        for one, other in zip(pool.map(work, calls), expected, strict=True):
            same(one, other, **BITS)


THREADS_OF_REQUESTS = """
import sys, threading
sys.modules['fairseq'] = None
import torch
from helpers.shaped_calls import Shape, make_inputs, results
from helpers.scheme_calls import as_leaves

def held():
    return int(open('/proc/self/statm').read().split()[1]) * 4096 >> 20

def request():
    results(*as_leaves(make_inputs("shaw", Shape(130, heads=3, dim=16, clip=16)), torch.float32), "native")

def serve(count):
    for _ in range(count):
        thread = threading.Thread(target=request)
        thread.start()
        thread.join()
    return held()

print(serve(4), serve(60))
"""
FORKED = """
import multiprocessing, sys, torch
torch.set_num_threads(2)
from helpers.shaped_calls import Shape, make_inputs, results
from helpers.scheme_calls import as_leaves

def bits():
    inputs, leaves = as_leaves(make_inputs("shaw", Shape(131, after=70)), torch.float32)
    found = results(inputs, leaves, "native")
    return torch.cat([x.detach().flatten() for x in found.values()]).numpy().tobytes()

def work(queue):
    torch.set_num_threads(1)
    queue.put(bits())

before = bits()
context = multiprocessing.get_context("fork")
queue = context.Queue()
children = [context.Process(target=work, args=(queue,)) for _ in range(2)]
for child in children:
    child.start()
found = [queue.get(timeout=60) for _ in children]
for child in children:
    child.join(60)
ok = all(one == before for one in found) and bits() == before
print("alike" if ok else "different", [child.exitcode for child in children])
"""


def program(code: str) -> str:
    """The last line that a program of two threads prints; waiting threads take no time from others."""
    path = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


@needs_compiler
def test_threads_that_end_leave_nothing() -> None:
    """A server makes a thread a request, and each has buffers of its own."""
    before, after = map(int, program(THREADS_OF_REQUESTS).split())
    assert after - before < 60  # MB; 2 a thread of OpenMP's, were they kept


@needs_compiler
def test_forks_of_a_program_with_threads() -> None:
    """OpenMP has one thread in a fork; for a second, torch's own operations wait for ever too."""
    assert program(FORKED) == "alike [0, 0]"
