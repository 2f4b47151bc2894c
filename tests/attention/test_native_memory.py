"""The native kernel depends on nothing that it has not written.

It is compiled with RELPOS_POISON, which fills its buffers with NaN before each call, and torch does
so with fresh tensors: values and gradients are the reference's all the same.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch

from helpers.shaped_calls import Shape, compare, make_inputs
from relpos_fairseq.attention import native
from relpos_fairseq.attention.native import build

pytestmark = pytest.mark.skipif(native.build.problem() is not None, reason="no C compiler")
SCHEMES = (
    "none",
    "rope",
    "shaw",
    "m2",
    "m3",
    "m4",
    "m4m",
    "transformer_xl",
    "tupe",
    "rel_scalar",
    "rope+m4",
    "m3+rel_scalar+shaw",
    "m2+m4m+shaw",
    "m3+transformer_xl",
    "shaw+t5",
    "cable",
)
SHAPES = (
    Shape(7, batch=3, heads=1, dim=6, value_dim=3),
    Shape(103, after=2, batch=6, heads=1, masks=("left", "right")),
    Shape(55, before=600, causal=True, clip=40, heads=1, batch=1, value_dim=18),
    Shape(97, after=700, clip=40, heads=1, batch=1, dim=8),
    Shape(150, before=200, causal=True, window=131, batch=1, masks=("dead", "documents")),
    Shape(109, before=333, after=307, clip=0, heads=1, batch=1, dim=6),
    Shape(98, before=31, causal=True, clip=0, window=75, heads=1),
)
ELSEWHERE = {"avx2": "-mno-avx512f", "sse2": "-mno-avx512f -mno-avx2 -mno-avx -mno-fma"}
OTHERS = [
    pytest.param(flags.split(), id=name, marks=pytest.mark.slow)
    for name, flags in ELSEWHERE.items()
    if platform.machine().lower() in ("x86_64", "amd64")
]


@pytest.fixture(params=[pytest.param([], id="here"), *OTHERS], scope="module")
def poisoned(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kernels whose buffers hold NaN, for this processor and for what others have."""
    flags = ("-DRELPOS_POISON", *request.param, *(["-O1"] if request.param else []))  # compiled in a third of the time
    libraries = {dtype: build.load(build.SOURCES, (*defined, *flags)) for dtype, defined in build.DEFINED.items()}
    torch.use_deterministic_algorithms(True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_attempt", libraries.__getitem__)
        build.entry.cache_clear()
        yield
    build.entry.cache_clear()
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_nothing_unwritten_is_read(scheme: str, dtype: torch.dtype, poisoned: None) -> None:
    """For sizes that end anywhere in blocks of registers, of queries and of keys."""
    assert torch.empty(3).isnan().all()
    for shape in SHAPES:
        found = compare(make_inputs(scheme, shape), dtype)
        assert all(x.isfinite().all() for x in found.values())
