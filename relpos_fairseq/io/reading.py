"""Read files that people give: one reader a format, whose every failure is one line with the file, place and remedy.

    with reading(path, "a table of merges"):        # whatever a library raises or prints becomes a UserError
        merges = library.load(path)
    counts = read_json(path, dict[str, int])        # a value that has this type, all the way down

Nothing else of this package calls a library's loader (tests/io/test_reading.py).
"""

import errno
import functools
import gzip
import json
import math
import os
import re
import stat
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from relpos_fairseq.io.errors import UserError

Count = Annotated[int, "from 0"]
Positive = Annotated[int, "from 1"]
Amount = Annotated[float, "from 0"]
Number = Annotated[float, "or none: a loss that diverged, a correlation of equal predictions"]
EXPONENT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d{1,3}$")  # PyYAML takes 1e-4 for text; 12e45678 names a commit
Noted = Annotated[object, "with no whole number below 0, and no fraction that is none"]  # at any depth
REQUIRED: Any = object()  # as a default: the file must be there
REMEDY = "copy it again or give another"
SHOWN = 200  # characters of a library's own words
NODES = 1_000_000  # of a YAML file after its aliases are followed, so that no short file fills the memory
_SYSTEM = (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EIO, errno.ELOOP, errno.EMFILE)


@contextmanager
def reading(path: str | Path, kind: str, remedy: str = REMEDY, error: type[UserError] = UserError) -> Iterator[None]:
    """Turn whatever reading a file raises, a library's SystemExit too, into one `error` that names the file.

    What is raised about the file system, an absent package or Ctrl-C passes. Only a library's reader and checks of
    what it returned belong inside: work on the values would be reported as the file's fault.

    Args:
        path: the file, as the user gave it.
        kind: what it should be, with its article: "a dictionary of fairseq".
        remedy: what to do about it.
        error: the class that is raised.
    """
    try:
        yield
    except (UserError, ModuleNotFoundError) as found:
        if isinstance(found, ModuleNotFoundError) or str(path) in str(found):
            raise
        raise (type(found) if error is UserError else error)(f"{path}: {found}") from found
    except OSError as found:
        if found.errno not in _SYSTEM:
            raise error(f"{path} is not {kind} ({_reason(found)}): {remedy}") from found
        if found.filename is None:
            found.filename = str(path)
        raise
    except BaseException as found:
        if not isinstance(found, Exception | SystemExit) and type(found).__name__ != "PanicException":  # of Rust
            raise
        raise error(f"{path} is not {kind} ({_reason(found)}): {remedy}") from found


def _reason(error: BaseException) -> str:
    """Return a library's words for what is wrong, in one line; the kind of error where they say too little alone."""
    words = " ".join(str(error).split())
    words = words if len(words) <= SHOWN else f"{words[:SHOWN]}..."
    if isinstance(error, UnicodeDecodeError):
        return f"no UTF-8 at byte {error.start:,}"
    if isinstance(error, (ValueError, EOFError)) and words:
        return words
    if isinstance(error, (RecursionError, MemoryError)):
        return "nested too deeply" if isinstance(error, RecursionError) else "it asks for more memory than there is"
    return f"{type(error).__name__}: {words}" if words else type(error).__name__


def ordinary(path: str | Path) -> Path:
    """Return a path of no pipe and no device, which may have no end; a pipe of the shell's (`<(...)`) is one's wish.

    Raises:
        UserError: it is one.
        OSError: there is nothing.
    """
    mode, by_shell = os.stat(path).st_mode, str(path).startswith(("/dev/", "/proc/"))
    if stat.S_ISFIFO(mode) and by_shell or str(path) == os.devnull or stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return Path(path)
    raise UserError(f"{path} is a pipe, socket or device, which may have no end: give an ordinary file")


def read_text(path: str | Path, kind: str = "a text") -> str:
    """Return the text of a UTF-8 file, without a mark of its byte order."""
    with reading(path, kind, "convert it to UTF-8, or copy it again"):
        return ordinary(path).read_bytes().decode("utf-8-sig")


def read_json(
    path: str | Path,
    wanted: Any = object,
    default: Any = REQUIRED,
    remedy: str = REMEDY,
    error: type[UserError] = UserError,
) -> Any:
    """Return the value of a JSON file, which has the type `wanted`.

    Args:
        path: the file.
        wanted: a type as `of_type` reads it.
        default: what is returned where there is no file.
        remedy: what to do about a file that is broken.
        error: the class that is raised.

    Raises:
        UserError: it is not JSON, names a key twice, or has another type; the message has the place.
        FileNotFoundError: it is absent, and no default is given.
    """
    try:
        with reading(path, "JSON" if wanted is object else "the JSON that is expected", remedy, error):
            return parse_json(ordinary(path).read_bytes(), wanted)
    except (FileNotFoundError, NotADirectoryError):
        if default is REQUIRED or os.path.lexists(path):
            raise
        return default


def read_json_lines(path: str | Path, wanted: Any = object) -> list:
    """Return the values of a file, or one of gzip's (`.gz`), with one in JSON a line; see `read_json`."""
    found = []
    with reading(path, "lines of JSON"):
        content = ordinary(path).read_bytes()
        content = gzip.decompress(content) if Path(path).suffix == ".gz" else content
        for number, line in enumerate(content.split(b"\n"), 1):
            if line.strip():
                try:
                    found.append(parse_json(line, wanted))
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"line {number}: {_reason(error)}") from error
    return found


def parse_json(content: str | bytes, wanted: Any = object) -> Any:
    """Return the value of a JSON text that has the type `wanted`; a ValueError or RecursionError says what is wrong."""
    text = content.decode("utf-8-sig") if isinstance(content, bytes) else content
    value = json.loads(text, object_pairs_hook=_unique)
    if "\\u" in text:  # half of a pair of surrogates is no character, and could not be written
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start]
            raise ValueError(f"\\u{ord(half):04x} is half of a character") from None
    return of_type(value, wanted)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = _twice(name for name, _ in pairs)
        raise ValueError(f"{twice!r} is named twice")
    return found


def _twice(names: Iterable[Any]) -> Any:
    """Return the first name that was there before, or None."""
    seen = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def read_yaml(path: str | Path, wanted: Any = object) -> Any:
    """Return the value of a YAML file that has the type `wanted`; see `read_json`."""
    import yaml

    class Loader(yaml.SafeLoader):
        """YAML's plain types, 1e-4 a number as in YAML 1.2, and no key twice."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict:
            written = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
            if (twice := _twice((key.tag, key.value) for key in written)) is not None:
                raise ValueError(f"line {node.start_mark.line + 1}: {twice[1]!r} is named twice below it")
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", EXPONENT, list("-+.0123456789"))
    with reading(path, "the YAML that is expected"):
        text = ordinary(path).read_bytes().decode("utf-8-sig")
        value = yaml.load(text, Loader)
        _count(value, {})
        return of_type(value, wanted)


def _count(value: Any, known: dict[int, int | None]) -> int:
    """Return how many values a value holds if each alias counts; a ValueError for too many, or for an endless one."""
    if not isinstance(value, (dict, list)):
        return 1
    if id(value) not in known:
        known[id(value)] = None
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_count(part, known) for part in parts)
    count = known[id(value)]
    if count is None or count > NODES:
        raise ValueError("an alias holds itself" if count is None else f"its aliases make more than {NODES:,} values")
    return count


def of_type(value: Any, wanted: Any, place: str = "") -> Any:
    """Return a value of JSON or YAML that has a type; a ValueError names the place, what is there and what belongs.

    Args:
        value: what was read.
        wanted: object (anything), None, bool, int, float (finite; a whole number too), str, list[T], tuple[A, B] (a
            list of just these), dict[str, T], a TypedDict (further keys are allowed), Literal[...], or a union; Count
            and the types beside it; Annotated[A, B] for what is of both.
        place: where the value stands, for the message: "data/0/title".
    """
    wrong = _wrong(value, wanted, (place,) if place else ())
    if wrong is not None:
        at, found, belongs = wrong
        raise ValueError(f"{'/'.join(map(str, at)) or 'the whole'} is {_shown(found)}, and must be {belongs}")
    return value


Place = tuple[object, ...]  # names and numbers from the whole to a part
Wrong = tuple[Place, Any, str]  # the place, what is there, and what belongs there


def _wrong(value: Any, wanted: Any, place: Place) -> Wrong | None:
    """Return the first thing in a value that has another type than it should."""
    if (plain := _PLAIN.get(wanted)) is not None:  # first, since most values are so
        return None if plain[1](value) else (place, value, plain[0])
    origin, parts, is_record = _parts(wanted)
    if wanted in (object, Any):
        return None
    if origin is Annotated:
        return next((wrong for one in parts if (wrong := _wrong(value, one, place)) is not None), None)
    if origin in (types.UnionType, typing.Union):
        return _of_none(value, parts, place)
    if origin is typing.Literal:
        return None if value in parts else (place, value, f"one of {', '.join(map(str, parts))}")
    if is_record:
        return _of_record(value, wanted, place)
    name, is_right = _PLAIN[origin]
    if not is_right(value):
        return place, value, name
    if origin is tuple:
        if len(value) != len(parts):
            return place, value, f"a list of {len(parts)}"
        return _first(zip(value, parts, range(len(parts)), strict=True), place)
    if origin is list:
        return _first(((one, parts[0], number) for number, one in enumerate(value)), place)
    if origin is dict:
        strange = next((wrong for key in value if (wrong := _wrong(key, parts[0], place)) is not None), None)
        if strange is not None:
            return place, strange[1], f"{strange[2]} as a key"
        return _first(((one, parts[1], key) for key, one in value.items()), place)
    return None


def _of_none(value: Any, parts: tuple, place: Place) -> Wrong | None:
    """Return what is wrong with a value that fits none of several types: within it if one fits its outside."""
    found = []
    for part in parts:
        if (wrong := _wrong(value, part, place)) is None:
            return None
        found.append(wrong)
    inner = next((one for one in found if one is not None and one[0] != place), None)
    return inner or (place, value, " or ".join(one[2] for one in found if one is not None))


_ABSENT = object()


def _of_record(value: Any, wanted: Any, place: Place) -> Wrong | None:
    if not isinstance(value, dict):
        return place, value, "an object"
    absent = next((name for name in sorted(wanted.__required_keys__) if name not in value), None)
    if absent is not None:
        return (*place, absent), _ABSENT, "there"
    types_of = _types_of(wanted)
    return _first(((value[name], part, name) for name, part in types_of.items() if name in value), place)


_types_of = functools.cache(functools.partial(typing.get_type_hints, include_extras=True))


@functools.cache
def _parts(wanted: Any) -> tuple[Any, tuple, bool]:
    return typing.get_origin(wanted), typing.get_args(wanted), typing.is_typeddict(wanted)


def _first(parts: Iterable[tuple[Any, Any, object]], place: Place) -> Wrong | None:
    """Return what is wrong with the first of a value's parts, each with its type and its name or number."""
    for value, wanted, part in parts:
        if (wrong := _wrong(value, wanted, (*place, part))) is not None:
            return wrong
    return None


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "missing"
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (ValueError, TypeError, RecursionError):
        text = type(value).__name__
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_noted(value: Any) -> bool:
    if isinstance(value, (dict, list)):
        return all(map(_is_noted, value.values() if isinstance(value, dict) else value))
    return value >= 0 if isinstance(value, int) else not isinstance(value, float) or math.isfinite(value)


_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    types.NoneType: ("null", lambda value: value is None),
    None: ("null", lambda value: value is None),
    bool: ("true or false", lambda value: isinstance(value, bool)),
    int: ("a whole number", _is_whole),
    float: ("a number", _is_number),
    Count: ("a whole number from 0", lambda value: _is_whole(value) and value >= 0),
    Positive: ("a whole number from 1", lambda value: _is_whole(value) and value >= 1),
    Amount: ("a number from 0", lambda value: _is_number(value) and value >= 0),
    Number: ("a number or NaN", lambda value: isinstance(value, float) or _is_whole(value)),
    Noted: ("a value whose counts are from 0", _is_noted),
    str: ("a text", lambda value: isinstance(value, str)),
    list: ("a list", lambda value: isinstance(value, list)),
    tuple: ("a list", lambda value: isinstance(value, list)),
    dict: ("an object", lambda value: isinstance(value, dict)),
}
