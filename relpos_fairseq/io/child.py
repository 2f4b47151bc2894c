"""Run a module as `python -m` does, but none of the working folder, and no longer than the process that began it.

    python child.py MODULE [ARGUMENT ...]

`command_of` returns such a command. This file imports nothing of the package.
"""

import contextlib
import ctypes
import importlib
import os
import runpy
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux' prctl


def command_of(module: str) -> list[str]:
    """Return the command that runs a module of this Python's packages; arguments follow."""
    return [sys.executable, os.path.abspath(__file__), module]


def main() -> None:
    """Run the module that the first argument names."""
    here = os.path.dirname(os.path.abspath(__file__))
    root = os.path.dirname(os.path.dirname(here))
    sys.path[:] = [path for path in sys.path if path and os.path.abspath(path) != here]
    if root not in sys.path:  # a copy that is not installed: this package is taken of it, others first of elsewhere
        sys.path.insert(0, root)
        importlib.import_module(os.path.basename(os.path.dirname(here)))
        sys.path.append(sys.path.pop(0))
    with contextlib.suppress(OSError, AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    name = sys.argv.pop(1)
    runpy.run_module(name, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
