"""fairseq's own commands, each in a fork of this process: fairseq is imported once."""

import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from relpos_fairseq.engine.forks import Fork, in_fork


def as_arguments(flags: dict[str, object]) -> list[str]:
    """Return flags, with `--` or without, as a command line's arguments.

    True or None: a flag without a value; False: none.
    """
    arguments = []
    for name, value in flags.items():
        if value is not False:
            arguments.append(f"--{name.removeprefix('--')}")
            if value is not None and value is not True:
                arguments.append(str(value))
    return arguments


def prepare_process() -> None:
    """Import what every command needs, with one thread: others would not survive a fork."""
    # Asking for a GPU must not start CUDA here: it would not survive a fork either.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    torch.set_num_threads(1)
    # As fairseq-train sets it, where nothing that was imported before it has set another.
    form = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
    logging.basicConfig(format=form, level=logging.INFO, stream=sys.stdout, force=True)
    for tool in ("train", "generate", "preprocess"):
        importlib.import_module(f"fairseq_cli.{tool}")


def fairseq(tool: str, arguments: Sequence[object], log: Path, threads: int = 1) -> Fork:
    """Run a command of fairseq (`train`, `generate`, ...) to its end; ToolError if it fails."""
    given = [f"fairseq-{tool}", *map(str, arguments)]

    def run() -> None:
        computing(threads)
        sys.argv = given
        print("+", " ".join(given), flush=True)
        importlib.import_module(f"fairseq_cli.{tool}").cli_main()

    return in_fork(run, log, given[0])


def computing(threads: int) -> None:
    """Set the threads of this process, in a child that computes."""
    import torch

    torch.set_num_threads(threads)


def device() -> list[str]:
    """Return --cpu where there is no GPU, as an argument."""
    import torch

    return [] if torch.cuda.is_available() else ["--cpu"]
