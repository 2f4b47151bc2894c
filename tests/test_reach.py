"""Tests of what chooses tests: a change is reached by who enters it, a drawn mutant is another program."""

from __future__ import annotations

import ast
import re

import pytest

import mutants
from reach import NIGHTLY, ROOT, Reach, entered_by, nightly, parts, planted_tests

FILE, OTHER = "relpos_fairseq/a.py", "relpos_fairseq/b.py"
TEXT = """
import math

LIMIT = 3

class Scale:
    size = 1

    def grow(self, by):
        '''Grow.'''
        return self.size + by

    def shrink(self):
        return -self.size

def bounded(value):
    return min(value, LIMIT)
"""
USER = "def last(values):\n    return values[: LIMIT]\n"
ENTERED = {FILE: {"return self.size +": "grow", "return -": "fixture shrunk", "return min": "bounded"}, OTHER: {}}


@pytest.fixture
def reach() -> Reach:
    """A record of four tests: of `grow`, of `bounded`, of another file, and one with a fixture that shrinks."""
    fixtures = {"grow": set(), "bounded": set(), "last": set(), "shrink": {"fixture shrunk"}}
    lines = {
        FILE: {
            number: {who}
            for number, line in enumerate(TEXT.splitlines(), 1)
            for begin, who in ENTERED[FILE].items()
            if begin in line
        },
        OTHER: {2: {"last"}},
    }
    return Reach(dict.fromkeys(fixtures, 0.1), fixtures=fixtures, _lines=lines)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("+ by", "- by", "grow"),
        ("'''Grow.'''", "'''Shrink.'''", ""),
        ("return -", "return  -", ""),
        ("-self", "+self", "shrink"),
        ("size = 1", "size = 2", "grow shrink"),
        ("LIMIT = 3", "LIMIT = 4", "bounded last"),
        ("import math", "import json", "bounded grow shrink"),
        ("def bounded(value)", "def bounded(value=1)", "bounded"),
        ("return min(value, LIMIT)", "return value", "bounded"),
    ],
)
def test_tests_of_a_change(reach: Reach, before: str, after: str, expected: str) -> None:
    """A change of a function, a field, a constant or an import is seen by the tests that enter what it reaches."""
    changed = {FILE: TEXT.replace(before, after), OTHER: USER}
    assert changed[FILE] != TEXT
    assert " ".join(sorted(reach.tests(entered_by(reach, FILE, TEXT, changed)))) == expected


def test_the_night_takes_what_others_enter() -> None:
    """The slowest first; a line keeps who enters it, a function one of its tests, a planted bug and a mark theirs."""
    rows = "a[slow] a[quick] a[alone] b[slow] b[quick] c d[planted] d[other] e[marked] e[rest] f[slow] f[quick]".split()
    seconds = {row: 0.1 if "quick" in row else 9.0 for row in rows}
    lines = {1: set(rows) - {"a[alone]"}, 2: {"a[alone]"}, 3: {"shared"}, 4: {"b[slow]", "b[quick]"}}
    reach = Reach(seconds, {"e[marked]"}, {row: {"shared"} if row in ("c", "b[slow]") else set() for row in rows})
    reach.files, reach._lines = {FILE: ""}, {FILE: lines}
    assert nightly(reach, {"d[planted]"}) == ["a[slow]", "b[slow]", "d[other]", "f[slow]"]
    assert nightly(reach, {"d[planted]"}, {"b[quick]", "f[quick]"}) == ["a[slow]", "d[other]"]
    reach._lines[FILE][5] = {"a[slow]", "e[marked]"}  # which is marked, and enters it at night
    assert nightly(reach, {"d[planted]"}) == ["b[slow]", "d[other]", "f[slow]"]


def test_a_setter_has_its_getters_name() -> None:
    """A change of either is one of both."""
    text = "class A:\n    @property\n    def x(self):\n        return 1\n"
    text += "    @x.setter\n    def x(self, to):\n        pass\n"
    assert parts(text)["A.x"][1] == [4, 7]
    assert parts(text)["A.x"][0] != parts(text.replace("1", "2"))["A.x"][0]


def test_what_is_left_for_the_night_is_there() -> None:
    """A test that was renamed runs in the suite again, and its old name goes."""
    for file, names in re.findall(r"^(\S+?)((?:::[^\[\n]+)+)", NIGHTLY.read_text(encoding="utf-8"), re.MULTILINE):
        assert f"def {names.rpartition('::')[2]}(" in (ROOT / file).read_text(encoding="utf-8"), (file, names)


def test_no_planted_bug_is_left_for_the_night() -> None:
    """Its test sees it in the suite."""
    listed, planted = NIGHTLY.read_text(encoding="utf-8").splitlines(), planted_tests()
    assert not [test for test in listed if {test, test.partition("[")[0]} & planted]


def test_mutants_are_other_programs() -> None:
    """Each mutant of a source parses, and is another program; there is one for each place."""
    source = "x: int = 1\nif a < b and not c:\n    d = 'ä' + f'{e + 1}' * 2.0\n    d.f(c)\n    d += c\n"
    found = list(mutants.mutants("", source))
    assert [f"{one.before} -> {one.after}" for one in found] == [
        "1 -> 2",
        "a < b and not c -> (not (a < b and (not c)))",
        "a < b and not c -> ((a < b) or (not c))",
        "a < b -> ((a) <= (b))",
        "not c -> bool(c)",
        "'ä' + f'{e + 1}' * 2.0 -> (('ä') - (f'{e + 1}' * 2.0))",
        "f'{e + 1}' * 2.0 -> ((f'{e + 1}') / (2.0))",
        "2.0 -> 4.0",
        "d.f(c) -> pass",
        "d += c -> pass",
    ]
    for one in found:
        assert source[one.begin : one.end] == one.before
        assert ast.dump(ast.parse(source[: one.begin] + one.after + source[one.end :])) != ast.dump(ast.parse(source))
