"""Error budgets: no backend is further from fp64 than eager attention of the same precision.

A budget is the eager reference's own error times a fixed factor, plus the rounding of one result:
the type's epsilon times the size of the quantity.  In fp32 it is never less than what the
formula's operations may err on any processor (`rounding.py`): on some the reference errs little by
chance.  The tables of the terms are leaves like q, k and v, so that what a scheme itself rounds
before attention is in no backend's account.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from cases import CASES, INPUT, LIKE_OTHERS
from helpers import FULL, shaped_calls
from helpers.rounding import Rounded
from helpers.scheme_calls import as_leaves
from helpers.shaped_calls import Shape, make_inputs
from relpos_fairseq.attention import AttentionInputs, attend, blocked, native, sdpa, triton
from relpos_fairseq.attention.error_budget import VANISHES, error_budget, sizes
from relpos_fairseq.core.positions import Positions

# Every scheme and hybrid that attention sees, and one whose gates and scalars have one table each.
SCHEMES = [case.scheme for case in CASES if not case.flags and not set(INPUT) & set(case.scheme.split("+"))]
SCHEMES.append("m2+rel_scalar")
# Half precision and interpreted kernels, which are slow, would show nothing new.
FAMILIAR = LIKE_OTHERS | {"log_cpb"} | {name for name in SCHEMES if "+" in name} - {"m3+rel_scalar+shaw"}
UNCLIPPED = ("shaw", "m2", "m4", "rel_scalar")
# Times the floor of `rounding.py`, which takes each sum as a long one; its draws.
FLOORS, DRAWS = 1.5, 3


shape = partial(shaped_calls.Shape, heads=2, dim=16, clip=5)
PADDED = ("left", "right")
SHAPES = {
    "both": shape(150, batch=1),
    "causal": shape(150, causal=True, batch=1),
    "memory": shape(67, before=40, causal=True),
    "padded": shape(97, masks=PADDED),
    "unclipped": shape(97, clip=0),
}


def results(inputs: AttentionInputs, leaves: dict, backend: str) -> dict[str, Tensor]:
    """The output and every gradient, by name, in the call's type."""
    out, _ = attend(inputs, backend)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    upstream = upstream.to(torch.bfloat16).to(out.dtype)  # the same numbers in every type
    if inputs.key_padding is not None:
        real = ~inputs.key_padding[:, inputs.positions.query_start :]
        upstream = upstream * real[:, None, :, None]
    found = torch.autograd.grad(out, list(leaves.values()), upstream, materialize_grads=True)
    gradients = dict(zip(leaves, found, strict=True))
    assert all(gradient.dtype == leaves[name].dtype for name, gradient in gradients.items())
    if inputs.key_padding is not None:
        out = out * real[:, None, :, None]
    return {"output": out.detach()} | gradients


def exact_results(leaves: dict, low: AttentionInputs) -> dict[str, Tensor]:
    """What fp64 makes of the very numbers that the lower type holds."""
    with torch.no_grad():
        exact, leaves = as_leaves(low, torch.float64)
    return results(exact, leaves, "reference")


def floors(low: AttentionInputs, exact: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    """What each result may err in fp32 on any processor, by name."""
    drawn: dict[str, list[Tensor]] = {name: [] for name in exact}
    for seed in range(DRAWS):
        with torch.no_grad():
            wide, leaves = as_leaves(low, torch.float64)
        with Rounded(torch.finfo(torch.float32).eps, seed):
            rounded = results(wide, leaves, "reference")
        for name, right in exact.items():
            drawn[name].append(rounded[name] - right)
    every = {name: sizes(torch.stack(errors)) for name, errors in drawn.items()}
    return {name: {kind: FLOORS * size for kind, size in found.items()} for name, found in every.items()}


def over_budget(scheme: str, shape: Shape, dtype: torch.dtype, backends: list[str]) -> list[str]:
    """Every result of the backends that is over its budget, in words.

    A floor takes longer than all else, and is drawn where the reference's own error is not budget enough.  In half
    precision there is none: a result's own rounding, which every budget has, is larger.
    """
    low, leaves = as_leaves(make_inputs(scheme, shape), dtype)
    exact, eager = exact_results(leaves, low), results(low, leaves, "reference")
    floor: dict[str, dict[str, float]] = {}
    over = []
    for backend in backends:
        found = results(low, leaves, backend)
        lines = overruns(found, eager, exact, backend, dtype, floor)
        if lines and not floor and dtype == torch.float32:
            floor = floors(low, exact)
            lines = overruns(found, eager, exact, backend, dtype, floor)
        over += [f"{backend}: {line}" for line in lines]
    return over


def overruns(
    got: dict[str, Tensor],
    eager: dict[str, Tensor],
    exact: dict[str, Tensor],
    backend: str,
    dtype: torch.dtype,
    floor: dict[str, dict[str, float]],
) -> list[str]:
    """Every result over its budget, in words; an empty `floor` is none."""
    place = "fused" if backend == "triton" and dtype != torch.float32 else "tested"
    compared = error_budget(got, eager, exact, place, torch.finfo(dtype).eps, exact["q"], floor)
    return [f"{one} (floor {floor.get(one.name, {}).get(one.kind, 0):.2e})" for one in compared if one.exceeds]


def number_of(scheme: str) -> int:
    """A number that follows from the name alone, so that a new scheme changes nothing for the others."""
    return zlib.crc32(scheme.encode())


def shape_of(scheme: str, turn: int = 0) -> str:
    """One of the shapes that every scheme has, in turn."""
    return list(SHAPES)[(number_of(scheme) + turn) % 4]


def backends_for(scheme: str, shape: str) -> list[str]:
    """The backends that serve a scheme's call.

    Interpreted kernels are slow: they have a shape for each kind of term.
    """
    chosen = [sdpa, blocked, native]
    if shape == shape_of(scheme) and scheme not in FAMILIAR and triton.interpreted():
        chosen.append(triton)
    inputs = make_inputs(scheme, SHAPES[shape])
    return [backend.name for backend in chosen if backend.refusal(inputs) is None]


def cells() -> Iterator[tuple[str, str, torch.dtype]]:
    """Every scheme and shape in fp32; in half precision, where masks round nothing, one shape.

    Without RELPOS_ONNX=full familiar ones have one shape, and no hybrid is in half precision.
    """
    for scheme in SCHEMES:
        for shape in SHAPES if FULL or scheme not in FAMILIAR else (shape_of(scheme),):
            if shape != "unclipped" or scheme in UNCLIPPED:
                yield scheme, shape, torch.float32
        if scheme not in FAMILIAR and (FULL or "+" not in scheme):
            halves = (torch.bfloat16, torch.float16)
            for turn in range(2):  # each type with and without interpreted kernels, by turns
                dtype = halves[(number_of(scheme) // 4 + turn) % 2]
                yield scheme, shape_of(scheme, turn), dtype


@pytest.mark.parametrize(("scheme", "shape", "dtype"), list(cells()), ids=lambda part: str(part).removeprefix("torch."))
def test_error_budget(scheme: str, shape: str, dtype: torch.dtype) -> None:
    """Values and every gradient stay inside the reference's own error and one rounding."""
    over = over_budget(scheme, SHAPES[shape], dtype, backends_for(scheme, shape))
    assert not over, "\n".join(over)


@pytest.mark.parametrize("scheme", ["none", "m4", "m4m", "tupe", "abs_scalar"])
def test_budgets_are_not_vacuous(scheme: str) -> None:
    """Errors of a few floors are seen, and the floor has the size of what is measured.

    It takes each sum as a long one, where eager attention sums by parts: at most 30 times more.
    """
    low, leaves = as_leaves(make_inputs(scheme, SHAPES["memory"]), torch.float32)
    exact, eager = exact_results(leaves, low), results(low, leaves, "reference")
    floor, epsilon = floors(low, exact), torch.finfo(torch.float32).eps
    over = partial(overruns, eager=eager, exact=exact, backend="native", dtype=torch.float32, floor=floor)
    generator = torch.Generator().manual_seed(1)
    for name, right in exact.items():
        if float(right.abs().max()) < VANISHES:
            continue
        own = sizes(eager[name].double() - right)["typical"]
        least = floor[name]["typical"] / FLOORS
        assert 0.25 * own <= least <= 30 * own, name
        error = torch.randn(right.shape, generator=generator, dtype=right.dtype).sign()
        error *= 4 * max(own, least) + 2 * epsilon * sizes(right)["typical"]
        wrong = dict(exact) | {name: right + error}
        assert any(line.startswith(f"{name}: ") for line in over(wrong))
    off = results(replace(low, scale=low.scale * (1 + 300 * epsilon)), leaves, "reference")
    assert over(off), "a scale that is off by 4e-5"


def test_nothing_but_a_number_is_within_a_budget() -> None:
    exact = {"q": torch.ones(3, dtype=torch.float64)}
    (typical, worst) = error_budget({"q": exact["q"] * torch.nan}, exact, exact, "tested", 1.0)
    assert typical.exceeds and worst.exceeds
    assert not any(one.exceeds for one in error_budget(exact, exact, exact, "tested", 0.0))


def test_sums_over_many_keys() -> None:
    """The kernel sums probabilities times values by parts: one long sum errs five times as much."""
    if problem := native.build.problem():
        pytest.skip(problem)
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(1, 2, rows, 16, generator=generator) for rows in (12, 8192, 8192))
    positions = Positions(12, 8192, 8192 - 12)
    exact, eager, found = (
        attend(AttentionInputs(*parts, (), positions, 0.25), backend)[0].double()
        for parts, backend in (
            ([x.double() for x in (q, k, v)], "reference"),
            ((q, k, v), "reference"),
            ((q, k, v), "native"),
        )
    )
    assert sizes(found - exact)["typical"] <= 2 * sizes(eager - exact)["typical"]


@pytest.mark.parametrize("scheme", ["m4", "deberta"])
def test_gradients_of_tables_over_many_keys(scheme: str) -> None:
    """Each row of a table takes part in the logits of thousands of keys: one long sum would err several times more."""
    if problem := native.build.problem():
        pytest.skip(problem)
    low, leaves = as_leaves(make_inputs(scheme, shape(16, before=8176, batch=1)), torch.float32)
    exact, eager, found = exact_results(leaves, low), results(low, leaves, "reference"), results(low, leaves, "native")
    for name in ("0.query_vectors", "0.key_vectors"):
        own, other = (sizes(result[name].double() - exact[name])["typical"] for result in (eager, found))
        assert other <= 2 * own, name


LONG = {
    "both": shape(1024, batch=1),
    "padded": shape(700, masks=PADDED),
    "memory": shape(260, before=800, causal=True, batch=1),
    "unclipped": shape(620, clip=0, batch=1),
}
LONG_CALLS = [
    *((scheme, "both", torch.float32) for scheme in ("none", "shaw", "m2", "m4", "transformer_xl")),
    *((scheme, "both", torch.float32) for scheme in ("tupe", "abs_scalar", "m4m", "t5")),
    ("tupe", "both", torch.bfloat16),
    ("tupe", "padded", torch.float32),
    ("shaw", "padded", torch.bfloat16),
    ("rope", "memory", torch.float32),
    ("m3+rel_scalar+shaw", "memory", torch.float32),
    ("m4", "unclipped", torch.float32),
    ("m3", "unclipped", torch.float32),
    ("shaw", "unclipped", torch.float32),
]


@pytest.mark.parametrize(("scheme", "shape", "dtype"), LONG_CALLS, ids=lambda part: str(part).removeprefix("torch."))
@pytest.mark.slow
def test_error_budget_over_several_chunks(scheme: str, shape: str, dtype: torch.dtype) -> None:
    """The kernel's softmax over chunks of keys, and sums over many blocks of queries."""
    if problem := native.build.problem():
        pytest.skip(problem)
    over = over_budget(scheme, LONG[shape], dtype, ["native"])
    assert not over, "\n".join(over)
