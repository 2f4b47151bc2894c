"""Compile the Triton kernels for an H100 without one; a process prints registers, shared memory and spills.

Launches are caught and compiled instead of run, with the very arguments, blocks and warps that the launching code
chose.  ptxas, which comes with Triton, prints registers and spills.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from relpos_fairseq.attention import AttentionInputs
from relpos_fairseq.attention import triton as backend
from relpos_fairseq.lab.benchmarks.candidates import SchemeCandidate
from relpos_fairseq.lab.benchmarks.workload import AttentionSetting
from relpos_fairseq.schemes import schemes_for

CAPABILITY = 90  # an H100's and H200's
REGISTERS = 255  # a thread's most on every GPU from sm_50 on
SHARED = 227 * 1024  # bytes that a program may take
LENGTH, HEAD_DIM, CLIP = 512, 64, 16


@dataclass
class Kernel:
    """A compiled kernel."""

    name: str  # the function's
    registers: int  # of a thread
    spilled: int  # bytes a thread stores to and loads from memory for want of registers
    stack: int  # bytes of a thread's stack frame
    shared: int  # bytes of shared memory that a program takes
    wgmma: int  # warp-group matrix products in the code
    users: list[str] = field(default_factory=list)  # labels of the calls that launch it

    @property
    def fits(self) -> bool:
        """Return whether all is in registers, and a program's memory is there."""
        return self.registers <= REGISTERS and not self.spilled and not self.stack and self.shared <= SHARED


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Set what Triton reads when it is imported; ptxas prints only where the cache is empty."""
    if "triton" in sys.modules:
        raise ValueError("triton is imported already: start a process that compiles first")
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": cache, "TRITON_DUMP_PTXAS_LOG": "1"}
        yield


class Compiler:
    """Compiles whatever is launched inside `catching`."""

    def __init__(self) -> None:
        self.kernels: dict[int, Kernel] = {}
        self._compiled: list[Any] = []  # kept, so that an id stays a kernel's own

    @contextlib.contextmanager
    def catching(self, label: str) -> Iterator[None]:
        """Compile launches instead of running them, and add `label` to their users."""
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver, jit

        launch = jit.JITFunction.run

        def compile_only(function, *args, grid, warmup, **kwargs):
            with contextlib.redirect_stdout(io.StringIO()) as log:
                compiled = launch(function, *args, grid=grid, warmup=True, **kwargs)
            if id(compiled) not in self.kernels:
                self.kernels[id(compiled)] = described(compiled, log.getvalue())
                self._compiled.append(compiled)
            users = self.kernels[id(compiled)].users
            if label not in users:
                users.append(label)
            return compiled

        target = GPUTarget("cuda", CAPABILITY, 32)
        driver.set_active(
            SimpleNamespace(  # a driver that knows its target and can start nothing
                get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
            )
        )
        jit.JITFunction.run = compile_only
        try:
            yield
        finally:
            jit.JITFunction.run = launch


def described(compiled: Any, log: str) -> Kernel:
    """Return a kernel as ptxas describes it; a log without a description is an error."""
    used = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill", log)
    found = compiled.metadata
    if not used or not frame:
        raise ValueError(f"ptxas said nothing of {found.name}: its log was {log.strip()[:200]!r}")
    stack, stores, loads = (int(number) for number in frame.groups())
    wgmma = compiled.asm["ptx"].count("wgmma.mma_async")
    return Kernel(found.name, int(used[1]), stores + loads, stack, found.shared, wgmma)


def training_call(scheme: str, dtype: str, mask: str) -> AttentionInputs:
    """Return a call whose queries, keys, values and tables want gradients; `mask` is both, causal or dropout."""
    shape = (1, 2, LENGTH, HEAD_DIM, CLIP)
    setting = AttentionSetting(*shape, mask == "causal", getattr(torch, dtype), torch.device("cpu"))
    candidate = SchemeCandidate(scheme, setting, "triton")
    inputs = candidate.call(*(part.detach().requires_grad_() for part in candidate.inputs()))
    return replace(inputs, dropout=0.1) if mask == "dropout" else inputs


def main(schemes: str, dtype: str, mask: str) -> None:
    """Print, in JSON, the kernels of schemes separated by commas, or of all that the backend evaluates."""
    with compiling():
        # The kernels are imported as for a GPU; then the backend is told to accept tensors on the CPU, which none
        # touches.
        import_module("relpos_fairseq.attention.triton.fused_attention")
        import_module("relpos_fairseq.attention.triton.refusal").interpreted = lambda: True
        compiler = Compiler()
        for scheme in schemes_for(attention=True) if schemes == "all" else schemes.split(","):
            inputs = training_call(scheme, dtype, mask)
            if problem := backend.refusal(inputs):
                if schemes != "all":
                    raise ValueError(f"{scheme}: triton cannot evaluate {problem}")
                continue
            with compiler.catching(scheme):
                backend.attend(inputs).sum().backward()
    print(json.dumps([asdict(kernel) | {"fits": kernel.fits} for kernel in compiler.kernels.values()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
