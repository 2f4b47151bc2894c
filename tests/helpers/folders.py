"""What the tests of preparation share: commands in this process, folders to be compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.commands import relpos, relpos_job
from relpos_fairseq.cli.command import parse
from relpos_fairseq.cli.main import load
from relpos_fairseq.io import records

WRITTEN = (records.STAMPS, records.RECORDS)


def contents(folder: Path, *but: str) -> dict[str, bytes]:
    """Every file's bytes, by its path, without the records of who wrote it; `but` names path parts to leave out too."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not set(path.relative_to(folder).parts) & set(but) and path.parts[-2:] != WRITTEN
    }


def parsed(name: str, arguments: Sequence[str]) -> object:
    """Read the arguments of a subcommand, such as `prepare mlm`."""
    return parse(load(name), f"relpos {name}", arguments)


def prepare(name: str, arguments: Sequence[object]) -> None:
    """Run `relpos prepare NAME` in this process; its errors are exceptions."""
    relpos_job("prepare", name, *arguments)


def prepare_status(name: str, arguments: Sequence[object]) -> int:
    """Run `relpos prepare NAME` in this process; return its exit status."""
    return relpos("prepare", name, *arguments)


def refused(capsys: pytest.CaptureFixture, name: str, arguments: Sequence[object]) -> str:
    """Run `relpos prepare NAME`, which takes no such input; the line that says so, beside warnings at most."""
    capsys.readouterr()
    assert prepare_status(name, arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    (error,) = (line for line in lines if not line.startswith("warning: "))
    assert error.startswith("error: ")
    return error
