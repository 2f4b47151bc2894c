"""Vectors over many distances in Triton: the reference's values and gradients, in linear memory."""

from __future__ import annotations

from functools import partial

import pytest

from helpers.shaped_calls import Shape, compare, make_inputs

pytest.importorskip("triton", reason="triton is not installed")
from relpos_fairseq.attention import AttentionInputs
from relpos_fairseq.attention import triton as backend
from relpos_fairseq.attention.triton import kernel_args, operands

pytestmark = pytest.mark.skipif(not backend.interpreted(), reason="fp64 is for the interpreter (TRITON_INTERPRET=1)")
shape = partial(Shape, clip=0, batch=1)
PADDED = {"batch": 2, "masks": ("left", "right")}
WIDE = ("transformer_xl", "shaw_keys", "m4", "deberta")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_args, "long_table_launch_of", lambda *_, **__: kernel_args.Launch(16, 16, 4, 1))
    monkeypatch.setattr(operands, "STORED_DISTANCES", 8)


def by_kernel(inputs: AttentionInputs) -> None:
    """Values and all gradients of the kernels and of the reference."""
    assert backend.refusal(inputs) is None
    assert {"query_vectors", "key_vectors"} & set(operands.operands_of(inputs).tensors)
    compare(inputs, backend="triton")


@pytest.mark.parametrize("causal", [False, True], ids=["both", "causal"])
@pytest.mark.parametrize("scheme", WIDE)
def test_equals_the_reference(scheme: str, causal: bool) -> None:
    """Tiles on, before and behind the diagonal, and memory that shifts it inside them."""
    by_kernel(make_inputs(scheme, shape(33, before=14 if causal else 0, causal=causal)))


@pytest.mark.parametrize(("length", "memory"), [(1, 17), (16, 0), (20, 30)])
@pytest.mark.slow
def test_lengths(length: int, memory: int) -> None:
    """A single query, one tile exactly, and more memory than queries."""
    by_kernel(make_inputs("m4", shape(length, before=memory)))


@pytest.mark.parametrize(
    ("scheme", "sizes", "options"),
    [
        ("transformer_xl", PADDED, {}),
        ("m4", {"causal": True, "window": 21}, {}),
        ("m4", {}, {"reset_cls": "on"}),
        ("m4", {"clip": 12}, {}),
        ("shaw", {}, {}),
        ("transformer_xl+m2+t5", {}, {}),
        ("m3+shaw_keys", {"clip": 6}, {}),
        ("rope+m4", {}, {}),
        ("transformer_xl", {}, {"query_bias": "off"}),
        ("m4", PADDED, {"share": "none"}),
    ],
)
@pytest.mark.slow
def test_options(scheme: str, sizes: dict, options: dict) -> None:
    """Masks, resets, far distances that share a vector, and what else may be in a tile."""
    by_kernel(make_inputs(scheme, shape(36, **sizes), **options))
