"""Bits of the native kernel: calls that follow one another, threads, numbers that are none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from helpers.attention_calls import in_a_thread, same, threads
from helpers.scheme_calls import as_leaves
from helpers.shaped_calls import EXACT, Shape, make_inputs, results
from relpos_fairseq.attention import AttentionInputs, attend, native
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.core.relations import Clipped
from relpos_fairseq.core.terms import PositionTerms

pytestmark = pytest.mark.skipif(native.build.problem() is not None, reason="no C compiler")
SCHEMES = ("none", "shaw", "m2", "m3", "m4", "m4m", "tupe", "rel_scalar", "transformer_xl")
BITS = {"rtol": 0, "atol": 0}
OF_TORCH = ("0.query_offset", "0.query_vectors")  # meet one another before the kernel


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_calls_have_the_same_bits(scheme: str, dtype: torch.dtype) -> None:
    """Again, after a call of other sizes, in a new thread, and row by row of the batch."""
    inputs, leaves = as_leaves(make_inputs(scheme, Shape(131, after=490, batch=5, heads=2)), dtype)
    first = results(inputs, leaves, "native")
    other, others = as_leaves(make_inputs("m3", Shape(190, before=9, clip=0, dim=6)), dtype)
    results(other, others, "native")
    again = results(inputs, leaves, "native")
    elsewhere = in_a_thread(lambda: list(results(inputs, leaves, "native").values()))
    same(list(again.values()), list(first.values()), **BITS)
    same(elsewhere, list(first.values()), **BITS)
    with torch.no_grad():
        for row in range(5):
            parts = {n: getattr(inputs, n)[row : row + 1] for n in "qkv"}
            out, _ = attend(replace(inputs, **parts), "native")
            torch.testing.assert_close(out, first["output"][row : row + 1], **BITS)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_threads_change_no_bit(scheme: str) -> None:
    """Heads, or parts of them where they are few, are taken by any number of threads."""
    for batch, heads in ((1, 1), (5, 2)):
        shape = Shape(200, after=3, batch=batch, heads=heads, masks=("right",) * (batch > 1))
        inputs, leaves = as_leaves(make_inputs(scheme, shape), torch.float32)
        inputs = replace(inputs, dropout=0.2)
        found = []
        for number in (1, 2, 3):
            torch.manual_seed(1)
            with threads(number):
                found.append(results(inputs, leaves, "native"))
        for other in found[1:]:
            for name, right in found[0].items():
                # Torch's own product of a table with v has other bits with more threads.
                rounded = scheme == "transformer_xl" and name in OF_TORCH
                rough = {"rtol": 1e-4, "atol": 1e-4} if rounded else BITS
                torch.testing.assert_close(other[name], right, **rough, msg=lambda m, name=name: f"{name}: {m}")


def test_small_numbers_are_the_callers_own() -> None:
    """The kernel takes numbers without a full mantissa for 0; its caller's remain."""
    inputs, leaves = as_leaves(make_inputs("alibi", Shape(300)), torch.float32)
    small = torch.full((100,), 1e-40)
    before = small * 0.5
    assert before.any()  # else this machine has none
    results(inputs, leaves, "native")
    torch.testing.assert_close(small * 0.5, before, **BITS)
    assert float("5e-324") * 1.0 > 0.0


# --- numbers that are none -----------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=["nan", "inf"])
@pytest.mark.parametrize("where", ["q", "k", "v"])
@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("scheme", ["none", "shaw", "m2", "m3", "m4m", "tupe"])
def test_what_is_no_number_stays_in_its_head(scheme: str, causal: bool, where: str, bad: float) -> None:
    """Rows that meet it are no numbers; rows that do not, and other heads, are as they were."""
    reset = "off" if scheme == "tupe" else None
    shape = Shape(200, batch=2, heads=2, causal=causal, reset=reset)
    inputs, leaves = as_leaves(make_inputs(scheme, shape), torch.float64)
    clean = results(inputs, leaves, "native")
    with torch.no_grad():
        leaves[where][1, 0, 110, 1] = bad
    found, expected = (results(inputs, leaves, backend) for backend in ("native", "reference"))
    out, right = found["output"], expected["output"]
    met = torch.arange(200) == 110 if where == "q" else torch.arange(200) >= 110 * causal
    if bad != bad:
        assert out[1, 0, met].isnan().any(-1).all()
    else:
        assert bool(out[1, 0].isfinite().all()) == bool(right[1, 0].isfinite().all())
    # Numbers where the reference has numbers, the same ones.
    there = right.isfinite()
    torch.testing.assert_close(out[there], right[there], **EXACT)
    if causal or where == "q":
        torch.testing.assert_close(out[1, 0, :96], clean["output"][1, 0, :96], **BITS)
    for name in "qkv":
        for row, head in ((0, 0), (0, 1), (1, 1)):
            torch.testing.assert_close(found[name][row, head], clean[name][row, head], **BITS)
    with torch.no_grad():
        leaves[where][1, 0, 110, 1] = 0.5
    fresh = results(inputs, leaves, "native")
    assert all(x.isfinite().all() for x in fresh.values())


@pytest.mark.parametrize("name", ["m4", "m4m"])
def test_one_table_of_queries_and_keys(name: str) -> None:
    """The compiled kernel adds what both sides give to its gradient."""
    table = torch.randn(1, 9, 8).double().requires_grad_()
    term = PositionTerms(Clipped(4, 4), query_vectors=table, key_vectors=table, product=name == "m4m")
    q, k, v = (torch.randn(2, 3, 30, 8).double() for _ in range(3))
    inputs = AttentionInputs(q, k, v, (term,), Positions(30, 30), 0.5)
    found = (
        torch.autograd.grad(attend(inputs, backend)[0].square().sum(), table)[0] for backend in ("native", "reference")
    )
    torch.testing.assert_close(*found, **EXACT)
