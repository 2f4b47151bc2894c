"""Print the table of all position schemes, made from the code.

--write FILE renews it between the markers in FILE, as in relpos_fairseq/schemes/README.md.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

HELP = "the table of all position schemes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--write", type=Path, metavar="FILE", help="renew the table in FILE")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    from relpos_fairseq.benchmarks.scheme_table import markdown, renew

    if args.write is None:
        print(markdown())
    else:
        renew(args.write)
