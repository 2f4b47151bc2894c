"""install.sh and test.sh take the Python that they are told to, or say in a line why not; options are passed on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from helpers import ROOT

# Tells its version, and makes no environment: what follows would take minutes and gigabytes.
PYTHON = """#!/bin/sh
case "$1" in
  -c) echo {version} ;;
  --version) echo Python {version}.9 ;;
  *) echo "$0 $@" >>{log}; exit 1 ;;
esac
"""
# What pyenv leaves on PATH of a version that is installed and not chosen.
SHIM = """#!/bin/sh
echo "pyenv: $(basename "$0"): command not found" >&2
exit 127
"""


@pytest.fixture
def pythons(tmp_path) -> Path:
    """A root with the scripts, and a folder of Pythons: 3.11, 3.12, 3.13, and a shim of 3.10."""
    (tmp_path / "scripts").mkdir()
    for name in ("install.sh", "test.sh"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "bin").mkdir()
    for name, version in {"python3": "3.11", "python3.12": "3.12", "other": "3.13", "python3.10": None}.items():
        path = tmp_path / "bin" / name
        path.write_text(PYTHON.format(version=version, log=tmp_path / "log") if version else SHIM)
        path.chmod(0o755)
    return tmp_path


def failed(root: Path, script: str, *arguments: str, **more: str) -> str:
    """The last line of a script that must fail."""
    environment = {"PATH": f"{root / 'bin'}:/usr/bin:/bin", **more}
    words = ["bash", root / "scripts" / script, *arguments]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    return done.stderr.splitlines()[-1]


def run(root: Path, script: str, *arguments: str, **more: str) -> str:
    """The last line of a script that must fail, and that makes no environment."""
    (root / "log").unlink(missing_ok=True)
    said = failed(root, script, *arguments, **more)
    assert not list(root.glob(".venv*"))
    return said


def asked(root: Path) -> list[str]:
    """The command that was to make an environment."""
    return (root / "log").read_text().split()


@pytest.mark.parametrize("script", ["install.sh", "test.sh"])
@pytest.mark.parametrize("given", [("--python", "3.12"), ("--python=3.12",)])
def test_the_python_that_is_named_gets_an_environment_of_its_own(pythons, script, given):
    more = ("-k", "m4") if script == "test.sh" else ()
    assert "could not make" in run(pythons, script, *given, *more)
    place = pythons / ".venv-3.12"
    assert asked(pythons) == [f"{pythons}/bin/python3.12", "-m", "venv", "--clear", str(place)]


def test_without_a_name_all_is_as_it_was(pythons):
    run(pythons, "test.sh")
    assert asked(pythons)[0].endswith("bin/python3") and asked(pythons)[-1] == f"{pythons}/.venv"


@pytest.mark.parametrize(
    ("linked", "said"),
    [(False, "that this script has not made; move it away"), (True, "of another checkout; remove the link")],
)
def test_an_environment_of_others_is_not_cleared(pythons, linked, said):
    """Nor by a link: `venv --clear` would empty what it leads to."""
    theirs = pythons / ("theirs" if linked else ".venv")
    (theirs / "bin").mkdir(parents=True)
    (theirs / "pyvenv.cfg").touch()
    (theirs / "bin" / "python").symlink_to("/bin/true")  # which has a pip
    if linked:
        (theirs / ".stamps").mkdir()
        (theirs / ".stamps" / "place").write_text(str(theirs))
        (pythons / ".venv").symlink_to(theirs)
    assert failed(pythons, "install.sh").endswith(said)
    assert (theirs / "pyvenv.cfg").exists() and not (pythons / "log").exists()


def test_an_interpreter_of_that_version_may_be_named(pythons):
    other = str(pythons / "bin" / "other")
    run(pythons, "install.sh", "--python", "3.13", PYTHON=other)
    assert asked(pythons)[0] == other and asked(pythons)[-1] == f"{pythons}/.venv-3.13"
    assert "no Python 3.12 among" in run(pythons, "install.sh", "--python", "3.12", PYTHON=other)


REFUSED = {
    "": "--python needs a version, as in --python 3.12",
    "4": "--python must be a version as 3.12, got 4",
    "3.9": "--python must be 3.10 or newer, got 3.9",
    "3.10": "no Python 3.10 among python3.10 python3 python; name one: PYTHON=",
    "3.14": "no Python 3.14 among python3.14 python3 python; name one: PYTHON=",
}


@pytest.mark.parametrize("version", REFUSED)
def test_what_cannot_be_is_one_line(pythons, version):
    for script in ("install.sh", "test.sh"):
        assert f"[install] error: {REFUSED[version]}" in run(pythons, script, "--python", *version.split())
    assert not (pythons / "log").exists()


@pytest.fixture
def chosen(tmp_path: Path) -> Callable[[], Path]:
    """The folder of wheels that install.sh chooses, below tmp_path/cache unless that is not the user's alone."""
    whole = (ROOT / "scripts" / "install.sh").read_text()
    functions = tmp_path / "scripts" / "functions.sh"
    functions.parent.mkdir()
    functions.write_text(whole.removesuffix('main "$@"\n'))
    (tmp_path / "relpos_fairseq").symlink_to(ROOT / "relpos_fairseq")

    def choose() -> Path:
        words = f'. "{functions}"; python={sys.executable}; choose_wheels torch1; echo "$wheels"'
        environment = {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache")}
        done = subprocess.run(["bash", "-c", words], env=environment, capture_output=True, text=True, check=True)
        return Path(done.stdout.strip())

    assert whole.endswith('main "$@"\n')
    return choose


@pytest.mark.parametrize(("part", "mode"), [(0, 0o666), (1, 0o777), (2, 0o777), (4, 0o777)])
def test_wheels_that_others_may_have_written_are_not_taken(tmp_path, chosen, part: int, mode: int) -> None:
    """Neither those that others can change, nor those of a folder, at any height, that others can change."""
    usual = chosen()
    assert usual.is_relative_to(tmp_path / "cache")
    kept = usual / "fairseq_fixed-1.whl"
    kept.write_bytes(b"")
    assert chosen() == usual
    place = [kept, *kept.parents][part]
    place.chmod(mode | (place.stat().st_mode & 0o111))
    assert chosen() == tmp_path / ".venv" / "wheels"


def test_a_strangers_wheel_is_not_taken(tmp_path, chosen) -> None:
    wheel = chosen() / "fairseq_fixed-1.whl"
    wheel.write_bytes(b"")
    try:
        os.chown(wheel, 12345, -1)
    except PermissionError:
        pytest.skip("only root gives files away")
    assert chosen() == tmp_path / ".venv" / "wheels"


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_every_python_has_one_pin_of_a_package(version):
    """A pin is one word of install.sh's, its marker too, and the versions' pins are disjoint."""
    pins = []
    for name in ("requirements.txt", "requirements-test.txt"):
        lines = (ROOT / "scripts" / name).read_text().splitlines()
        pins += [line for line in lines if line and not line.startswith("#")]
    assert all(len(pin.split()) == 1 for pin in pins)
    parsed = [Requirement(pin) for pin in pins]
    names = {pin.name for pin in parsed}
    here = {"python_version": version, "python_full_version": f"{version}.0"}
    served = [pin.name for pin in parsed if not pin.marker or pin.marker.evaluate(here)]
    assert len(served) == len(names) and set(served) == names


def test_the_quickstarts_script_passes_options_on(tmp_path):
    """In a checkout whose Python prints what it is asked to run, and install.sh does nothing."""
    path = "examples/quickstart.sh"
    for file, text in {".venv/bin/python": 'echo python "$@"\n', "scripts/install.sh": "exit 0\n"}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / file).chmod(0o755)
    (tmp_path / path).parent.mkdir()
    shutil.copy(ROOT / path, tmp_path / path)
    said = subprocess.check_output(["bash", tmp_path / path, "--workers", "8"], text=True).split()
    assert said[-2:] == ["--workers", "8"] and "quickstart" in said
