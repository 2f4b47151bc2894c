"""Options that benchmarks have in common."""

import argparse
from pathlib import Path

INTERRUPTED = "interrupted; rows are kept by --csv FILE: add --resume to continue, or they are lost"


def add_device(parser: argparse._ActionsContainer) -> None:
    """Add where and in which type candidates run."""
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])


def add_output(parser: argparse.ArgumentParser, rounds: int, seconds: float) -> None:
    """Add how long is measured, and what is written."""
    how = parser.add_argument_group("how")
    how.add_argument("--rounds", type=int, default=rounds, help="samples of each (%(default)s)")
    how.add_argument("--seconds", type=float, default=seconds, help="of a column (%(default)s)")
    how.add_argument("--threads", type=int, help="of torch; default: its own choice")
    out = parser.add_argument_group("what is written")
    out.add_argument("--csv", type=Path, help="all rows, as they come")
    out.add_argument("--resume", action="store_true", help="measure what --csv does not have yet")
    out.add_argument("--write", type=Path, help="put the tables into this markdown file")
