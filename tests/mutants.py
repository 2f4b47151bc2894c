"""Mutants of the package's syntax trees, drawn at random, and the tests that reach each."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reach import NIGHTLY, PACKAGE, ROOT, Reach, entered_by, parts

OTHER = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "/",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "*",
    ast.Pow: "*",
    ast.And: "or",
    ast.Or: "and",
}
# What looks at the project as a whole, or begins runs like this one: it sees every mutant, or none.
LEFT_OUT = ("test_architecture.py", "test_mutations.py", "test_mutations_guard.py", "test_types.py", "scripts/")
SECONDS = 40.0  # of tests, as recorded, that one mutant is given to


@dataclass(frozen=True)
class Mutant:
    """One expression of a file in place of another: characters `begin` to `end`, on the line numbered `line`."""

    file: str
    line: int
    begin: int
    end: int
    before: str
    after: str


def mutants(file: str, text: str) -> Iterator[Mutant]:
    """Yield each comparison, operator, number, branch that could be another, and each deed that could be left out."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def place(node: ast.AST, after: str) -> Mutant:
        data = text.encode()
        first, last = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        begin, before = len(data[:first].decode()), data[first:last].decode()
        return Mutant(file, node.lineno, begin, begin + len(before), before, after)

    def look(node: ast.AST) -> Iterator[Mutant]:
        source = ast.unparse
        match node:
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                yield place(node, f"(({source(left)}) {OTHER[type(op)]} ({source(right)}))")
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OTHER:
                yield place(node, f"(({source(left)}) {OTHER[type(op)]} ({source(right)}))")
            case ast.BoolOp(op=op, values=values):
                yield place(node, "(" + f" {OTHER[type(op)]} ".join(f"({source(value)})" for value in values) + ")")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield place(node, f"bool({source(operand)})")
            case ast.Constant(value=bool() as value):
                yield place(node, str(not value))
            case ast.Constant(value=int() as value):
                yield place(node, repr(value + 1))
            case ast.Constant(value=float() as value):
                yield place(node, repr(2 * value or 1.0))
            case ast.If() | ast.IfExp() | ast.While():
                yield place(node.test, f"(not ({source(node.test)}))")
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
                yield place(node, "pass")
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns"):
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST) and not isinstance(node, ast.JoinedStr):
                        yield from look(child)

    yield from look(ast.parse(text))


def drawn(number: int, seed: int) -> list[Mutant]:
    """Draw so many mutants of the package, every place and kind as likely as any other."""
    found = [mutant for path in sorted(PACKAGE.rglob("*.py")) for mutant in mutants(_name(path), path.read_text())]
    return random.Random(seed).sample(found, number)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tests_of(mutant: Mutant, reach: Reach) -> list[str]:
    """The tests that execute a mutant's line, the most telling first, as many as take some forty seconds.

    Tests of the file's own folder come first, then quick ones, and of one function's parameters one before a second.

    Raises:
        ValueError: The file is another than the one that was recorded.
    """
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    reach.must_be_of(mutant.file, text)
    body = {line for _, lines in parts(text).values() for line in lines}
    if mutant.line in body:
        places = {mutant.line, _statement(text, mutant.line)}  # of a parenthesis that opens a line, the first is none
        contexts = set().union(*(reach.lines(mutant.file).get(place, set()) for place in places))
    else:
        planted = text[: mutant.begin] + mutant.after + text[mutant.end :]
        sources = {_name(path): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
        contexts = entered_by(reach, mutant.file, text, {**sources, mutant.file: planted})
    tests = reach.tests(contexts) - reach.marked - {*NIGHTLY.read_text(encoding="utf-8").splitlines()}
    tests = {test for test in tests if not test.removeprefix("tests/").startswith(LEFT_OUT)}
    near = f"tests/{'/'.join(Path(mutant.file).parts[1:-1])}/"
    seen: dict[str, int] = {}
    ranked = []
    for test in sorted(tests, key=lambda test: (reach.seconds[test], test)):
        function = test.partition("[")[0]
        seen[function] = seen.get(function, 0) + 1
        ranked.append((seen[function], not test.startswith(near), reach.seconds[test], test))
    chosen, left = [], SECONDS
    for *_, seconds, test in sorted(ranked):
        if seconds <= left:
            chosen.append(test)
            left -= seconds
    return chosen


def _statement(text: str, line: int) -> int:
    """The first line of the innermost statement that a line is part of."""
    statements = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.stmt)]
    return max((node.lineno for node in statements if node.lineno <= line <= node.end_lineno), default=line)
