"""The kernels compile for a GPU without one, and spill no registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from helpers import FULL, ROOT

pytest.importorskip("triton", reason="triton is not installed")
LIMIT = 600  # seconds for a subprocess on a slow, loaded machine
SPILLS = """
import torch
from helpers.triton_kernels import Compiler, compiling
with compiling():
    from relpos_fairseq.attention.triton import trilinear
    trilinear.ROWS = {rows}
    compiler = Compiler()
    with compiler.catching("band"):
        q, k = torch.ones(2, 1, 1, 8, 64)
        trilinear.trilinear_band(q, k, torch.ones(1, 3, 64), 5)
    (kernel,) = compiler.kernels.values()
    print(kernel.name, kernel.users, kernel.fits)
"""


def python(*arguments: str) -> str:
    """What a Python of its own prints: one process can interpret Triton's kernels or compile them, not both."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")} | {"PYTHONPATH": str(ROOT)}
    run = [sys.executable, *arguments]
    done = subprocess.run(
        run, cwd=ROOT / "tests", env=environment, timeout=LIMIT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schemes", "dtype", "mask"),
    [("all", "bfloat16", "both"), ("m4", "float32", "dropout")] if FULL else [("m4m", "bfloat16", "both")],
)
def test_no_kernel_spills(schemes: str, dtype: str, mask: str) -> None:
    """For sm_90: at most 255 registers, none in memory, and blocks that fit shared memory."""
    kernels = json.loads(python("-m", "helpers.triton_kernels", schemes, dtype, mask))
    assert [kernel for kernel in kernels if not kernel["fits"]] == []
    assert {"forward_kernel", "rows_kernel", "keys_kernel"} <= {kernel["name"] for kernel in kernels}
    called = {user for kernel in kernels for user in kernel["users"]}
    assert set(schemes.replace("all", "m4").split(",")) <= called
    if dtype == "bfloat16":
        assert all(kernel["wgmma"] for kernel in kernels if kernel["name"] == "forward_kernel")


@pytest.mark.nightly
@pytest.mark.parametrize(("rows", "fits"), [(64, True), (512, False)] if FULL else [(128, False)])
@pytest.mark.slow
def test_spills_are_seen(rows: int, fits: bool) -> None:
    """A tile too large for its warps is named, so that the report can be believed."""
    assert python("-c", SPILLS.format(rows=rows)) == f"band_kernel ['band'] {fits}\n"
