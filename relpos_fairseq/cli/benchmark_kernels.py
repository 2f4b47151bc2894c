"""What do the Triton kernels need of a GPU?  Compiles them for it, whether there is one or not.

    relpos benchmark kernels                                # every scheme, for sm_90
    relpos benchmark kernels --schemes m4,shaw --head-dims 64 --dtypes bfloat16
    relpos benchmark kernels --write examples/benchmarks/README.md

Every scheme's forward and backward pass is led through the backend, whose launches are caught and
compiled.  A cell is registers of a thread, warps and KiB of shared memory of a program; what spills
registers to memory or does not fit is bold, and the command's last line and status are an error.
"""

import argparse
import logging
from collections.abc import Sequence
from pathlib import Path

HELP = "what the Triton kernels need of a GPU, found by compiling them"
CAPABILITIES = (80, 86, 89, 90, 100, 120)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--schemes", default="all", help="names separated by commas, or all")
    add("--dtypes", default="bfloat16,float32", help="of bfloat16, float16, float32")
    add("--head-dims", default="64,128", help="numbers separated by commas")
    add("--masks", default="both", help="of both, causal, padding, dropout")
    add("--clip", type=int, default=16, help="0: unclipped")
    add("--length", type=int, default=512, help="of the call that is compiled")
    add("--capability", type=int, default=90, choices=CAPABILITIES)
    add("--write", type=Path, metavar="FILE", help="put the table into a page")
    add("--csv", type=Path, metavar="FILE", help="one row a kernel")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    logging.basicConfig(level=logging.WARNING)  # before fairseq is imported, which reports more
    from relpos_fairseq.benchmarks.kernels import benchmark

    benchmark(args)
