"""A command declared once: a dataclass whose fields are its options, from which parser and help are made.

    @command("average", "average checkpoints of one training")
    class Average:
        '''The text of --help.'''

        inputs: list[InPath] = required("checkpoints, or their one folder")
        last: int | None = option(None, "of a folder: the last N epochs' checkpoints", metavar="N")

        def run(self, argv: Sequence[str]) -> None: ...

A field's type says how its text is read: `bool` is a flag without a value, `list[T]` takes several values, and
`T | None` may be left out. A path's type says what the command does with it: `InFile`, `OutFolder`, ...; no command
writes over what it reads or has not written. Nothing here imports torch or fairseq, so every `--help` answers at once.
"""

import argparse
import copy
import dataclasses
import difflib
import inspect
import math
import operator
import os
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from relpos_fairseq.io.command import AGAIN
from relpos_fairseq.io.errors import UserError
from relpos_fairseq.io.files import check_outputs, check_replaceable, is_stream
from relpos_fairseq.io.options import Role

COMMANDS: dict[str, type] = {}  # the commands of the files that were imported, by their words


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, without its usage."""

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: .*?(--[^\s=]+)", message)
        known = [name for action in self._actions for name in action.option_strings or [str(action.metavar)]]
        close = difflib.get_close_matches(unknown[1], known, 1) if unknown else []
        if close:
            message += f": did you mean {close[0]}?"
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


class Layout(argparse.RawDescriptionHelpFormatter):
    """Help within 80 columns: paragraphs are filled anew, and commands, which are indented, go on after a backslash."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=28, width=min(80, shutil.get_terminal_size().columns))

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = (_shown(part, width) if part[:1] == " " else textwrap.fill(part, width) for part in text.split("\n\n"))
        return textwrap.indent("\n\n".join(parts), indent)


def _shown(commands: str, width: int) -> str:
    """Return indented lines of commands, those that are too wide in several lines."""
    lines = []
    for line in commands.splitlines():
        while len(line) > width:
            command, mark, remark = line.partition("  # ")
            if mark and len(command.rstrip()) + 2 < width:  # the remark goes before its command
                lines.append(f"    # {remark}")
                line = command.rstrip()
                continue
            cut = max(line.rfind(" --", 8, width - 2), line.rfind(" [", 8, width - 2))
            cut = cut if cut > 8 else line.rfind(" ", 8, width - 2)
            if cut <= 8:
                break
            lines.append(f"{line[:cut]} \\")
            line = f"        {line[cut + 1 :]}"
        lines.append(line)
    return "\n".join(lines)


def command(name: str, summary: str, interrupted: str = AGAIN, **parser: Any) -> Callable[[Any], Any]:
    """Register a class as a subcommand of `relpos`.

    Args:
        name: its words after `relpos`, such as `prepare wmt`.
        summary: its line in the overview.
        interrupted: the line that is printed after Ctrl-C and SIGTERM.
        parser: further arguments of the parser, such as `epilog`.
    """

    def register(cls: Any) -> Any:
        cls = dataclasses.dataclass(kw_only=True)(cls)
        cls.summary, cls.interrupted, cls.parser = summary, interrupted, parser
        COMMANDS[name] = cls
        return cls

    return register


def parser_of(cls: Any, program: str) -> Parser:
    """Make the parser of a command.

    Args:
        cls: a class that `command` registered.
        program: the command's name in its usage.
    """
    parser = Parser(prog=program, description=inspect.cleandoc(cls.__doc__), formatter_class=Layout, **cls.parser)
    add_options(parser, cls)
    return parser


def add_options(parser: argparse.ArgumentParser, cls: type) -> None:
    """Add the fields of a command's class to a parser, each under its heading."""
    places: dict[object, Any] = {}  # by heading, and by what options exclude each other
    for field in dataclasses.fields(cls):
        how = copy.deepcopy(dict(field.metadata))  # a default that is a list is this parser's own
        group, exclusive = how.pop("group", None), how.pop("exclusive", None)
        for name in ("positional", *BOUNDS):
            how.pop(name, None)
        place = group if exclusive is None else ("exclusive", exclusive)
        if place is not None and place not in places:
            made = parser.add_argument_group(group) if exclusive is None else parser.add_mutually_exclusive_group()
            places[place] = made
        if "type" not in how and how.get("action") != "store_true":
            how = reading_of(field.type) | how
            if how.get("action") == "append":  # a value each time
                how.pop("nargs", None)
        if (name := spelling(field)).startswith("--"):
            how = {"required": "default" not in how} | how
        places.get(place, parser).add_argument(name, **how)


def reading_of(annotation: Any) -> dict[str, Any]:
    """Return what `add_argument` needs to read values of a type: its reader, and `nargs` for a list."""
    reader, is_list, _ = _parts_of(annotation)
    reader = READERS.get(reader, reader)
    return {"nargs": "+", "type": reader} if is_list else {"type": reader}


def _parts_of(annotation: Any) -> tuple[Any, bool, Role | None]:
    """Return a field's type as what reads one value, whether there are several, and its role where it is a path."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        (annotation,) = (part for part in typing.get_args(annotation) if part is not type(None))
    is_list = typing.get_origin(annotation) is list
    if is_list:
        (annotation,) = typing.get_args(annotation)
    role = next((one for one in getattr(annotation, "__metadata__", ()) if isinstance(one, Role)), None)
    return annotation.__origin__ if role else annotation, is_list, role


def _number(text: str) -> float:
    """Read a number; one that is none or infinite fits no option."""
    if not math.isfinite(value := float(text)):
        raise argparse.ArgumentTypeError(f"must be a finite number, got {text}")
    return value


def _text(text: str) -> str:
    """Read a text in UTF-8, whatever the locale, in which Python has read the bytes."""
    with suppress(UnicodeEncodeError):  # no text of this locale's bytes, and so read already
        text = os.fsencode(text).decode(errors="surrogateescape")
    if wrong := re.search("[\ud800-\udfff]", text):
        raise argparse.ArgumentTypeError(f"is not UTF-8 at its character {wrong.start() + 1}")
    return text


def _integer(text: str) -> int:
    """Read a whole number that a processor's word holds."""
    try:
        value = int(text)
    except ValueError:
        value = 1 << 63
    if not -(1 << 63) <= value < 1 << 63:
        raise argparse.ArgumentTypeError(f"must be a whole number of at most 18 digits, got {text}")
    return value


READERS: dict[Any, Callable[[str], Any]] = {float: _number, int: _integer, str: _text}


def parse(cls: type, program: str, argv: Sequence[str]) -> Any:
    """Read a command's arguments; returns an instance of its class."""
    return cls(**vars(parser_of(cls, program).parse_intermixed_args(argv)))


def roles_of(cls: type) -> dict[str, Role]:
    """Return what a command does with each path that it is given, by its name on the command line."""
    return {spelling(field): role for field in dataclasses.fields(cls) if (role := _parts_of(field.type)[2])}


def spelling(field: dataclasses.Field) -> str:
    """Return a field's name on the command line."""
    return field.name if field.metadata.get("positional") else f"--{field.name.replace('_', '-')}"


def paths_of(given: Any) -> list[tuple[str, Path, Role]]:
    """Return the paths among a command's values, with their names on the command line and their roles."""
    found = []
    for field in dataclasses.fields(given):
        role, value = _parts_of(field.type)[2], getattr(given, field.name)
        if role is None:
            continue
        name = spelling(field)
        for number, path in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            if path is not None and len(str(path)) < 4096 and "\0" not in str(path):
                found.append((f"{name} {number}" if number else name, Path(path), role))
    return found


def check_there(name: str, path: Path, what: str) -> None:
    """Raise a UserError for a path that is read and is not there, or of another kind; `-` is standard input."""
    first = Path(str(path).split(os.pathsep)[0])  # of several data folders
    if what == "file" and str(path) != "-" and first.is_dir():
        raise UserError(f"{name} {path} is a folder: give a file")
    if what == "folder" and first.is_file():
        raise UserError(f"{name} {path} is a file: give a folder")
    if not first.exists() and str(path) != "-":
        raise UserError(f"{name} {path} does not exist: give a {what} that does")


def homes_of(given: Any) -> list[Path]:
    """Return the folders that a command writes into."""
    return [path for _, path, role in paths_of(given) if role.writes and role.what == "folder"]


BOUNDS = {"least": (">=", operator.ge), "above": ("above", operator.gt), "most": ("<=", operator.le)}


def check(given: Any) -> None:
    """Check a command's values and paths, before anything is imported that takes time.

    Raises:
        UserError: a value is outside of its option's bounds, what is read is not there, or an output is an input, or a
            file that the command has not written.
    """
    for field in dataclasses.fields(given):
        bounds = [(field.metadata[name], *how) for name, how in BOUNDS.items() if name in field.metadata]
        value = getattr(given, field.name) if bounds else None
        for one in value if isinstance(value, (list, tuple)) else [value]:
            if one is not None and not all(holds(one, bound) for bound, _, holds in bounds):
                must = " and ".join(f"{words} {bound}" for bound, words, _ in bounds)
                raise UserError(f"{spelling(field)} must be {must}, got {one}")
    found = paths_of(given)
    outputs = {name: path for name, path, role in found if role.writes and not role.reads}
    check_outputs(outputs, {name: path for name, path, role in found if role.reads and not role.writes})
    for name, path, role in found:
        if role.writes and role.what == "folder" and path.exists() and not path.is_dir():
            raise UserError(f"{name} {path} is a file: give a folder")
        if name in outputs and path.is_file() and not is_stream(path):
            check_replaceable(path)
        if role.reads and not role.writes and not role.may_be_text:
            check_there(name, path, role.what)


def whole_number(least: int) -> Callable[[str], int]:
    """Return a reader of integers that are not below `least`."""

    def read(text: str) -> int:
        if not text.lstrip("-").isdigit() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be a whole number >= {least}, got {text}")
        return int(text)

    return read


def numbers(text: str) -> list[int]:
    """Read integers that are joined by commas."""
    return [int(part) for part in text.split(",") if part.strip()]
