"""A smaller instruction set than the machine's own, for the kernel in C and for torch alike.

Torch chooses when its first operation runs, MKL and oneDNN at their first product.  A command
therefore runs again, in a process whose environment says which set.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from relpos_fairseq.attention.native.build import X86

VARIABLES = ("RELPOS_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
# Of VARIABLES, then what /proc/cpuinfo calls the abilities that each needs.
SETS = {
    "native": ((None,) * len(VARIABLES), ()),
    "avx2": (("x86-64-v3", "avx2", "AVX2", "AVX2"), ("avx2", "fma", "bmi2")),
    "sse2": (("x86-64-v2", "default", "SSE4_2", "SSE41"), ("sse4_2",)),
}
ROOT = Path(__file__).resolve().parents[2]


def of_environment(name: str) -> dict[str, str | None]:
    """Return what each variable is for a set; None: not there."""
    return dict(zip(VARIABLES, SETS[name][0], strict=True))


def run_with(name: str | None, command: str, argv: Sequence[str]) -> int | None:
    """Run a command of `relpos` again under a set of SETS, unless it is under it already.

    Returns:
        The status of the other process, or None where this one is to go on.
    """
    wanted = {} if name is None else of_environment(name)
    if all(os.environ.get(variable) == value for variable, value in wanted.items()):
        return None
    check(name)
    paths = filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **wanted}
    environment = {key: value for key, value in environment.items() if value is not None}
    words = [sys.executable, "-m", "relpos_fairseq.cli", *command.split(), *argv]
    status = subprocess.run(words, env=environment, check=False).returncode
    return status if status >= 0 else 128 - status  # ended by a signal


def check(name: str) -> None:
    """Refuse a set that this processor lacks: its first instruction would end the process."""
    needed = SETS[name][1]
    if needed and platform.machine().lower() not in X86:
        raise ValueError(f"--isa {name} is a set of x86 processors, this is {platform.machine()}")
    lacking = [ability for ability in needed if ability not in abilities()]
    if lacking:
        raise ValueError(
            f"--isa {name} needs {', '.join(lacking)}, which this processor has not: use --isa "
            f"{'sse2' if name == 'avx2' else 'native'}"
        )


def abilities() -> set[str]:
    """Return what Linux says that this processor can do."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return {word for line in text.splitlines() if line.startswith("flags") for word in line.split()}


def in_words() -> str:
    """Return which sets this process computes with."""
    kernel = os.environ.get("RELPOS_ISA") or "native"
    return f"kernel for {kernel} and torch for {torch.backends.cpu.get_cpu_capability()}"
