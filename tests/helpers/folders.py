"""What the tests of preparation share: commands in this process, folders to be compared."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from relpos_fairseq.engine.command import run_command


def contents(folder: Path, *but: str) -> dict[str, bytes]:
    """Every file's bytes, by its path; `but` names path parts that are left out."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not set(path.relative_to(folder).parts) & set(but)
    }


def parsed(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Read a subcommand's arguments; `command` is its file in cli/."""
    parser = argparse.ArgumentParser()
    command_of(command).add_arguments(parser)
    return parser.parse_args(arguments)


def command_of(name: str) -> ModuleType:
    return importlib.import_module(f"relpos_fairseq.cli.{name}")


def run(command: str, arguments: Sequence[object]) -> None:
    """Run a subcommand in this process; its errors are exceptions."""
    given = [str(argument) for argument in arguments]
    command_of(command).run(parsed(command, given), given)


def command_status(command: str, arguments: Sequence[object]) -> int:
    """Run a subcommand in this process; returns its exit status."""
    return run_command(lambda given: run(command, given), arguments)


def prepare(name: str, arguments: Sequence[object]) -> None:
    run(f"prepare_{name}", arguments)


def prepare_status(name: str, arguments: Sequence[object]) -> int:
    return command_status(f"prepare_{name}", arguments)
