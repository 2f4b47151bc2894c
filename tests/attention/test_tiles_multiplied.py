"""Terms that multiply the content, and vectors over all distances, tile by tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention.test_tiles import MASKS, compare, make_call
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import Case
from relpos_fairseq.attention import attend, banded, tiles, toeplitz
from relpos_fairseq.attention.tiles import forward, plan, split, wide


@pytest.fixture(autouse=True)
def _short_calls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LEAST_ROWS", 0)


NAMES = ("m3", "m4m", "m2+m3", "m2+m4m", "m3+shaw", "m4m+rel_scalar", "shaw", "m4", "deberta")


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_the_reference(data: st.DataObject) -> None:
    """Tables of every head or shared, clipped within a strip, within a call and beyond it."""
    name = data.draw(st.sampled_from(NAMES))
    clip = data.draw(st.sampled_from([1, 2, 3, 9, 16, 40, 70]))
    flags = {"position_clip_distance": str(clip)}
    if "+" not in name:
        flags["position_share"] = data.draw(st.sampled_from(["none", "heads"]))
    call = make_call(
        Case(name, flags), data.draw(st.integers(1, 70)), data.draw(st.integers(0, 40)),
        data.draw(st.booleans()), data.draw(st.sampled_from(MASKS)),
    )  # fmt: skip
    rows = data.draw(st.sampled_from([1, 2, 16, 33, 128]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiles.function, "tile_rows", lambda _: rows)
        patch.setattr(plan, "WIDEST", 1000)
        patch.setitem(forward.ELEMENTS, "cpu", data.draw(st.sampled_from([1, 2000, 1 << 20])))
        patch.setattr(split, "STRIP", data.draw(st.sampled_from([2, 7, 32])))
        patch.setattr(wide, "CHUNK", data.draw(st.sampled_from([1, 7, 64])))
        patch.setattr(banded, "BLOCK", data.draw(st.sampled_from([1, 100, 100_000])))
        compare(*call)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 9), keys=st.integers(1, 12), span=st.integers(1, 8),
    first=st.integers(-12, 20), shared=st.booleans(),
)  # fmt: skip
def test_a_band_is_its_scalar_loop(
    rows: int, keys: int, span: int, first: int, shared: bool
) -> None:
    """Keys that do not exist count as 0, wherever the band stands."""
    generator = torch.Generator().manual_seed(rows)
    q, k = (torch.randn(1, 2, n, 3, generator=generator).double() for n in (rows, keys))
    w = torch.randn(1 if shared else 2, span, 3, generator=generator).double()
    found = toeplitz.trilinear_band(q, k, w, first)
    for h in range(2):
        for t in range(rows):
            for m in range(span):
                j = t + m - (rows - 1) + first
                real = 0 <= j < keys
                wanted = (q[0, h, t] * k[0, h, j] * w[h % len(w), m]).sum() if real else 0.0
                assert abs(found[0, h, t, m] - wanted) < 1e-12


def test_a_band_has_one_derivative() -> None:
    """A second one is an error, not a constant."""
    q, k, w = (torch.randn(1, 1, 4, 2, requires_grad=True) for _ in range(3))
    band = toeplitz.trilinear_band(q, k, w[0], 3)
    (dq,) = torch.autograd.grad(band.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        dq.sum().backward()


@pytest.mark.parametrize("name", ["m3", "m4m", "m4"])
def test_long_tables_are_served(name: str) -> None:
    """Unclipped products go the general way, unclipped sums stay with the tiles; both are right."""
    call = make_call(Case(name, {"position_clip_distance": "0"}), 120, 0, False, "none", 1)
    assert bool(tiles.refusal(call[0])) == (name != "m4")
    compare(*call)


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("name", ["m3", "m4m", "deberta", "transformer_xl"])
def test_bf16_is_rounded_once(name: str, causal: bool) -> None:
    """Products of three in bf16 are as near to fp64 as fp32 products of bf16 inputs."""
    inputs, *_ = make_call(Case(name), 130, 9, causal, "padding")
    low = {part: getattr(inputs, part).bfloat16() for part in ("q", "k", "v")}
    exact = {part: tensor.double() for part, tensor in low.items()}
    found = attend(replace(inputs, **low), "blocked")[0]
    wanted = attend(replace(inputs, **exact), "reference")[0]
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), wanted, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("name", ["m3", "m4m", "deberta"])
def test_used_storage_and_repetition_change_nothing(name: str) -> None:
    """Kept storage full of NaN, and a second run, give the same bits."""
    inputs, parameters, remake = make_call(Case(name), 70, 5, False, "padding")
    results = []
    for _ in range(2):
        for cells in vars(tiles.geometry._STORAGE).get("cells", {}).values():
            cells.fill_(float("nan"))
        leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
        out = attend(remake(*leaves), "blocked")[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), [*leaves, *parameters])])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other) and not one.isnan().any()
