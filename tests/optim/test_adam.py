"""The fused step is fairseq's Adam, tensor for tensor, and continues its checkpoints."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.optim.adam import Adam
from fairseq.optim.fp16_optimizer import FP16Optimizer
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from cases import ENCODERS
from helpers.roberta import small_roberta
from relpos_fairseq.core.scheme import mark_schemes
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.optim import adam
from relpos_fairseq.optim.adam import OnePassAdam
from relpos_fairseq.schemes.segments import SegmentInput

ABSOLUTE = {"learned", "sinusoidal", "sentence", "abs_scalar", "tupe", "tupe_a", "tupe_released"}
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["one pass", "fairseq's step"])
def test_position_schemes_have_a_learning_rate_of_their_own(dtype: torch.dtype) -> None:
    """Tables of layers, not absolute positions: as by so many times the rate."""
    model = small_roberta(position_scheme="learned+m4").to(dtype)
    mark_schemes(model)
    parameters = dict(model.named_parameters())
    apart = {name for name in parameters if ".self_attn.position." in name}
    assert apart and any(".shared." in name for name in parameters)
    before = {name: part.detach().clone() for name, part in parameters.items()}
    found = []
    for scale in (1, 20):
        for name, part in parameters.items():
            part.data.copy_(before[name])
            part.grad = torch.ones_like(part)
        cfg = adam.RelPosAdamConfig(lr=[0.5], adam_betas="(0.9, 0.98)", adam_eps=1e-3, position_lr_scale=scale)
        optimizer = adam.RelPosAdam(cfg, list(parameters.values()))
        if scale != 1:  # what another training has saved
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.set_lr(0.01)
        optimizer.step()
        assert optimizer.get_lr() == 0.01
        found.append({name: part.detach() - before[name] for name, part in parameters.items()})
    for name, change in found[0].items():
        factor = 20 if name in apart else 1
        torch.testing.assert_close(found[1][name], factor * change, rtol=0.02, atol=0.02 if factor == 20 else 1e-6)


@pytest.mark.parametrize("kind", ["bf16", "fp16_no_flatten_grads"])
def test_copies_in_fp32_have_that_rate(kind: str) -> None:
    """What the optimizer is given by --bf16, and by --fp16 with that option."""
    model = small_roberta(position_scheme="learned+m4").half()
    mark_schemes(model)
    parameters = list(model.parameters())
    asked = adam.RelPosAdamConfig(_name="relpos_adam", lr=[0.5], position_lr_scale=20)
    cfg: Any = OmegaConf.structured(FairseqConfig)
    cfg.optimizer = OmegaConf.structured(asked)
    setattr(cfg.common, kind, True)
    optimizer = FP16Optimizer.build_optimizer(cfg, parameters)
    optimizer.set_lr(0.01)
    for own, copied in zip(parameters, optimizer.fp32_params, strict=True):
        [lr] = [group["lr"] for group in optimizer.param_groups if any(copied is one for one in group["params"])]
        assert lr == pytest.approx(0.2 if hasattr(own, "takes_position_lr") else 0.01)


def made(scale: float) -> adam.RelPosAdam:
    """An optimizer of two parameters, one of a scheme; the scale is of that one's rate."""
    parameters = draw()[:2]
    parameters[1].takes_position_lr = True
    cfg = adam.RelPosAdamConfig(lr=[0.5], adam_betas="(0.9, 0.98)", position_lr_scale=scale)
    return adam.RelPosAdam(cfg, parameters)


@pytest.mark.parametrize(("overrides", "lr"), [(None, 0.01), ({"lr": 0.02}, 0.02)])
def test_a_resume_has_the_scale_that_is_given(overrides: dict | None, lr: float) -> None:
    """Before a schedule sets a rate: reduce_lr_on_plateau sets none."""
    first, then = made(20), made(10)
    first.set_lr(0.01)
    then.load_state_dict(copy.deepcopy(first.state_dict()), overrides)
    assert [group["lr"] for group in then.param_groups] == pytest.approx([lr, 10 * lr])


@pytest.mark.parametrize("scales", [(20, 1), (1, 20)])
def test_a_resume_without_the_scale_or_with_a_new_one_is_refused(scales: tuple) -> None:
    """The states of two groups and of one are in different orders."""
    first, then = map(made, scales)
    with pytest.raises(UserError, match="--position-lr-scale.*--reset-optimizer"):
        then.load_state_dict(first.state_dict())


@pytest.mark.parametrize("segments", ["none", "head", "input"])
@pytest.mark.parametrize("scheme", ENCODERS)
def test_every_scheme_has_that_rate(scheme: str, segments: str) -> None:
    """All of its parameters, those that layers share too, and no others: no absolute ones, no segments of the input.

    None that has learned is taken for one that is left at its start.
    """
    model = small_roberta(position_scheme=scheme, segment_encoding=segments)
    parameters = dict(model.named_parameters())
    own = {name for name in parameters if ".self_attn.position." in name or ".positions.shared." in name}
    own -= {f"{name}.table" for name, part in model.named_modules() if isinstance(part, SegmentInput)}
    if scheme in ABSOLUTE:
        own = {name for name in own if name.endswith(".pair_table")}  # of segments
    schemes = mark_schemes(model)
    assert own == {name for name, part in parameters.items() if hasattr(part, "takes_position_lr")}
    with torch.no_grad():
        for part in parameters.values():
            part.normal_()
    assert not any(one.is_neutral(found) for one in schemes if (found := dict(one.named_parameters())))


@pytest.mark.parametrize(
    ("scale", "named"), [(0.0, "above 0"), (math.inf, "finite"), (20.0, "no parameters of relative schemes")]
)
def test_a_rate_for_no_scheme_is_refused(scale: float, named: str) -> None:
    """Nor is one that is no rate."""
    with pytest.raises(ValueError, match=named):
        adam.RelPosAdam(adam.RelPosAdamConfig(lr=[0.5], position_lr_scale=scale), draw())
