"""What Triton's kernels need of a GPU, as a table: every scheme's, compiled for it."""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec

from relpos_fairseq.benchmarks.ptxas import Compiler, Kernel, start_compiling

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

    from relpos_fairseq.benchmarks.report import write_section
    from relpos_fairseq.benchmarks.rows import write_csv

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
    from relpos_fairseq.benchmarks.checks import schemes_of
    from relpos_fairseq.benchmarks.settings import schemes_for

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
    from relpos_fairseq.benchmarks.scheme_candidate import SchemeCandidate
    from relpos_fairseq.benchmarks.settings import AttentionSetting

    # Kernels are made as for a GPU before tensors on the CPU, which none will touch, are let in.
    import_module("relpos_fairseq.attention.triton.function")
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
    from relpos_fairseq.benchmarks.report import table

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
