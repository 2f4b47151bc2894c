"""Which tests enter which lines of the package: coverage's contexts, recorded in a run of the suite and read again.

    bash scripts/test.sh --reach               # the suite, or a part of it, as it records this into .reach/
    bash scripts/test.sh --changed[=COMMIT]    # the tests that enter what differs from a commit (the last)
    .venv/bin/python tests/reach.py --nightly  # write tests/nightly.txt: the tests that the suite leaves for the night

A test enters what its fixtures enter, whichever test a shared one was made for, and what its commands do.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import yaml
from coverage import Coverage, CoverageData

ROOT = Path(__file__).resolve().parent.parent
PACKAGE, TESTS = ROOT / "relpos_fairseq", ROOT / "tests"
FOLDER = ROOT / ".reach"
NIGHTLY = TESTS / "nightly.txt"
SLOW = 0.5  # seconds, as recorded: a third of a second without
UNSEEN = ("tests/attention/test_native", "tests/attention/test_dropout")  # tests of lines of C, which are not recorded


def _coverage(context: str | None = None) -> Coverage:
    """What records the lines of the package that this process executes, into a file of its own."""
    data = str(FOLDER / "coverage")
    return Coverage(data, data_suffix=True, source=[str(PACKAGE)], config_file=False, context=context)


@contextmanager
def recorded(test: str) -> Iterator[None]:
    """Record what this process, a command of a test, executes as the test's."""
    coverage = _coverage(test)
    coverage.start()
    try:
        yield
    finally:
        coverage.stop()
        coverage.save()


class Recorder:
    """A plugin of pytest that records the lines, the time and the fixtures of each test."""

    def __init__(self) -> None:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / "files.json").write_text(json.dumps(_digests()), encoding="utf-8")
        self.coverage, self.context, self.seconds = _coverage(), "", 0.0
        self.coverage.start()
        self.tests = (FOLDER / f"tests.{os.getpid()}.jsonl").open("w", encoding="utf-8")

    def _switch(self, context: str) -> str:
        """Record for another context; return the one before."""
        before, self.context = self.context, context
        self.coverage.switch_context(context)
        return before

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._switch(item.nodeid)
        begun = time.perf_counter()
        result = yield
        shared = sorted({_name(made) for made in self.fixtures if made.scope != "function"})
        row = {"test": item.nodeid, "seconds": round(time.perf_counter() - begun, 3), "fixtures": shared}
        row["nightly"] = item.get_closest_marker("nightly") is not None
        self.tests.write(f"{json.dumps(row)}\n")
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        self.fixtures = list(item._request._fixture_defs.values()) if hasattr(item, "_request") else []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Iterator[Any]:
        before = self._switch(self.context if fixturedef.scope == "function" else _name(fixturedef))
        try:
            return (yield)
        finally:
            self._switch(before)

    def pytest_unconfigure(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        self.tests.close()


def _digests() -> dict[str, str]:
    return {path.relative_to(ROOT).as_posix(): _digest(_text(path)) for path in PACKAGE.rglob("*.py")}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _name(fixture: pytest.FixtureDef) -> str:
    return f"fixture {fixture.baseid}::{fixture.argname}"


@dataclass
class Reach:
    """What was recorded: each test's seconds and shared fixtures, which are marked `nightly`, and who enters a line."""

    seconds: dict[str, float] = field(default_factory=dict)
    marked: set[str] = field(default_factory=set)
    fixtures: dict[str, set[str]] = field(default_factory=dict)
    data: list[CoverageData] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    _lines: dict[str, dict[int, set[str]]] = field(default_factory=dict)

    @classmethod
    def read(cls) -> Reach:
        """Read the folder.

        Raises:
            FileNotFoundError: Nothing was recorded.
        """
        reach = cls()
        for path in FOLDER.glob("tests.*.jsonl"):
            for row in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
                reach.seconds[row["test"]], reach.fixtures[row["test"]] = row["seconds"], set(row["fixtures"])
                if row.get("nightly"):
                    reach.marked.add(row["test"])
        if not reach.seconds:
            raise FileNotFoundError("nothing was recorded yet of what each test enters: bash scripts/test.sh --reach")
        reach.files = json.loads(_text(FOLDER / "files.json"))
        for path in FOLDER.glob("coverage.*"):
            reach.data.append(CoverageData(str(path)))
            reach.data[-1].read()
        return reach

    def lines(self, file: str) -> dict[int, set[str]]:
        """The contexts in which each line of a file of the package, named from the project's folder, was executed."""
        lines = self._lines.setdefault(file, {})
        for data in () if lines else self.data:
            for measured in data.measured_files():
                if measured.endswith(f"/{file}"):
                    for line, contexts in data.contexts_by_lineno(measured).items():
                        lines.setdefault(line, set()).update(contexts)
        return lines

    def must_be_of(self, file: str, text: str) -> None:
        """Raise ValueError if a file had another text when it was recorded."""
        if self.files.get(file) != _digest(text):
            raise ValueError(f"{file} has changed since its lines were recorded: bash scripts/test.sh --reach")

    def tests(self, contexts: set[str]) -> set[str]:
        """The tests that are one of the contexts, or have one of these fixtures."""
        return (contexts & self.fixtures.keys()).union(*(self._sharing.get(one, ()) for one in contexts))

    @cached_property
    def _sharing(self) -> dict[str, set[str]]:
        """The tests that have each shared fixture."""
        sharing: dict[str, set[str]] = {}
        for test, fixtures in self.fixtures.items():
            for fixture in fixtures:
                sharing.setdefault(fixture, set()).add(test)
        return sharing


def parts(text: str) -> dict[str, tuple[str, list[int]]]:
    """A source's functions, fields and constants by qualified name, its other statements as "": (what it is, lines).

    What it is says nothing of docstrings, comments and form; a function's lines are those of its body.
    """
    found: dict[str, tuple[str, list[int]]] = {"": ("", [])}

    def look(body: list[ast.stmt], within: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{within}{node.name}.")
                node.body = []
                found[within + node.name] = ast.dump(node), []
            elif isinstance(node, ast.FunctionDef):
                lines = list(range(node.body[0].lineno, node.end_lineno + 1))
                node.body = node.body[ast.get_docstring(node) is not None :]
                known = found.get(within + node.name, ("", []))  # a property's setter has its getter's name
                found[within + node.name] = known[0] + ast.dump(node), known[1] + lines
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    found[within + ast.unparse(target)] = ast.dump(node), []
            elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                found[""] = found[""][0] + ast.dump(node), []

    look(ast.parse(text).body, "")
    return found


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def entered_by(reach: Reach, file: str, before: str, sources: dict[str, str]) -> set[str]:
    """The contexts that a change of one Python file of the package reaches.

    A function is reached by who enters it; a field by who enters a method of its class, a constant or a class by who
    enters a function that mentions its name, an import or another statement by who enters any function of its file.

    Args:
        reach: what was recorded, of the text before.
        file: its path.
        before: its text at the recording.
        sources: the texts of the package's files today.
    """
    old, new = parts(before), parts(sources.get(file, ""))
    changed = {name for name in {*old, *new} if old.get(name, ("",))[0] != new.get(name, ("",))[0]}
    methods = {name for name, (_, body) in old.items() if body}
    fields = {name for name in changed - methods if "." in name}
    of_classes = {method for method in methods for name in fields if _within(method) == _within(name)}
    with_methods = {name for name in fields if _within(name) in map(_within, of_classes)}
    named = {name.rpartition(".")[2] for name in changed - methods - with_methods - {""}}
    mention = re.compile(rf"\b({'|'.join(map(re.escape, named))})\b")
    contexts: set[str] = set()
    for other, source in sources.items() if named else [(file, before)]:
        text = before if other == file else source
        split = text.splitlines()
        lines = reach.lines(other)
        for name, (_, body) in parts(text).items():
            own = other == file and ("" in changed or name in changed | of_classes)
            if body and (own or named and any(mention.search(split[line - 1]) for line in body)):
                contexts.update(*(lines.get(line, ()) for line in body))
    return contexts


def _within(name: str) -> str:
    return name.rpartition(".")[0]


def mentioning(words: set[str], texts: dict[str, str]) -> set[str]:
    """The files of texts that mention one of the words, or a file of the texts that does."""
    found: set[str] = set()
    while words:
        mention = re.compile(rf"\b({'|'.join(map(re.escape, sorted(words)))})\b")
        more = {file for file, text in texts.items() if mention.search(text)} - found
        found |= more
        words = {Path(file).stem for file in more if not Path(file).name.startswith("test_")}
    return found


def changed(ref: str) -> tuple[set[str], set[str]]:
    """The tests, and whole files of tests, that what differs from a commit of git reaches.

    Raises:
        FileNotFoundError: Nothing was recorded.
        subprocess.CalledProcessError: git knows no such commit.
    """

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, encoding="utf-8").stdout

    reach = Reach.read()
    differ = {*git("diff", "--name-only", ref).split("\n"), *git("ls-files", "-o", "--exclude-standard").split("\n")}
    known = set(git("ls-tree", "-r", "--name-only", ref).split("\n"))
    sources = {path.relative_to(ROOT).as_posix(): _text(path) for path in PACKAGE.rglob("*.py")}
    texts = {path.relative_to(ROOT).as_posix(): _text(path) for path in TESTS.rglob("*.py")}
    contexts: set[str] = set()
    files = {"tests/test_architecture.py"}
    words: set[str] = set()
    for file in sorted(differ - {""}):
        path = Path(file)
        if file.startswith("tests/") and path.name.startswith("test_"):
            files.add(file)
        elif path.name == "conftest.py":
            files |= {
                name for name in texts if Path(name).name.startswith("test_") and path.parent in Path(name).parents
            }
        elif file.startswith("tests/"):
            words.add(path.stem if path.suffix == ".py" else path.name)
        elif file.startswith("relpos_fairseq/") and path.suffix == ".py":
            contexts |= entered_by(reach, file, git("show", f"{ref}:{file}") if file in known else "", sources)
        elif file.startswith("relpos_fairseq/") and path.suffix != ".md":
            beside = [name for name in sources if Path(name).parent == path.parent]
            contexts.update(*(who for name in beside for who in _within_functions(reach, name, sources[name])))
        else:
            words.add(path.name)
    files |= mentioning(words, texts)
    files = {file for file in files if Path(file).name.startswith("test_") and (ROOT / file).exists()}
    chosen = {test for test in reach.tests(contexts) if test.partition("::")[0] not in files}
    return chosen, files


def nightly(reach: Reach, planted: set[str], before: Set[str] = frozenset()) -> list[str]:
    """Return the further tests that the suite can leave for the night: what they enter, quicker ones enter too.

    The slowest is left first.  One of each function stays, and all of functions that mark theirs or see a planted bug.

    Args:
        reach: what was recorded.
        planted: the tests of planted bugs; without `[...]`, all of a function.
        before: the tests that are left already, as those are that are marked.
    """
    running = reach.seconds.keys() - reach.marked - before
    functions: dict[str, set[str]] = {}
    for test in running:
        functions.setdefault(test.partition("[")[0], set()).add(test)
    who: dict[frozenset[str], set[str]] = {}
    entered: dict[str, list[set[str]]] = {}
    for file in reach.files:
        for contexts in map(frozenset, reach.lines(file).values()):
            if contexts not in who:
                who[contexts] = reach.tests(set(contexts)) & running
                for test in who[contexts]:
                    entered.setdefault(test, []).append(who[contexts])
    stay = planted | {test.partition("[")[0] for test in reach.marked}
    left: list[str] = []
    for test in sorted(running, key=lambda test: (-reach.seconds[test], test)):
        if reach.seconds[test] < SLOW or test.startswith(UNSEEN):
            continue
        function = test.partition("[")[0]
        groups = [*entered.get(test, ()), functions[function]]
        if not {test, function} & stay and all(len(group) > 1 for group in groups):
            left.append(test)
            for group in groups:
                group.discard(test)
    return left


def _within_functions(reach: Reach, file: str, text: str) -> list[set[str]]:
    lines = reach.lines(file)
    return [lines.get(line, set()) for _, body in parts(text).values() for line in body]


def planted_tests() -> set[str]:
    """The tests of the planted bugs; without `[...]`, all of a function."""
    rows = yaml.safe_load(_text(TESTS / "planted_bugs.yaml"))
    return {f"tests/{test}" for row in rows for test in row["test"].split("\n")}


def write_nightly() -> int:
    """Write the list of the tests that are left for the night: those that were, but for planted bugs', and more."""
    reach, planted = Reach.read(), planted_tests()
    before = {test for test in _text(NIGHTLY).splitlines() if not {test, test.partition("[")[0]} & planted}
    tests = before | {*nightly(reach, planted, before)}
    NIGHTLY.write_text("".join(f"{test}\n" for test in sorted(tests)), encoding="utf-8")
    seconds = sum(reach.seconds.get(test, 0) for test in tests)
    print(f"{len(tests)} of {len(reach.seconds)} tests, {seconds:.0f} of {sum(reach.seconds.values()):.0f} s")
    return 0


def main() -> int:
    """Print how many tests a change reaches; write their names, and to FILE.files their files, one a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ref", nargs="?", default="", help="a commit of git (default: the last)")
    parser.add_argument("--out", type=Path, default=FOLDER / "changed", help="file of names (default: %(default)s)")
    parser.add_argument("--nightly", action="store_true", help=f"write {NIGHTLY.name} instead")
    given = parser.parse_args()
    try:
        if given.nightly:
            return write_nightly()
        tests, files = changed(given.ref or "HEAD")
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    except subprocess.CalledProcessError as error:
        print(error.stderr.strip(), file=sys.stderr)
        return 2
    reach = Reach.read()
    seconds = sum(time for test, time in reach.seconds.items() if test in tests or test.partition("::")[0] in files)
    print(
        f"{len(tests)} of {len(reach.seconds)} tests, and {len(files)} whole files; about {seconds:.0f} s of one core"
    )
    given.out.write_text("".join(f"{name}\n" for name in sorted(tests | files)), encoding="utf-8")
    places = {name.partition("::")[0] for name in tests | files}
    given.out.with_suffix(".files").write_text(
        "".join(f"{place}\n" for place in sorted(places) if (ROOT / place).exists()), encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
