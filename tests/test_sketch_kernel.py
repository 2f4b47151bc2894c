"""A fused kernel fits under the interface: one sketch evaluates the schemes' terms unchanged."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from cases import Case  # noqa: E402
from sketch_kernel import forward  # noqa: E402
from test_schemes import call, real_rows  # noqa: E402

from relpos_fairseq.attention import attend  # noqa: E402

SERVED = [
    "none", "shaw_keys", "m4", "deberta", "rel_scalar", "t5", "m1", "m2", "tupe", "abs_scalar",
    "alibi", "kerple", "transformer_xl", "rope", "m2+m4+rel_scalar",
]  # fmt: skip


@pytest.mark.parametrize("kind", ["square", "causal", "pad_left"])
@pytest.mark.parametrize("scheme", SERVED)
def test_sketch_kernel(scheme: str, kind: str) -> None:
    """Tiles of a band with two tails give the reference's output (fp32 in the kernel)."""
    flags = {"position_reset_cls": "off"} if scheme == "tupe" else {}
    inputs, *_ = call(Case(scheme, flags), kind)
    with torch.no_grad():
        expected, _ = attend(inputs, "reference")
        got = forward(inputs)
    rows = real_rows(inputs)[:, None, :, None].expand_as(got)
    torch.testing.assert_close(got[rows].double(), expected[rows], rtol=1e-4, atol=1e-5)
