"""Compile every scheme's Triton kernels for a GPU, and report registers, shared memory and spills.

No GPU is needed: launches are caught and compiled instead of run, with the very arguments, blocks and warps that the
launching code chose.  ptxas, which comes with Triton, prints registers and spills.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from relpos_fairseq.attention import AttentionInputs
from relpos_fairseq.attention import triton as backend
from relpos_fairseq.benchmarks.candidates import SchemeCandidate
from relpos_fairseq.benchmarks.measurement import table, write_csv, write_section
from relpos_fairseq.benchmarks.workload import AttentionSetting, Options, schemes_of
from relpos_fairseq.schemes import schemes_for

DTYPES = ("bfloat16", "float16", "float32")
MASKS = ("both", "causal", "padding", "dropout")
KEY = "triton kernels"
REGISTERS = 255  # a thread's most on every GPU from sm_50 on
SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB a program may take


def benchmark(args: Options) -> None:
    """Compile, print and write; a kernel that spills is an error."""
    check_arguments(args)
    with tempfile.TemporaryDirectory(prefix="kernels_") as cache:
        start_compiling(cache)
        compiler, labels = compile_all(args)
    import triton

    kernels = list(compiler.kernels.values())
    faulty = sum(bool(kernel.faults(args.capability)) for kernel in kernels)
    most = max(kernel.registers for kernel in kernels)
    text = (
        f"sm_{args.capability}, Triton {triton.__version__}, T = S = {args.length}, "
        f"clip {args.position_clip_distance}: {len(kernels)} kernels compiled, at most {most} registers; "
        f"{faulty} spill or do not fit.\n\n{kernel_table(compiler, labels)}"
    )
    print(text, flush=True)
    if args.write:
        write_section(args.write, KEY, text)
    if args.csv:
        write_csv(args.csv, [kernel.columns(args.capability) for kernel in kernels])
    if faulty:
        raise ValueError(f"{faulty} kernels spill registers or do not fit: their cells are bold")


def check_arguments(args: Options) -> None:
    """Turn texts into lists, and refuse impossible values."""
    for name, allowed in (("dtypes", DTYPES), ("masks", MASKS)):
        given = getattr(args, name).split(",")
        if unknown := sorted(set(given) - set(allowed)):
            raise ValueError(f"--{name}: unknown {', '.join(unknown)}: choose of {allowed}")
        setattr(args, name, given)
    numbers = args.head_dims.split(",")
    if not all(number.isdigit() and int(number) for number in numbers):
        raise ValueError(f"--head-dims must be positive numbers, got {args.head_dims}")
    args.head_dims = [int(number) for number in numbers]
    args.all = args.schemes == "all"
    args.schemes = schemes_of(args.schemes, schemes_for(attention=True))
    if find_spec("triton") is None:
        raise ModuleNotFoundError("triton", name="triton")


# ---------------------------------------------------------------------------------------------------------------------
# Compiling.


@dataclass
class Kernel:
    """A compiled kernel."""

    name: str  # the function's
    warps: int  # warps of a program
    registers: int  # of a thread
    spilled: int  # bytes a thread stores to and loads from memory for want of registers
    stack: int  # bytes of a thread's stack frame
    shared: int  # bytes of shared memory that a program takes
    wgmma: int  # warp-group matrix products in the code
    users: list[str] = field(default_factory=list)  # labels of the calls that launch it

    def faults(self, capability: int) -> list[str]:
        """Return why the kernel would be slow or not start."""
        found = []
        if self.registers > REGISTERS:
            found.append(f"{self.registers} registers")
        if self.spilled or self.stack:
            found.append(f"{self.spilled} bytes spilled, {self.stack} bytes of stack")
        if self.shared > SHARED[capability] * 1024:
            found.append(f"{self.shared} bytes of shared memory")
        return found

    def columns(self, capability: int) -> dict:
        """Return the kernel as a row of a CSV file."""
        numbers = ("warps", "registers", "spilled", "stack", "shared", "wgmma")
        row = {"kernel": self.name, **{name: getattr(self, name) for name in numbers}}
        return row | {"faults": "; ".join(self.faults(capability)), "calls": "; ".join(self.users)}

    def cell(self, capability: int) -> str:
        """Return registers, warps, shared memory, and in bold what is wrong."""
        text = f"{self.registers} ({self.warps}w, {self.shared / 1024:.0f}K)"
        faults = self.faults(capability)
        return f"{text} **{', '.join(faults)}**" if faults else text


def start_compiling(cache: str) -> None:
    """Set what Triton reads when it is imported; ptxas prints only where the cache is empty."""
    if "triton" in sys.modules:
        raise ValueError("triton is imported already: start a process that compiles first")
    os.environ["TRITON_INTERPRET"] = "0"
    os.environ["TRITON_CACHE_DIR"] = cache
    os.environ["TRITON_DUMP_PTXAS_LOG"] = "1"


class Compiler:
    """Compiles whatever is launched inside `catching`; capability 90 is an H100's and H200's."""

    def __init__(self, capability: int = 90) -> None:
        self.capability = capability
        self.kernels: dict[int, Kernel] = {}

    @contextlib.contextmanager
    def catching(self, label: str) -> Iterator[None]:
        """Compile launches instead of running them, and add `label` to their users."""
        from triton.backends.compiler import GPUTarget
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

        target = GPUTarget("cuda", self.capability, 32)
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

    def used_by(self, label: str) -> list[Kernel]:
        """Return the kernels of a call, in the order of their launch."""
        return [kernel for kernel in self.kernels.values() if label in kernel.users]


def _kernel(compiled: Any, log: str) -> Kernel:
    """Return a kernel as ptxas describes it; a log without a description is an error."""
    used = re.search(r"Used (\d+) registers", log)
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill", log)
    found = compiled.metadata
    if not used or not frame:
        raise ValueError(f"ptxas said nothing of {found.name}: its log was {log.strip()[:200]!r}")
    stack, stores, loads = (int(number) for number in frame.groups())
    wgmma = compiled.asm["ptx"].count("wgmma.mma_async")
    return Kernel(found.name, found.num_warps, int(used[1]), stores + loads, stack, found.shared, wgmma)


def compile_all(args: Options) -> tuple[Compiler, list[tuple[str, ...]]]:
    """Compile the kernels of every call; return them and the calls' labels.

    Of all schemes those that the backend refuses are left out; one that is named is an error.
    """
    # The kernels are imported as for a GPU; then the backend is told to accept tensors on the CPU, which none touches.
    import_module("relpos_fairseq.attention.triton.fused_attention")
    import_module("relpos_fairseq.attention.triton.refusal").interpreted = lambda: True
    compiler, labels = Compiler(args.capability), []
    for name, dtype, dim, mask in itertools.product(args.schemes, args.dtypes, args.head_dims, args.masks):
        inputs = _training_call(name, dtype, dim, mask, args)
        if problem := backend.refusal(inputs):
            if not args.all:
                raise ValueError(f"--schemes {name}: attention backend triton cannot evaluate {problem}")
            print(f"{name}: triton cannot evaluate {problem}", flush=True)
            continue
        labels.append((name, dtype, str(dim), mask))
        with compiler.catching(" ".join(labels[-1])):
            backend.attend(inputs).sum().backward()
    return compiler, labels


def _training_call(name: str, dtype: str, dim: int, mask: str, args: Options) -> AttentionInputs:
    """Return a call of attention whose queries, keys, values and tables want gradients."""
    shape = (1, 2, args.length, dim, args.position_clip_distance)
    setting = AttentionSetting(*shape, mask == "causal", getattr(torch, dtype), torch.device("cpu"))
    scheme = SchemeCandidate(name, setting, "triton")
    inputs = scheme.call(*(part.detach().requires_grad_() for part in scheme.inputs()))
    if mask == "padding":
        inputs = replace(inputs, key_padding=torch.zeros(1, args.length, dtype=torch.bool))
    return replace(inputs, dropout=0.1) if mask == "dropout" else inputs


def kernel_table(compiler: Compiler, labels: list[tuple[str, ...]]) -> str:
    """Return a table: a row for each call, a column for each kernel."""
    by_call = {label: compiler.used_by(" ".join(label)) for label in labels}
    columns = list(dict.fromkeys(kernel.name for found in by_call.values() for kernel in found))
    lines = []
    for label, found in by_call.items():
        cells = ("; ".join(k.cell(compiler.capability) for k in found if k.name == name) or "-" for name in columns)
        lines.append([f"`{label[0]}`", *label[1:], *cells])
    heads = [column.removesuffix("_kernel") for column in columns]
    return table(["scheme", "type", "head_dim", "mask", *heads], lines)
