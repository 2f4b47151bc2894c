"""The fused step is fairseq's Adam, tensor for tensor, and continues its checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from fairseq.optim.adam import Adam
from hypothesis import given, settings
from hypothesis import strategies as st

from relpos_fairseq.optim import adam
from relpos_fairseq.optim.adam import OnePassAdam

SHAPES = ((3, 5), (7,), (1, 2, 4), (130, 33))


def draw(dtype: torch.dtype = torch.float64, transposed: bool = False) -> list[torch.nn.Parameter]:
    """Parameters of some shapes."""
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    if transposed:
        drawn = [part.t().contiguous().t() if part.dim() == 2 else part for part in drawn]
    return [torch.nn.Parameter(part.to(dtype)) for part in drawn]


def feed(parameters: list, seed: int, missing: int | None = None) -> None:
    """Gradients of a step; the one numbered `missing` has none."""
    generator = torch.Generator().manual_seed(seed)
    for number, part in enumerate(parameters):
        drawn = torch.randn(part.shape, generator=generator, dtype=torch.float64)
        part.grad = None if number == missing else drawn.to(part.dtype)


@settings(deadline=None, max_examples=25)
@given(
    lr=st.floats(1e-6, 0.1),
    betas=st.tuples(st.floats(0.0, 0.99), st.floats(0.5, 0.999)),
    eps=st.floats(1e-9, 0.1),
    decay=st.sampled_from([0.0, 0.01]),
    missing=st.sampled_from([None, 0, 2]),
)
def test_equals_fairseqs(lr: float, betas: tuple, eps: float, decay: float, missing: int) -> None:
    """Parameters and moments after steps in which one parameter has no gradient at times."""
    ours, theirs = draw(), draw()
    flags = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": decay}
    one, other = OnePassAdam(ours, **flags), Adam(theirs, **flags)
    for number in range(4):
        for parameters in (ours, theirs):
            feed(parameters, number, missing if number == 1 else None)
        one.step()
        other.step()
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert one.state[a]["step"] == other.state[b]["step"]
        assert type(one.state[a]["step"]) is int
        for name in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(one.state[a][name], other.state[b][name])


@pytest.mark.parametrize("transposed", [False, True])
def test_checkpoints_go_both_ways(transposed: bool) -> None:
    """Two steps of each continue the other's state as their own, whatever the strides."""
    results = []
    for ways in ("oo", "ff", "of", "fo"):
        parameters = draw(torch.float32, transposed)
        state = None
        for number, way in enumerate(ways):
            optimizer = (OnePassAdam if way == "o" else Adam)(parameters, lr=0.01, weight_decay=0.1)
            if state is not None:
                optimizer.load_state_dict(state)
            feed(parameters, number)
            optimizer.step()
            state = copy.deepcopy(optimizer.state_dict())
        results.append([part.detach() for part in parameters])
    for other in results[1:]:
        torch.testing.assert_close(results[0], other)


@pytest.mark.parametrize("flags", [{"amsgrad": True}, {"dtype": torch.bfloat16}])
def test_the_rest_is_fairseqs(flags: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Amsgrad and half precision take fairseq's own step, bit by bit."""
    monkeypatch.setattr(adam, "_fused_step", None)
    dtype = flags.get("dtype", torch.float32)
    ours, theirs = draw(dtype), draw(dtype)
    amsgrad = flags.get("amsgrad", False)
    one = OnePassAdam(ours, lr=0.01, amsgrad=amsgrad)
    other = Adam(theirs, lr=0.01, amsgrad=amsgrad)
    for parameters in (ours, theirs):
        feed(parameters, 0)
    one.step()
    other.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_closure_and_repeatability() -> None:
    """The closure's loss is returned; the same steps give the same bits."""
    runs = []
    for _ in range(2):
        parameters = draw(torch.float32)
        optimizer = OnePassAdam(parameters, lr=0.01)
        feed(parameters, 3)
        assert optimizer.step(lambda: 5.0) == 5.0
        runs.append(parameters)
    torch.testing.assert_close(*runs, rtol=0, atol=0)
