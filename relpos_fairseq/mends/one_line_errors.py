"""A wrong flag ends under fifty lines of traceback, which say nothing of the flag."""

import linecache
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

PACKAGE = str(Path(__file__).resolve().parents[1])
ALL = "RELPOS_TRACEBACK"  # 1: every traceback is shown


def print_errors_in_one_line() -> None:
    """Leave out the traceback of errors that this package raises about its input."""
    original = sys.excepthook

    def hook(kind: type, error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, ValueError) and is_about_input(trace) and not os.environ.get(ALL):
            print(f"{kind.__name__}: {error}", file=sys.stderr, flush=True)
        else:
            original(kind, error, trace)

    sys.excepthook = hook
    # hydra prints what it catches itself, unless it is told to let it through.
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")


def is_about_input(trace: TracebackType | None) -> bool:
    """Whether a statement `raise` of this package ended the program, and no bug."""
    frames = traceback.extract_tb(trace)
    if not frames or not frames[-1].filename.startswith(PACKAGE):
        return False
    line = linecache.getline(frames[-1].filename, frames[-1].lineno or 0)
    return line.lstrip().startswith("raise ")
