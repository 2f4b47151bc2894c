"""Candidates of a vocabulary are those that torch finds among all log-probabilities."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.attention_calls import threads
from relpos_fairseq.attention.native import build
from relpos_fairseq.attention.native.candidates import candidates, serves

pytestmark = pytest.mark.skipif(build.problem() is not None, reason="no C compiler")


def expected(logits, first, best, temperature):
    """Log-probabilities and units of the first units and of the best others, by torch in fp64."""
    found = (logits.double() / temperature).log_softmax(-1)
    values, units = found[:, first:].topk(best)
    named = torch.arange(first).expand(len(logits), first)
    return torch.cat([found[:, :first], values], 1), torch.cat([named, units + first], 1)


@st.composite
def calls(draw):
    first, best = draw(st.integers(0, 20)), draw(st.integers(1, 40))
    vocabulary = draw(st.integers(first + best, 1300))
    rows, stride = draw(st.integers(0, 9)), draw(st.sampled_from([1, 1, 2]))
    torch.manual_seed(draw(st.integers(0, 99)))
    spread = draw(st.sampled_from([0.1, 3.0, 60.0]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    logits = (torch.randn(rows * stride, vocabulary + 5, dtype=dtype) * spread)[::stride, 2 : 2 + vocabulary]
    order = draw(st.sampled_from(["drawn", "rising", "falling"]))
    if order != "drawn":
        logits = logits.sort(-1, descending=order == "falling")[0]
    return logits, first, best, draw(st.sampled_from([1.0, 0.3, 2.5]))


@settings(deadline=None)
@given(calls())
def test_of_all_log_probabilities(call):
    logits, first, best, temperature = call
    assert serves(logits)
    before = logits.clone()
    found, units = candidates(logits, first, best, temperature)
    values, chosen = expected(logits, first, best, temperature)
    exact = {"rtol": 1e-5, "atol": 1e-4} if logits.dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-10}
    torch.testing.assert_close(found.double(), values, **exact)
    assert torch.equal(units, chosen) and torch.equal(logits, before)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 8), st.integers(0, 3))
def test_equal_logits_come_in_the_vocabularys_order(more, best, first):
    logits = torch.zeros(2, first + best + more)
    logits[1, ::3] = 1
    found, units = candidates(logits, first, best)
    assert units[0].tolist() == [*range(first + best)]
    chosen = [unit for unit in range(first, logits.size(1)) if unit % 3 == 0][:best]
    assert units[1, first : first + len(chosen)].tolist() == chosen
    torch.testing.assert_close(found.double(), expected(logits, first, best, 1.0)[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("place", [0, 5, 700, 999])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number(place: int, value: float) -> None:
    """As torch's log-softmax: a row with NaN or inf has no probabilities, one with -inf has the others'."""
    logits = torch.randn(3, 1000)
    logits[1, place] = value
    found, units = candidates(logits, 4, 8)
    values, _ = expected(logits, 4, 8, 1.0)
    torch.testing.assert_close(found.double()[[0, 2]], values[[0, 2]], rtol=0, atol=1e-5)
    assert found[1].isnan().all() == (value != -math.inf)
    assert ((units >= 0) & (units < 1000)).all()
    if value == -math.inf:
        torch.testing.assert_close(found[1].double(), values[1], rtol=0, atol=1e-5)
    assert candidates(torch.full((1, 50), -math.inf), 4, 8)[0].isnan().all()  # as torch's


def test_threads_find_the_same() -> None:
    logits, found = torch.randn(64, 9000), []
    for number in (1, 4):
        with threads(number):
            found.append(candidates(logits, 4, 10))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize(("first", "best"), [(4, 7), (0, 0), (-1, 3), (11, 1)])
def test_more_than_there_are(first: int, best: int) -> None:
    with pytest.raises(ValueError, match=rf"{first} first and {best} best candidates of a vocabulary of 10 units"):
        candidates(torch.zeros(2, 10), first, best)


def test_what_the_kernel_does_not_read() -> None:
    assert not serves(torch.zeros(2, 10, dtype=torch.bfloat16))
    assert not serves(torch.zeros(2, 10, requires_grad=True))
    assert not serves(torch.zeros(10, 2).T)
    assert not serves(torch.zeros(2, 10, device="meta"))
