"""Compile every scheme's Triton kernels for a GPU, and report registers, shared memory and spills."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# ---- What Triton's kernels need of a GPU, found by compiling them for it where there is none.
# Launches are caught and compiled instead of run, with the very arguments, blocks and warps that the
# launching code chose; ptxas comes with Triton and says registers and spills.


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


# ---- What Triton's kernels need of a GPU, as a table: every scheme's, compiled for it.


DTYPES = ("bfloat16", "float16", "float32")
MASKS = ("both", "causal", "padding", "dropout")
KEY = "triton kernels"


def benchmark(args: argparse.Namespace) -> None:
    """Compile, print and write; a kernel that spills is an error."""
    check_arguments(args)
    with tempfile.TemporaryDirectory(prefix="kernels_") as cache:
        start_compiling(cache)
        compiler, labels = compile_all(args)
    import triton

    from relpos_fairseq.benchmarks.measurement import write_csv, write_section

    kernels = list(compiler.kernels.values())
    faulty = sum(bool(kernel.faults(args.capability)) for kernel in kernels)
    most = max(kernel.registers for kernel in kernels)
    text = (
        f"sm_{args.capability}, Triton {triton.__version__}, T = S = {args.length}, "
        f"clip {args.clip}: {len(kernels)} kernels compiled, at most {most} registers; "
        f"{faulty} spill or do not fit.\n\n{kernel_table(compiler, labels)}"
    )
    print(text, flush=True)
    if args.write:
        write_section(args.write, KEY, text)
    if args.csv:
        write_csv(args.csv, rows_of(compiler))
    if faulty:
        raise ValueError(f"{faulty} kernels spill registers or do not fit: their cells are bold")


def check_arguments(args: argparse.Namespace) -> None:
    """Turn lists into lists, and refuse what cannot be."""
    for name, allowed in (("dtypes", DTYPES), ("masks", MASKS)):
        given = getattr(args, name).split(",")
        if unknown := sorted(set(given) - set(allowed)):
            raise ValueError(f"--{name}: unknown {', '.join(unknown)}: choose of {allowed}")
        setattr(args, name, given)
    numbers = args.head_dims.split(",")
    if not all(number.isdigit() and int(number) for number in numbers):
        raise ValueError(f"--head-dims must be positive numbers, got {args.head_dims}")
    args.head_dims = [int(number) for number in numbers]
    if find_spec("triton") is None:
        raise ValueError("the package triton is not installed: pip install triton")


def compile_all(args: argparse.Namespace) -> tuple[Compiler, list[tuple[str, ...]]]:
    """Compile the kernels of every call; return them and the calls' labels."""
    from relpos_fairseq.benchmarks.workload import schemes_for, schemes_of

    # An unknown one is refused before minutes of compiling.
    names = schemes_of(args.schemes, schemes_for(attention=True))
    compiler, labels = Compiler(args.capability), []
    for name in names:
        for dtype in args.dtypes:
            for dim in args.head_dims:
                for mask in args.masks:
                    label = (name, dtype, str(dim), mask)
                    with compiler.catching(" ".join(label)):
                        _train(name, dtype, dim, mask, args)
                    labels.append(label)
    return compiler, labels


def _train(name: str, dtype: str, dim: int, mask: str, args: argparse.Namespace) -> None:
    """Run a forward and backward pass whose kernels are compiled and not run."""
    import torch

    from relpos_fairseq.attention import triton as backend
    from relpos_fairseq.benchmarks.candidates import SchemeCandidate
    from relpos_fairseq.benchmarks.workload import AttentionSetting

    # Kernels are made as for a GPU before tensors on the CPU, which none will touch, are let in.
    import_module("relpos_fairseq.attention.triton.fused_attention")
    import_module("relpos_fairseq.attention.triton.refusal").interpreted = lambda: True
    length, cpu = args.length, torch.device("cpu")
    shape = (1, 2, length, dim, args.clip)
    setting = AttentionSetting(*shape, mask == "causal", getattr(torch, dtype), cpu)
    scheme = SchemeCandidate(name, setting, "triton")
    leaves = [part.detach().requires_grad_() for part in scheme.inputs()]
    inputs = scheme.call(*leaves)
    if mask == "padding":
        inputs = replace(inputs, key_padding=torch.zeros(1, length, dtype=torch.bool))
    if mask == "dropout":
        inputs = replace(inputs, dropout=0.1)
    problem = backend.refusal(inputs)
    if problem:
        raise ValueError(f"--schemes {name}: attention backend triton cannot evaluate {problem}")
    backend.attend(inputs).sum().backward()


def kernel_table(compiler: Compiler, labels: list[tuple[str, ...]]) -> str:
    """Return a table: a row a call, a column a kernel."""
    from relpos_fairseq.benchmarks.measurement import table

    by_call = {label: compiler.used_by(" ".join(label)) for label in labels}
    columns = list(dict.fromkeys(kernel.name for found in by_call.values() for kernel in found))
    lines = []
    for label, found in by_call.items():
        cells = (
            "; ".join(_cell(k, compiler.capability) for k in found if k.name == column) or "-" for column in columns
        )
        lines.append([f"`{label[0]}`", *label[1:], *cells])
    heads = [column.removesuffix("_kernel") for column in columns]
    return table(["scheme", "type", "head_dim", "mask", *heads], lines)


def _cell(kernel: Kernel, capability: int) -> str:
    """Return registers, warps, shared memory, and what is wrong."""
    text = f"{kernel.registers} ({kernel.warps}w, {kernel.shared / 1024:.0f}K)"
    faults = kernel.faults(capability)
    return f"{text} **{', '.join(faults)}**" if faults else text


def rows_of(compiler: Compiler) -> list[dict]:
    """Return a row a kernel, for a CSV file."""
    return [
        {
            "kernel": kernel.name,
            "warps": kernel.warps,
            "registers": kernel.registers,
            "spilled": kernel.spilled,
            "stack": kernel.stack,
            "shared": kernel.shared,
            "wgmma": kernel.matrix_products,
            "faults": "; ".join(kernel.faults(compiler.capability)),
            "calls": "; ".join(kernel.users),
        }
        for kernel in compiler.kernels.values()
    ]
