#!/usr/bin/env python
"""What do the Triton kernels need of a GPU?  Compiles them for it, whether there is one or not.

    python scripts/triton_report.py                                # every scheme, for sm_90
    python scripts/triton_report.py --schemes m4,shaw --head-dims 64 --dtypes bfloat16
    python scripts/triton_report.py --write examples/benchmarks/README.md

Every scheme's forward and backward pass is led through the backend, whose launches are caught and
compiled.  A cell is registers of a thread, warps and KiB of shared memory of a program; what spills
registers to memory or does not fit is bold, and the command's last line and status are an error.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from relpos_fairseq.benchmarks.ptxas import SHARED, Compiler, Kernel, prepare
from relpos_fairseq.engine.command import run_command

logging.basicConfig(level=logging.WARNING)

DTYPES = ("bfloat16", "float16", "float32")
KEY = "triton kernels"


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line.

    Raises:
        ValueError: a value that cannot be.
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--schemes", default="all", help="names separated by commas, or all")
    parser.add_argument("--dtypes", default="bfloat16,float32", help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--head-dims", default="64,128", help="numbers separated by commas")
    parser.add_argument("--masks", default="both", help="of both, causal, padding, dropout")
    parser.add_argument("--clip", type=int, default=16, help="0: unclipped")
    parser.add_argument("--length", type=int, default=512, help="of the call that is compiled")
    parser.add_argument("--capability", type=int, default=90, choices=sorted(SHARED))
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into a page")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="one row a kernel")
    args = parser.parse_args(argv)
    for name, allowed in (("dtypes", DTYPES), ("masks", ("both", "causal", "padding", "dropout"))):
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
    return args


def compile_all(args: argparse.Namespace) -> tuple[Compiler, list[tuple[str, ...]]]:
    """Compile the kernels of every call; returns them and the calls' labels."""
    from relpos_fairseq.benchmarks.settings import INPUT_SCHEMES
    from relpos_fairseq.schemes import parse_hybrid, scheme_names

    names = args.schemes.split(",")
    if args.schemes == "all":
        names = ["none", *(name for name in scheme_names() if name not in INPUT_SCHEMES)]
    for name in names:
        parse_hybrid(name)  # an unknown one is refused before minutes of compiling
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
    """A forward and backward pass whose kernels are compiled and not run."""
    import torch

    from relpos_fairseq.attention import triton as backend
    from relpos_fairseq.benchmarks.candidates import Scheme
    from relpos_fairseq.benchmarks.settings import Setting

    # Kernels are made as for a GPU before tensors on the CPU, which none will touch, are let in.
    import_module("relpos_fairseq.attention.triton.function")
    import_module("relpos_fairseq.attention.triton.refusal").interpreted = lambda: True
    length, cpu = args.length, torch.device("cpu")
    setting = Setting(1, 2, length, dim, args.clip, mask == "causal", getattr(torch, dtype), cpu)
    scheme = Scheme(name, setting, "triton")
    leaves = [part.detach().requires_grad_() for part in scheme.inputs()]
    inputs = scheme.call(*leaves)
    if mask == "padding":
        object.__setattr__(inputs, "key_padding", torch.zeros(1, length, dtype=torch.bool))
    if mask == "dropout":
        object.__setattr__(inputs, "dropout", 0.1)
    problem = backend.refusal(inputs)
    if problem:
        raise ValueError(f"--schemes {name}: attention backend triton cannot evaluate {problem}")
    backend.attend(inputs).sum().backward()


def table(compiler: Compiler, labels: list[tuple[str, ...]]) -> str:
    """Markdown: a row a call, a column a kernel."""
    by_call = {label: compiler.used_by(" ".join(label)) for label in labels}
    columns = list(dict.fromkeys(kernel.name for found in by_call.values() for kernel in found))
    heads = [column.removesuffix("_kernel") for column in columns]
    lines = [
        "| scheme | type | head_dim | mask | " + " | ".join(heads) + " |",
        "|---" * (4 + len(columns)) + "|",
    ]
    for label, found in by_call.items():
        cells = [
            "; ".join(_cell(k, compiler.capability) for k in found if k.name == column) or "-"
            for column in columns
        ]
        lines.append(f"| `{label[0]}` | " + " | ".join((*label[1:], *cells)) + " |")
    return "\n".join(lines)


def _cell(kernel: Kernel, capability: int) -> str:
    """Registers, warps, shared memory, and what is wrong."""
    text = f"{kernel.registers} ({kernel.warps}w, {kernel.shared / 1024:.0f}K)"
    faults = kernel.faults(capability)
    return f"{text} **{', '.join(faults)}**" if faults else text


def rows_of(compiler: Compiler) -> list[dict]:
    """A row a kernel, for a CSV file."""
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


def run(argv: Sequence[str] | None) -> None:
    """Compile, print and write.

    Raises:
        ValueError: a bad argument, or a kernel that spills.
    """
    args = parse(argv)
    with tempfile.TemporaryDirectory(prefix="triton_report_") as cache:
        prepare(cache)
        compiler, labels = compile_all(args)
    import triton

    from relpos_fairseq.benchmarks.report import write_csv, write_section

    kernels = list(compiler.kernels.values())
    faulty = sum(bool(kernel.faults(args.capability)) for kernel in kernels)
    most = max(kernel.registers for kernel in kernels)
    text = (
        f"sm_{args.capability}, Triton {triton.__version__}, T = S = {args.length}, "
        f"clip {args.clip}: {len(kernels)} kernels compiled, at most {most} registers; "
        f"{faulty} spill or do not fit.\n\n{table(compiler, labels)}"
    )
    print(text)
    if args.write:
        write_section(args.write, KEY, text)
    if args.csv:
        write_csv(args.csv, rows_of(compiler))
    if faulty:
        raise ValueError(f"{faulty} kernels spill registers or do not fit: their cells are bold")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    return run_command(run, argv)


if __name__ == "__main__":
    sys.exit(main())
