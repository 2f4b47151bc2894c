"""Declare a command's options: fields with default, help and bounds, and what a path among them is for."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any


@dataclasses.dataclass(frozen=True)
class Role:
    """What a command does with a path that it is given."""

    what: str  # "file", "folder", or "file or folder"
    reads: bool = False
    writes: bool = False  # with `reads` too: a folder of work or a page, which is gone on with or renewed
    may_be_text: bool = False  # whether it may be the text itself


InFile = Annotated[Path, Role("file", reads=True)]
InFolder = Annotated[Path, Role("folder", reads=True)]
InPath = Annotated[Path, Role("file or folder", reads=True)]
InText = Annotated[str, Role("file", reads=True, may_be_text=True)]
OutFile = Annotated[Path, Role("file", writes=True)]
OutFolder = Annotated[Path, Role("folder", writes=True)]
OutPath = Annotated[Path, Role("file or folder", writes=True)]
WorkFile = Annotated[Path, Role("file", reads=True, writes=True)]
WorkFolder = Annotated[Path, Role("folder", reads=True, writes=True)]


def option(default: Any, help: str | None = None, **how: Any) -> Any:
    """Declare an option with a default.

    Args:
        default: its value where it is not given.
        help: its line in `--help`, in which `%(default)s` stands for the default.
        how: further arguments of `add_argument`; `group` is the heading that it stands under, options with
            the same `exclusive` cannot be given together, and `least`, `above` and `most` bound its values.
    """
    return _field({"default": default, "help": help, **how})


def required(help: str | None = None, **how: Any) -> Any:
    """Declare an option that must be given."""
    return _field({"required": True, "help": help, **how})


def flag(help: str | None = None, **how: Any) -> Any:
    """Declare an option without a value: True where it is given."""
    return _field({"action": "store_true", "default": False, "help": help, **how})


def argument(help: str | None = None, **how: Any) -> Any:
    """Declare an argument that is given by its place."""
    return _field({"positional": True, "help": help, **how})


def _field(how: dict[str, Any]) -> Any:
    if "default" in how:
        return dataclasses.field(default_factory=lambda: how["default"], metadata=how)
    return dataclasses.field(metadata=how)
