"""Where definitions of the package stand in its sources: classes, functions, constants; functions and macros of C."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = "relpos_fairseq"
# What begins a definition in C at a line's first column: a function, a struct, or a macro.
C_NAME = re.compile(
    r"^(?:#define\s+(\w+)"
    r"|(?:typedef\s+)?struct\s+(\w+)?[^;]*?\{"
    r"|[A-Za-z_][^;{}#]*?\b(\w+)\s*\([^;{}]*\)[^;{}]*\{)",
    re.M,
)


def find(root: Path, name: str) -> tuple[Path, int, int]:
    """Return the file of the one definition of a name, and where its text begins and ends in the file.

    Args:
        root: the project's folder.
        name: the definition's dotted name, or as much of its end as is unique, such as `Positions.distance` or
            `positions.Positions.distance`; what stands in no definition is named by its file's path.

    Raises:
        ValueError: No definition has the name, or several have.
    """
    if "/" in name:
        return root / name, 0, len((root / name).read_text(encoding="utf-8"))
    found = [place for place in _places(root) if place[0] == name or place[0].endswith(f".{name}")]
    if len(found) != 1:
        named = ", ".join(place[0] for place in found) or "none"
        raise ValueError(f"{name!r} must name one definition of {PACKAGE}, got {named}")
    return found[0][1:]


@cache
def _places(root: Path) -> list[tuple[str, Path, int, int]]:
    """(dotted name, file, begin, end) of every definition of the package."""
    return [
        (f"{'.'.join(path.relative_to(root).with_suffix('').parts)}.{name}", path, begin, end)
        for path in sorted((root / PACKAGE).rglob("*"))
        if path.suffix in (".py", ".c", ".h")
        for name, begin, end in _definitions(path)
    ]


def _definitions(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield (qualified name, begin, end) of a file's definitions; a file is one too, without a name."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        starts = [0]
        for line in text.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        yield from _of_python(ast.parse(text).body, "", starts)
        return
    matches = [match for match in C_NAME.finditer(text)]
    for number, match in enumerate(matches):
        name = next((group for group in match.groups() if group), None)
        end = matches[number + 1].start() if number + 1 < len(matches) else len(text)
        if name:
            yield name, match.start(), end


def _of_python(
    body: list[ast.stmt], within: str, starts: list[int], in_function: bool = False
) -> Iterator[tuple[str, int, int]]:
    for node in body:
        if isinstance(node, ast.If | ast.Try):
            yield from _of_python(node.body, within, starts, in_function)
            continue
        names: list[str] = []
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Assign | ast.AnnAssign) and not in_function:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)]
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        for name in names:
            yield within + name, starts[first - 1], starts[node.end_lineno]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield from _of_python(node.body, f"{within}{node.name}.", starts, isinstance(node, ast.FunctionDef))
