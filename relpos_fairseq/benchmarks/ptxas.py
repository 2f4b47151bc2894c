"""What Triton's kernels need of a GPU, found by compiling them for it where there is none.

Launches are caught and compiled instead of run, with the very arguments, blocks and warps that the
launching code chose; ptxas comes with Triton and says registers and spills.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

REGISTERS = 255  # a thread's most on every GPU from sm_50 on
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a program may take


@dataclass
class Kernel:
    """A compiled kernel."""

    name: str  # the function's
    warps: int  # warps of a program
    registers: int  # of a thread
    spilled: int  # bytes a thread stores to and loads from memory for want of registers
    stack: int  # bytes of a thread's stack frame
    shared: int  # bytes of shared memory that a program takes
    matrix_products: int  # warp-group products (wgmma) in the code
    users: list[str] = field(default_factory=list)  # labels of the calls that launch it

    def faults(self, capability: int) -> list[str]:
        """Why it would be slow or not start."""
        found = []
        if self.registers > REGISTERS:
            found.append(f"{self.registers} registers")
        if self.spilled or self.stack:
            found.append(f"{self.spilled} bytes spilled, {self.stack} bytes of stack")
        if self.shared > SHARED[capability] * 1024:
            found.append(f"{self.shared} bytes of shared memory")
        return found


def start_compiling(cache: str) -> None:
    """Set what Triton reads when it is imported; ptxas speaks only where the cache is empty."""
    if "triton" in sys.modules:
        raise ValueError("triton is imported already: start a process that compiles first")
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ["TRITON_CACHE_DIR"] = cache
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"


class _Target:
    """A driver that knows its target and can start nothing."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiler:
    """Compiles whatever is launched inside `catching`; capability 90 is an H100's and H200's."""

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability
        self.kernels: dict[int, Kernel] = {}

    @contextlib.contextmanager
    def catching(self, label: str) -> Iterator[None]:
        """Launches in here are compiled, and `label` is among their users."""
        from triton.runtime import driver, jit

        launch = jit.JITFunction.run

        def compile_only(function, *args, grid, warmup, **kwargs):
            with contextlib.redirect_stdout(io.StringIO()) as log:
                compiled = launch(function, *args, grid=grid, warmup=True, **kwargs)
            kernel = self.kernels.get(id(compiled))
            if kernel is None:
                kernel = self.kernels[id(compiled)] = _kernel(compiled, log.getvalue())
                kernel.compiled = compiled  # so that its id stays its own
            if label not in kernel.users:
                kernel.users.append(label)
            return compiled

        driver.set_active(_Target(self.capability))
        jit.JITFunction.run = compile_only
        try:
            yield
        finally:
            jit.JITFunction.run = launch

    def used_by(self, label: str) -> list[Kernel]:
        """The kernels of a call, in the order of their launch."""
        return [kernel for kernel in self.kernels.values() if label in kernel.users]


def _kernel(compiled: Any, log: str) -> Kernel:
    """What ptxas said of a kernel; an error where it said nothing."""
    used = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill", log)
    name = compiled.metadata.name
    if not used or not frame:
        raise ValueError(f"ptxas said nothing of {name}: its log was {log.strip()[:200]!r}")
    stack, stores, loads = (int(number) for number in frame.groups())
    return Kernel(
        name,
        compiled.metadata.num_warps,
        int(used[1]),
        stores + loads,
        stack,
        compiled.metadata.shared,
        compiled.asm["ptx"].count("wgmma.mma_async"),
    )
