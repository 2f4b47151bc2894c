"""The kernels compile for a GPU without one, and spill no registers."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import FULL, ROOT
from helpers.commands import relpos

pytest.importorskip("triton", reason="triton is not installed")
LIMIT = 600  # seconds for a subprocess on a slow, loaded machine
SPILLS = """
import sys, tempfile, torch
from relpos_fairseq.benchmarks.kernels import Compiler, start_compiling
with tempfile.TemporaryDirectory() as cache:
    start_compiling(cache)
    from relpos_fairseq.attention.triton import trilinear
    trilinear.ROWS = {rows}
    compiler = Compiler(90)
    with compiler.catching("band"):
        q, k = torch.ones(2, 1, 1, 8, 64)
        trilinear.trilinear_band(q, k, torch.ones(1, 3, 64), 5)
    (kernel,) = compiler.kernels.values()
    print(kernel.name, kernel.users, bool(kernel.faults(90)))
"""


BENCHMARK = ("-m", "relpos_fairseq.cli", "benchmark", "kernels")


def python(*arguments: str) -> subprocess.CompletedProcess:
    """A Python of its own: one process can interpret Triton's kernels or compile them, not both."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        timeout=LIMIT,
        capture_output=True,
        text=True,
        check=False,
    )


def report(folder: Path, *arguments: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """What `relpos benchmark kernels` prints, and its rows."""
    file = folder / "kernels.csv"
    done = python(*BENCHMARK, "--csv", str(file), *arguments)
    assert file.exists(), done.stderr[-2000:]
    with file.open(encoding="utf-8") as lines:
        return done, list(csv.DictReader(lines))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schemes", "dtype", "mask"),
    [
        ("none,shaw,m4,m4m,m3,tupe,rel_scalar,m2" if FULL else "m4,m4m", "bfloat16", "both"),
        ("m4", "float32", "dropout"),
    ],
)
def test_no_kernel_spills(schemes: str, dtype: str, mask: str, tmp_path: Path) -> None:
    """For sm_90: at most 255 registers, none in memory, and blocks that fit shared memory."""
    asked = ("--schemes", schemes, "--dtypes", dtype, "--head-dims", "64", "--masks", mask)
    done, rows = report(tmp_path, *asked)
    print(done.stdout)
    faults = [f"{row['kernel']}: {row['faults']} ({row['calls']})" for row in rows if row["faults"]]
    assert not faults, "\n".join(faults)
    assert done.returncode == 0, done.stderr[-500:]
    assert {"forward_kernel", "rows_kernel", "keys_kernel"} <= {row["kernel"] for row in rows}
    called = {name for row in rows for name in row["calls"].replace("; ", " ").split()}
    assert set(schemes.split(",")) <= called
    if dtype == "bfloat16":
        assert all(int(row["wgmma"]) for row in rows if row["kernel"] == "forward_kernel")


@pytest.mark.parametrize(("rows", "spills"), [(64, False), (512, True)])
@pytest.mark.slow
def test_spills_are_seen(rows: int, spills: bool) -> None:
    """A tile too large for its warps is named, so that the report can be believed."""
    done = python("-c", SPILLS.format(rows=rows), str(ROOT), str(ROOT / "scripts"))
    assert done.stdout.split("\n")[0] == f"band_kernel ['band'] {spills}", done.stderr[-2000:]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--dtypes", "float8"), "error: --dtypes: unknown float8"),
        (("--head-dims", "64,x"), "error: --head-dims must be positive numbers, got 64,x"),
    ],
)
def test_bad_arguments(arguments: tuple, said: str, capsys: pytest.CaptureFixture) -> None:
    """One line, status 2, before anything is compiled."""
    assert relpos("benchmark", "kernels", *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(said, line)


def test_an_unknown_scheme() -> None:
    """The same where compiling has begun: one line, status 2, no traceback."""
    done = python(*BENCHMARK, "--schemes", "m5")
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()[-1:]
    assert re.match("error: .*m5", line)
    assert "Traceback" not in done.stderr
