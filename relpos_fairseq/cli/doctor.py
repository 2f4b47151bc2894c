"""Say on one screen what this installation consists of, and whether it works.

It names versions, compiler and instruction set, which backend serves what here and why another
does not, holds the kernel for CPUs against fp64, and lists the verdicts on GPUs.  Status 1 where
something is wrong.  Paste what it prints into an issue.
"""

import argparse
from collections.abc import Sequence

HELP = "what is installed here, and whether it works"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="without the self-check (seconds)")


def run(args: argparse.Namespace, argv: Sequence[str]) -> int:
    from relpos_fairseq.doctor import examine

    return examine(args.quick)
