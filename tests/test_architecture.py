"""The package keeps its order: imports point one way, no circles, no scheme named outside schemes/.

Everything is read from the source; nothing is imported.  A text that names a module counts as its
import, since that is how `importlib.import_module` gets it, unless a process of its own runs it
(`python -m ...`).
"""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from conftest import LONGEST, ROOT

PACKAGE = "relpos_fairseq"
# From the foundation upwards: a room may import its own files and the rooms of lines above its own.
ORDER = """
    core lab version io
    heads
    positions
    relations
    terms options
    scheme
    rotation gates attention text plan
    schemes
    placement
    config
    saved
    calls
    nn
    metrics data toy
    modules
    patches optim
    tasks
    models
    criterions conversion preparation
    formats
    inference
    plots
    evaluation
    export
    scheme_table
    plugin
    benchmarks doctor
    comparison
    cli
"""
# Where a room may import less than what lies below it.
ONLY = {
    "": {"version", "plugin"},  # relpos_fairseq/__init__.py: plugin when fairseq is there
    "io": {"version"},
    "text": {"io"},
    "attention": {"positions", "relations", "terms", "scheme"},
    "metrics": {"io", "text"},
    "preparation": {"io", "data", "text"},
}
# Rooms that do not import fairseq when they are imported.
PURE = """
    io heads positions relations terms options scheme rotation gates attention text plan schemes placement config
    calls nn doctor preparation cli
""".split()

# Violations that are known.  The lists shrink; nothing may be added.
KNOWN_CIRCLES = ()
KNOWN_NAMES = ()


def _modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


@cache
def trees() -> dict[str, ast.Module]:
    """Every module's syntax tree."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imported(name: str, tree: ast.Module) -> Iterator[str]:
    """What a module imports, at its top, in functions, for types and by name alike."""
    yield from _in_texts(name, tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(name, node)
            for alias in node.names:
                inner = f"{module}.{alias.name}"
                yield inner if inner in MODULES else module


def _in_texts(name: str, tree: ast.Module) -> Iterator[str]:
    """Modules named by texts; of one formed at run time (`f"folder.{name}"`), all it may name."""
    programs = _programs(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in MODULES and id(node) not in programs:
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            first = node.values[0]
            start = first.value if isinstance(first, ast.Constant) else ""
            if isinstance(first, ast.FormattedValue) and ast.unparse(first.value) == "__name__":
                start = name + "."
            if start.startswith(f"{PACKAGE}."):
                below = (other for other in MODULES if other.startswith(start))
                yield from (other for other in below if not other.endswith("__main__"))


def _programs(tree: ast.Module) -> set[int]:
    """Texts after "-m" in a command line, themselves or by the name of a constant, and those of `command_of`."""
    named = {
        node.targets[0].id: id(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found = set()
    for node in ast.walk(tree):
        words = getattr(node, "elts", None) or getattr(node, "args", None)
        words = words if isinstance(words, list) else []
        for flag, word in itertools.pairwise(words):
            if isinstance(flag, ast.Constant) and flag.value == "-m":
                found |= {id(word), named.get(getattr(word, "id", ""))}
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "command_of":
            found.add(id(node.args[0]))
    return found


def _absolute(name: str, node: ast.ImportFrom) -> str:
    """The module that `from ... import` names, relative ones counted from the module's folder."""
    if not node.level:
        return node.module
    is_folder = MODULES[name].name == "__init__.py"
    parts = name.split(".")
    parts = parts[: len(parts) - node.level + is_folder]
    return ".".join((*parts, node.module) if node.module else parts)


@cache
def graph() -> dict[str, set[str]]:
    """What of the package every module imports."""
    return {
        name: {o for o in imported(name, tree) if o in MODULES and o not in (name, PACKAGE)}
        for name, tree in trees().items()
    }


def room_of(module: str) -> str:
    """The part of the package that a module belongs to; of `core` each file, of `lab` each folder."""
    return module.removeprefix(PACKAGE).removeprefix(".").removeprefix("core.").removeprefix("lab.").partition(".")[0]


HEIGHT = {room: height for height, line in enumerate(ORDER.strip().splitlines()) for room in line.split()}


def test_every_room_has_its_place() -> None:
    missing = {room_of(name) for name in MODULES} - set(HEIGHT) - {""}
    assert not missing, f"give {missing} a line of ORDER"


def below(room: str) -> set[str]:
    return {name for name in MODULES if name.startswith(f"{PACKAGE}.{room}.")}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ('import_module("relpos_fairseq.export.onnx")', {"relpos_fairseq.export.onnx"}),
        ('ONE = {"a": "relpos_fairseq.plugin"}', {"relpos_fairseq.plugin"}),
        ('import_module(f"relpos_fairseq.patches.{name}")', below("patches")),
        ('import_module(f"{__name__}.{name}")', below("tasks")),
        ('import_module(f"fairseq_cli.{name}")', set()),
        ('run([python, "-m", "relpos_fairseq.cli"])', set()),
        ('PROGRAM = "relpos_fairseq.cli"\nrun(python, "-m", PROGRAM)', set()),
    ],
)
def test_imports_by_name_count(text: str, found: set[str]) -> None:
    assert set(imported("relpos_fairseq.tasks", ast.parse(text))) == found


def wrong_directions() -> list[str]:
    """Pairs of modules, the first of which may not import the second."""
    return [
        f"{name} imports {other}"
        for name, others in graph().items()
        for other in sorted(others)
        if room_of(name) != room_of(other) and not _allowed(room_of(name), room_of(other))
    ]


def _allowed(room: str, other: str) -> bool:
    if room in ONLY:
        return other in ONLY[room]
    return HEIGHT.get(other, 99) < HEIGHT.get(room, -1)


def test_imports_point_one_way() -> None:
    assert wrong_directions() == []


def circles() -> set[frozenset[str]]:
    """Groups of modules each of which imports, by way of others, every other of its group."""
    reach = {name: set(others) for name, others in graph().items()}
    changed = True
    while changed:
        changed = False
        for others in reach.values():
            more = set().union(*(reach[other] for other in others)) - others
            others |= more
            changed |= bool(more)
    return {
        frozenset(other for other in others if name in reach[other]) for name, others in reach.items() if name in others
    }


def test_no_files_import_each_other_in_a_circle() -> None:
    known = {frozenset(f"{PACKAGE}.{name}" for name in line.split()) for line in KNOWN_CIRCLES}
    assert [sorted(group) for group in circles() if not any(group <= old for old in known)] == []


@pytest.mark.parametrize("room", PURE)
def test_pure_rooms_do_not_import_fairseq(room: str) -> None:
    """Only what runs at import counts: a function may."""
    for name in MODULES:
        if room_of(name) == room:
            tops = [node for node in trees()[name].body if isinstance(node, ast.Import | ast.ImportFrom)]
            names = [node.module or "" for node in tops if isinstance(node, ast.ImportFrom)]
            names += [alias.name for node in tops if isinstance(node, ast.Import) for alias in node.names]
            assert not [other for other in names if other.split(".")[0] == "fairseq"], name


def scheme_names() -> set[str]:
    """Names of all schemes, from `@register_scheme("...")` in their files."""
    pattern = re.compile(r'@register_scheme\("(\w+)"\)')
    files = (ROOT / PACKAGE / "schemes").glob("*.py")
    return {name for path in files for name in pattern.findall(path.read_text(encoding="utf-8"))}


NAMES = scheme_names()
WORDS = {"none", "sentence", "learned"}  # English words: `learned` counts where it is all of a text
TASKS = {"sentence"}  # a column of GLUE's files has this name


def named(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, scheme) wherever code says a scheme's name: texts, variables, attributes, imports."""
    documents = _docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in documents:
                yield from ((node.lineno, name) for name in _in_text(node.value))
            continue
        said = ()
        if isinstance(node, ast.Name):
            said = (node.id,)
        elif isinstance(node, ast.Attribute):
            said = (node.attr,)
        elif isinstance(node, ast.ImportFrom) and node.module == f"{PACKAGE}.schemes":
            said = tuple(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # A model may be called as a scheme is: only scheme files count.
            said = (node.module or "").removeprefix(f"{PACKAGE}.schemes.").split(".")[:1]
        yield from ((node.lineno, name) for name in said if name in NAMES - WORDS)


def _in_text(text: str) -> set[str]:
    members = set(text.split("+"))
    if members <= NAMES:
        return members - WORDS | ({text} & WORDS - TASKS - {"none"})
    return set(re.findall(r"\w+", text)) & (NAMES - WORDS)


def _docstrings(tree: ast.Module) -> set[int]:
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Expr))
    return {id(text) for text in texts if isinstance(text, ast.Constant)}


def test_no_scheme_is_named_outside_its_file() -> None:
    """Documents, recipes and tests may; so may the quickstart, which is a recipe."""
    free = (f"{PACKAGE}.schemes", f"{PACKAGE}.cli.quickstart")
    found = [
        f"{name}, line {line}: {scheme}"
        for name, tree in trees().items()
        if not name.startswith(free) and name.removeprefix(f"{PACKAGE}.") not in KNOWN_NAMES
        for line, scheme in sorted(set(named(tree)))
    ]
    assert found == []


@pytest.mark.parametrize("scheme", sorted(NAMES))
def test_schemes_do_not_import_each_other(scheme: str) -> None:
    """A file of schemes stands alone, so that it can be read, copied and removed alone."""
    for name in below("schemes"):
        if f'"{scheme}"' in MODULES[name].read_text():
            assert not [other for other in graph()[name] if room_of(other) == "schemes"], name


def test_the_longest_tests_are_there() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []


def test_no_source_is_left_out_of_git() -> None:
    """A file that lies in this checkout alone, ignored or forgotten, breaks every other one."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    command = ["git", "-C", str(ROOT), "ls-files", "--others", "--", f"{PACKAGE}/*.py", "tests/*.py"]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert found == [], "git add these, or remove them"


def test_pages_name_this_version_and_files_that_are_there() -> None:
    """README and CITATION.cff have the version, CHANGELOG says what changed in it, no page links to what is absent."""
    version = re.search(r'__version__ = "(.+)"', (ROOT / PACKAGE / "version.py").read_text()).group(1)
    assert f"version = {{{version}}}" in (ROOT / "README.md").read_text()
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text()
    assert re.search(r"^## (.+)", (ROOT / "CHANGELOG.md").read_text(), re.M).group(1) == version
    pages = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    broken = [
        f"{page}: {link}"
        for page in pages.split()
        for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", (ROOT / page).read_text())
        if not (ROOT / page).parent.joinpath(link).exists()
    ]
    assert broken == []
