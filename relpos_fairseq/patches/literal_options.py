"""fairseq evaluates strings of a config as Python: a checkpoint's options can run any command."""

import ast
import functools
import os
import re
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

import fairseq

LONGEST = 100_000  # elements of a list that `*` and `+` make
SHOWN = 80
PACKAGE = Path(__file__).resolve().parents[1]
PLACE = os.path.dirname(os.path.dirname(os.path.abspath(fairseq.__file__)))
ROOTS = tuple(
    os.path.join(at, name, "") for at in {PLACE, os.path.realpath(PLACE)} for name in ("fairseq", "fairseq_cli")
)
# Where Python and other packages lie: what is there and not in ROOTS is not fairseq's by another name.
OTHERS = tuple(os.path.join(sysconfig.get_path(name), "") for name in ("stdlib", "platstdlib", "purelib", "platlib"))
EVAL = re.compile(rb"(?<![\w.])eval\s*\(")
_asked: dict[str, ModuleType] = {}  # modules that were guarded, or need not be


def import_user_module(original, args):
    """Guard the modules of fairseq that a --user-dir loads as well; this package, however named, is loaded already."""
    given = getattr(args, "user_dir", None)
    if given is not None and (os.path.samefile(given, PACKAGE) if os.path.exists(given) else given == PACKAGE.name):
        return None
    try:
        return original(args)
    finally:
        if _asked:  # RELPOS_PATCHES=needed leaves `eval` alone
            guard_modules()


def guard_modules() -> None:
    """Let every `eval` of the loaded modules of fairseq read literals alone (`read_literal`)."""
    loaded = dict(sys.modules)
    for module in [module for name, module in loaded.items() if _asked.get(name) is not module]:
        path = getattr(module, "__file__", None)
        if isinstance(module, ModuleType) and isinstance(path, str) and calls_eval(path):
            # A global name hides the builtin one, for all functions of the module, wherever they are referred to.
            vars(module)["eval"] = read_literal
    _asked.update(loaded)


@functools.cache
def calls_eval(path: str) -> bool:
    """Say whether a source file belongs to fairseq and has a call of the builtin `eval`, be it in a comment."""
    if not path.endswith(".py"):
        return False
    if not path.startswith(ROOTS) and (path.startswith(OTHERS) or not os.path.realpath(path).startswith(ROOTS)):
        return False
    return EVAL.search(Path(path).read_bytes()) is not None


def read_literal(text: str) -> Any:
    """Return the value of a Python literal.

    Lists and tuples may be repeated and joined, as in `[(512, 3)] * 9 + [(1024, 3)] * 4`, and numbers added,
    subtracted, multiplied and divided.

    Raises:
        TypeError: `text` is no string, as `eval` has it.
        ValueError: the string is anything else than a literal; nothing of it is run.
    """
    if not isinstance(text, str):
        raise TypeError(f"an option's text is a string, not a {type(text).__name__}")
    try:
        return _value(ast.parse(text.strip(), mode="eval").body)
    except (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
    raise ValueError(
        f"{shown!r} is no value of an option: numbers, strings, True, False, None, and lists, tuples and "
        f"dictionaries of them are; nothing else is run"
    )


def _value(node: ast.expr) -> Any:
    """Return the value of a node of a literal."""
    match node:
        case ast.Constant():
            return node.value
        case ast.List(elts=parts):
            return [_value(part) for part in parts]
        case ast.Tuple(elts=parts):
            return tuple(_value(part) for part in parts)
        case ast.Set(elts=parts):
            return {_value(part) for part in parts}
        case ast.Dict(keys=keys, values=values) if None not in keys:
            return {_value(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            return -_number(_value(operand)) if isinstance(sign, ast.USub) else +_number(_value(operand))
        case ast.BinOp(left=left, op=operator, right=right):
            return _combined(_value(left), operator, _value(right))
    raise ValueError(f"{type(node).__name__} is no literal")


def _combined(left: Any, operator: ast.operator, right: Any) -> Any:
    """Return the value of `left operator right`: of numbers, or of sequences."""
    sequences = [isinstance(side, list | tuple) for side in (left, right)]
    match operator:
        case ast.Mult() if sequences[0] != sequences[1]:
            sequence, times = (left, right) if sequences[0] else (right, left)
            if not isinstance(times, int) or len(sequence) * times > LONGEST:
                raise ValueError("too long, or repeated by something else than a whole number")
            return sequence * times
        case ast.Add() if all(sequences):
            if len(left) + len(right) > LONGEST:
                raise ValueError("too long")
            return left + right
    one, other = _number(left), _number(right)
    match operator:
        case ast.Add():
            return one + other
        case ast.Sub():
            return one - other
        case ast.Mult():
            return one * other
        case ast.Div():
            return one / other
    raise ValueError(f"{type(operator).__name__} is no operator of a literal")


def _number(value: Any) -> Any:
    """Return a number as it is.

    Raises:
        ValueError: the value is no number.
    """
    if not isinstance(value, int | float | complex):
        raise ValueError(f"a {type(value).__name__} is no number")
    return value
