"""The native kernel's library: compiled once, whole or not at all, and never failing silently.

A few lines of C stand for the kernel where only compiling is looked at.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cases import Case
from helpers import ROOT
from helpers.scheme_calls import call as make_call
from relpos_fairseq.attention import api, attend
from relpos_fairseq.attention.native import build, candidates, step
from relpos_fairseq.attention.native import call as calls
from relpos_fairseq.attention.native.__main__ import main

SOURCE = (
    '#include "size.h"\nlong relpos_call_size(void) { return SIZE; }\nint relpos_call(void *call) { return !call; }\n'
)
needs_compiler = pytest.mark.skipif(not any(map(shutil.which, build.COMPILERS)), reason="no C compiler on PATH")
# A compiler that notes each of its runs, but for those that ask its version.
COUNTING = """#!/bin/sh
case "$*" in *--version*) ;; *) echo run >> "$RUNS" ;; esac
exec cc "$@"
"""

WIDTH = """
#ifdef __AVX2__
#define SIZE 256
#else
#define SIZE 128
#endif
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with a kernel of one function."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "kernel.c").write_text(SOURCE)
    (folder / "size.h").write_text("#define SIZE 7\n")
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own; what this process knows of the machine is forgotten."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("RELPOS_CACHE", str(folder))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name in ("CC", "RELPOS_ISA"):
        monkeypatch.delenv(name, raising=False)
    for function in (build._attempt, build.entry, api._warn_once):
        monkeypatch.setattr(*_owner(function), _fresh(function))
    return folder


def _owner(function) -> tuple[object, str]:
    return sys.modules[function.__module__], function.__name__


def _fresh(function):
    """The same function with an empty cache of results."""
    return build.functools.cache(function.__wrapped__)


def libraries(folder: Path) -> list[Path]:
    """The libraries of a cache, oldest first."""
    return sorted(folder.glob("*.so"), key=lambda path: path.stat().st_mtime_ns)


def counting_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the compiler write a line a run into the file that is returned."""
    command, runs = tmp_path / "counting-cc", tmp_path / "runs"
    command.write_text(COUNTING)
    command.chmod(0o755)
    monkeypatch.setenv("CC", str(command))
    monkeypatch.setenv("RUNS", str(runs))
    return runs


@needs_compiler
def test_the_cache_knows_sources_and_flags(sources: Path, cache: Path, caplog) -> None:
    """What is unchanged is loaded; other sources, headers and flags are compiled."""
    caplog.set_level(logging.INFO, logger=build.__name__)
    assert build.load(sources).relpos_call_size() == 7
    assert [r.getMessage() for r in caplog.records] == [
        f"compiling the attention kernel to {libraries(cache)[0]}, once for this machine"
    ]
    assert build.load(sources).relpos_call_size() == 7
    assert len(libraries(cache)) == 1
    (sources / "size.h").write_text("#define SIZE 8\n")
    assert build.load(sources).relpos_call_size() == 8
    (sources / "kernel.c").write_text(SOURCE.replace("SIZE;", "SIZE + SIZE;"))
    assert build.load(sources).relpos_call_size() == 16
    build.load(sources, ("-DRELPOS_DOUBLE",))
    assert len(libraries(cache)) == 4 == len(caplog.records)
    assert not [path for path in cache.iterdir() if path.name.startswith(".partial")]


@needs_compiler
@pytest.mark.parametrize("damage", ["cut", "empty", "changed"])
def test_a_damaged_library_is_compiled_again(sources: Path, cache: Path, damage: str) -> None:
    """Loading half a library would end the process, or worse."""
    build.load(sources)
    (library,) = libraries(cache)
    content = library.read_bytes()
    middle = len(content) // 2
    changed = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    library.unlink()  # it is loaded: writing into the file would change running code
    library.write_bytes({"cut": content[:middle], "empty": b"", "changed": changed}[damage])
    assert build.load(sources).relpos_call_size() == 7
    assert build._is_whole(library)


@needs_compiler
def test_processes_at_once_compile_once(
    sources: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of a training wait for the one that compiles."""
    runs = counting_compiler(tmp_path, monkeypatch)
    code = (
        "import sys\nfrom pathlib import Path\nsys.modules['fairseq'] = None\n"
        "from relpos_fairseq.attention.native import build\n"
        f"print(build.load(Path({str(sources)!r})).relpos_call_size())"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=300)[0].strip() for process in started] == ["7", "7"]
    assert runs.read_text() == "run\n"
    assert len(libraries(cache)) == 1


@needs_compiler
def test_the_next_cache_where_one_is_unwritable(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RELPOS_CACHE, XDG_CACHE_HOME, the home's; then a folder of the process's own."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("RELPOS_CACHE", str(tmp_path / "file"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    build.load(sources)
    assert len(libraries(tmp_path / "xdg" / "relpos_fairseq")) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    build.load(sources)
    assert len(libraries(tmp_path / "home" / ".cache" / "relpos_fairseq")) == 1
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build.tempfile, "tempdir", str(tmp_path))
    assert build.load(sources).relpos_call_size() == 7
    (private,) = tmp_path.glob("relpos_fairseq-*")
    assert len(libraries(private)) == 1
    assert private.stat().st_mode & 0o077 == 0


@needs_compiler
def test_a_finished_cache_needs_no_writing(
    sources: Path, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library that was built elsewhere, in an image say, is loaded from where it lies."""
    runs = counting_compiler(tmp_path, monkeypatch)
    build.load(sources)
    (cache / f"{libraries(cache)[0].stem}.lock").unlink()
    build.load(sources)
    assert runs.read_text() == "run\n"
    assert [path.suffix for path in cache.iterdir()] == [".so"]


@needs_compiler
def test_flags_that_a_compiler_does_not_take_are_left_out(
    sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older compilers know no -mprefer-vector-width."""
    plain = [build.FLAGS]
    monkeypatch.setattr(build, "_flag_sets", lambda: [(*build.FLAGS, "-fno-such-flag"), *plain])
    assert build.load(sources).relpos_call_size() == 7


@needs_compiler
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64's instruction sets")
def test_an_instruction_set_is_chosen(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RELPOS_ISA decides what the compiler may use, each choice has its own library."""
    (sources / "size.h").write_text(WIDTH)
    for asked, width in (("x86-64-v2", 128), ("x86-64-v3", 256), ("x86-64-v2", 128)):
        monkeypatch.setenv("RELPOS_ISA", asked)
        assert build.load(sources).relpos_call_size() == width
    assert len(libraries(cache)) == 2
    for asked, said in (("x86-64-v9", "-march=x86-64-v9.* said: .*RELPOS_ISA"), ("v3 -DX", "RELPOS_ISA='v3")):
        monkeypatch.setenv("RELPOS_ISA", asked)
        with pytest.raises(build.BuildError, match=said):
            build.load(sources)


@needs_compiler
def test_sources_that_do_not_compile(sources: Path) -> None:
    """The error has the command, the compiler's own words, and what to do."""
    (sources / "kernel.c").write_text("#error this is no kernel\n")
    with pytest.raises(build.BuildError, match=r"cc.* -O3 .*kernel\.c.*this is no kernel.*gcc"):
        build.load(sources)


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("/bin/false", r"/bin/false --version ended with status 1"),
        ("no-such-compiler -m64", r"no-such-compiler, which CC names, is not on PATH"),
    ],
)
def test_a_broken_compiler(compiler: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """An explicit choice is an error that says why; auto takes blocked, and says so once."""
    monkeypatch.setenv("CC", compiler)
    inputs, *_ = make_call(Case("m4"), "square")
    expected, _ = attend(inputs, "reference")
    with pytest.raises(ValueError, match=f"backend native cannot .*{said}.*gcc.*auto or blocked"):
        attend(inputs, "native")
    monkeypatch.setattr(api, "crossover_length", lambda _: 1)
    monkeypatch.setattr(api.blocked, "slice_rows", lambda _: 1)
    for _ in range(2):
        assert api.choose(inputs) == "blocked"
    torch.testing.assert_close(attend(inputs)[0], expected, rtol=1e-10, atol=1e-10)
    (warned,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert re.search(f"backend blocked is used, .*native.*{said}.*install gcc", warned.getMessage())


@needs_compiler
def test_a_full_disk(sources: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be kept is a reason as others are, and leaves nothing behind."""

    def full(*_) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build, "SOURCES", sources)
    monkeypatch.setattr(build.os, "replace", full)
    assert re.search("cannot be kept .*No space left.*RELPOS_CACHE", build.problem())
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda patch: patch.setenv("PATH", "/nowhere"), "one of cc, gcc, clang is not on PATH.*install gcc"),
        (lambda patch: patch.setattr(build.sys, "platform", "win32"), "win32"),
        (lambda patch: patch.setenv("CC", 'gcc "-O2'), 'CC=gcc "-O2 is no command .*quot'),
    ],
)
def test_without_a_compiler(change, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is compiled."""
    change(monkeypatch)
    assert re.search(said, build.problem())
    with pytest.raises(build.BuildError, match=said):
        build.library(torch.float32)


@needs_compiler
def test_a_call_of_another_size(sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python and C must describe the same bytes."""
    monkeypatch.setattr(build, "SOURCES", sources)
    with pytest.raises(build.BuildError, match="relpos_call: .* of two versions; install the package anew"):
        build.entry(torch.float32, "relpos_call", calls.Call)


@needs_compiler
def test_call_h_is_mirrored(sources: Path) -> None:
    """Every field of call.h, step.h and candidates.h stands where Python has it, in fp32 and fp64."""
    mirrors = {"Tensor": calls.TensorArg, "Table": calls.TableArg, "Call": calls.Call}
    mirrors |= {"StepTables": step.StepTablesArg, "StepCall": step.StepCall}
    mirrors |= {"CandidatesCall": candidates.CandidatesCall}
    asked, expected = [], []
    for struct, mirror in mirrors.items():
        for name, _ in mirror._fields_:
            asked.append(f"offsetof({struct}, {'static_' if name == 'static' else name})")  # a keyword of C
            expected.append(getattr(mirror, name).offset)
        asked.append(f"sizeof({struct})")
        expected.append(ctypes.sizeof(mirror))
    headers = "".join(f'#include "{build.SOURCES / name}"\n' for name in ("step.h", "candidates.h"))
    (sources / "kernel.c").write_text(
        f"#include <stddef.h>\n{headers}int64_t found[] = {{{', '.join(asked)}}};\n", encoding="utf-8"
    )
    for defined in build.DEFINED.values():
        library = build.load(sources, defined)
        assert list((ctypes.c_int64 * len(expected)).in_dll(library, "found")) == expected


@needs_compiler
def test_one_openmp(sources: Path) -> None:
    """The kernel's threads are torch's: a second runtime would make threads of its own."""
    (sources / "kernel.c").write_text(
        "int count(void) {\n    int n = 0;\n#pragma omp parallel num_threads(2) reduction(+ : n)\n"
        "    n++;\n    return n;\n}\n"
    )
    code = (
        "import sys\nfrom pathlib import Path\n"
        "for name in ('fairseq', 'sklearn'): sys.modules[name] = None\n"
        "import torch\nfrom relpos_fairseq.attention.native import build\n"
        "def runtimes():\n"
        "    lines = open('/proc/self/maps').read().splitlines()\n"
        "    names = {line.split()[-1] for line in lines if '.so' in line}\n"
        "    return {name for name in names if 'omp' in name.rpartition('/')[2]}\n"
        f"before, library = runtimes(), build.load(Path({str(sources)!r}))\n"
        "print(len(before), library.count(), runtimes() == before)\n"
    )
    run, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["1", "2", "True"], done.stderr[-2000:]


@needs_compiler
def test_the_command(sources: Path, cache: Path, monkeypatch, capsys) -> None:
    """`python -m relpos_fairseq.attention.native` compiles, or says in one line why it cannot."""
    monkeypatch.setattr(build, "SOURCES", sources)
    assert main() == 0
    assert len(libraries(cache)) == 1
    monkeypatch.setenv("CC", "/bin/false")
    build._attempt.cache_clear()
    assert main() == 2
    said = capsys.readouterr().err
    assert said.startswith("error: attention backend native") and said.count("\n") == 1


@needs_compiler
@pytest.mark.parametrize("what", ["folder for all", "folder for a group", "file for all", "link", "another user's"])
def test_a_library_that_somebody_else_may_have_put_there(sources: Path, cache: Path, tmp_path: Path, what: str) -> None:
    """What another user can write is not loaded, since loading runs it: another folder serves instead."""
    build.load(sources)
    (library,) = libraries(cache)
    assert build._is_whole(library)
    if what == "folder for all":
        cache.chmod(0o777)
    elif what == "folder for a group":
        other_group(cache)
        cache.chmod(0o775)
    elif what == "file for all":
        library.chmod(0o666)
    elif what == "link":
        library.rename(tmp_path / "elsewhere.so")
        library.symlink_to(tmp_path / "elsewhere.so")
    elif os.geteuid() == 0:
        os.chown(library, 12345, -1)
    else:
        pytest.skip("needs root, who can give a file away")
    assert not build._is_whole(library)
    if what.startswith("folder"):
        assert build.cache.writable_folder() != cache
        assert build.load(sources)._name != str(library)


def other_group(folder: Path) -> None:
    """Give a folder to a group that is not this user's own."""
    if os.geteuid() != 0:
        pytest.skip("needs root, who can give a folder away")
    os.chown(folder, -1, 12345)


def test_folders_that_a_user_alone_can_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sticky folder above, as /tmp is, lets nobody else rename; one without that bit does."""
    inner = tmp_path / "open" / "mine"
    inner.mkdir(parents=True)
    assert build.cache.is_private(inner)
    inner.parent.chmod(0o777)
    assert not build.cache.is_private(inner)
    inner.parent.chmod(0o1777)
    assert build.cache.is_private(inner)
    assert not build.cache.is_private(tmp_path / "absent")


@needs_compiler
def test_another_users_lock(sources: Path, cache: Path) -> None:
    """A lock that cannot be opened is no reason to refuse: each compiles for itself."""
    build.load(sources)
    (library,) = libraries(cache)
    library.unlink()
    library.with_suffix(".lock").unlink()
    library.with_suffix(".lock").mkdir()
    assert build.load(sources).relpos_call_size() == 7


def test_loads_stay_where_they_are_on_arm() -> None:
    """That sums stay in registers is seen in the object code, where gcc for ARM is at hand."""
    first, second = build.flags_for("aarch64", "-mcpu=native")
    assert set(first) - set(second) == {"-fno-schedule-insns"}
    assert all("schedule" not in " ".join(flags) for flags in build.flags_for("x86_64", "-march=x"))
