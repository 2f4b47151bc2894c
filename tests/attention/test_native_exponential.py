"""The native kernel's exponential errs by at most two units in the last place."""

from __future__ import annotations

import ctypes
import platform
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from relpos_fairseq.attention import native
from relpos_fairseq.attention.native import build

pytestmark = pytest.mark.skipif(native.build.problem() is not None, reason="no C compiler")
X86 = platform.machine().lower() in ("x86_64", "amd64")
FLAGS = {"here": "", "avx2": "-mno-avx512f", "sse2": "-mno-avx512f -mno-avx2 -mno-avx -mno-fma"}
SOURCE = """
#include "rowwise.h"
void exponentials_of(real *x, int64_t count, double top)
{
    for (int64_t j = 0; j < count; j += NR)
        exponential((vec *)(x + j), (real)top);
}
"""
COUNT = 96 * 4000  # a multiple of two vectors of any length


def exponential(x: np.ndarray, top: float, folder: Path, flags: str) -> np.ndarray:
    """exp(x - top) by the kernel's own function, compiled alone."""
    sources = folder / "sources"
    shutil.copytree(build.SOURCES, sources, ignore=shutil.ignore_patterns("*.py", "*.c", "__*"))
    (sources / "kernel.c").write_text(SOURCE, encoding="utf-8")
    dtype = torch.float32 if x.dtype == np.float32 else torch.float64
    library = build.load(sources, (*build.DEFINED[dtype], *flags.split()))
    found = x.copy()
    library.exponentials_of(found.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(x.size), ctypes.c_double(top))
    return found


@pytest.mark.parametrize("isa", FLAGS if X86 else ["here"])
@pytest.mark.parametrize(("dtype", "least"), [(np.float32, -87.0), (np.float64, -700.0)])
def test_two_units_in_the_last_place(
    dtype: type, least: float, isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 0 down to where it is 0, also below that, for -inf and for what is no number."""
    monkeypatch.setenv("RELPOS_CACHE", str(tmp_path / "cache"))
    x = np.concatenate([np.linspace(least, 0, COUNT // 2), -np.logspace(-12, 1.9, COUNT // 2)])
    x = x.astype(dtype)
    x[:4] = -np.inf, np.nan, 2 * least, least
    found = exponential(x + dtype(0), 0.0, tmp_path, FLAGS[isa])
    assert found[0] == 0 and np.isnan(found[1]) and found[2] == 0 and found[3] > 0
    exact = np.exp(x[3:].astype(np.longdouble))
    error = np.abs(found[3:] - exact) / np.spacing(exact.astype(dtype))
    assert error.max() <= 2
