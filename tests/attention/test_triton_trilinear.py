"""The trilinear band in Triton equals the one in plain torch, in values and gradients."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from relpos_fairseq.attention import relative_shift

pytest.importorskip("triton", reason="triton is not installed")
from relpos_fairseq.attention.triton import trilinear

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def run(band, q: Tensor, k: Tensor, w: Tensor, first: int) -> tuple[Tensor, ...]:
    """X and the gradients of q, k and w."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, w)]
    out = band(*leaves, first)
    upstream = draw(*out.shape, dtype=torch.bfloat16).to(out.dtype)
    return out.detach(), *torch.autograd.grad(out, leaves, upstream)


def compare(q: Tensor, k: Tensor, w: Tensor, first: int, rounding: float) -> None:
    """Against fp64, to so many roundings of each result's size."""
    found = run(trilinear.trilinear_band, q, k, w, first)
    exact = run(relative_shift.trilinear_band, q.double(), k.double(), w.double(), first)
    types = (torch.promote_types(q.dtype, torch.float32), q.dtype, k.dtype, w.dtype)
    for one, other, dtype in zip(found, exact, types, strict=True):
        assert one.dtype == dtype
        limit = rounding * torch.finfo(dtype).eps
        torch.testing.assert_close(one.double(), other, rtol=limit, atol=limit * float(other.abs().max()))


@settings(max_examples=15, deadline=None)
@given(
    rows=st.integers(1, 70),
    more=st.integers(0, 40),
    span=st.integers(1, 21),
    start=st.integers(-45, 45),
    depth=st.sampled_from([1, 4, 24, 64]),
    shared=st.booleans(),
)
def test_equals_torch(rows: int, more: int, span: int, start: int, depth: int, shared: bool) -> None:
    """Any lengths, spans and first keys, also such that some or all keys do not exist."""
    q, k = draw(1, 2, rows, depth), draw(1, 2, rows + more, depth)
    compare(q, k, draw(1 if shared else 2, span, depth), start + rows - 1, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("depth", [64, 80])
def test_types_and_depths(dtype: torch.dtype, depth: int) -> None:
    """Sums are fp32 at least, whatever the inputs; heads wider than 64 take smaller tiles."""
    q, k, w = (draw(2, 2, 40, depth, dtype=dtype), draw(2, 2, 50, depth, dtype=dtype), draw(1, 9, depth))
    compare(q, k, w.to(dtype), 36, 24)


def test_long_rows_are_summed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of w from many programs is one sum, with the same bits every time."""
    monkeypatch.setattr(trilinear, "CHUNK", 128)
    q, k, w = draw(1, 2, 200, 16), draw(1, 2, 200, 16), draw(2, 3, 16)
    compare(q, k, w, 198, 32)
    first, again = (run(trilinear.trilinear_band, q, k, w, 198) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))


def test_views_are_taken_as_they_read() -> None:
    """Transposed inputs are no contiguous ones."""
    q, k = (draw(1, 20, 2, 16).transpose(1, 2) for _ in range(2))
    compare(q, k, draw(5, 1, 16).transpose(0, 1), 17, 16)


@pytest.mark.parametrize(
    ("k", "w", "named"), [((1, 2, 9, 8), (1, 3, 16), "q and k must be"), ((1, 2, 9, 16), (3, 3, 16), "w must be")]
)
def test_misfits_are_refused(k: tuple, w: tuple, named: str) -> None:
    """Shapes that do not fit are named."""
    with pytest.raises(ValueError, match=named):
        trilinear.trilinear_band(draw(1, 2, 9, 16), draw(*k), draw(*w), 0)
