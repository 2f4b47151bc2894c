"""A child runs nothing of the working folder, and ends with the process that began it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import ROOT
from relpos_fairseq.io.child import command_of


def run(words: list[str], path: str = "", **how) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60, **how)


def test_modules_of_the_working_folder_do_not_run(tmp_path: Path) -> None:
    for name in ("subword_nmt", "tqdm", "fairseq_cli", "relpos_fairseq", "json"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("open('ran', 'w')\nraise SystemExit(7)\n")
    for module, option in (("subword_nmt.learn_bpe", "--help"), ("relpos_fairseq.cli", "--version")):
        done = run([*command_of(module), option], cwd=tmp_path)
        assert done.returncode == 0 and done.stdout, done.stderr
    assert not (tmp_path / "ran").exists()


def test_arguments_and_statuses_pass(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import sys\nprint(__name__, sys.argv[1:])\nsys.exit(5)\n")
    done = run([*command_of("mine"), "a", "-b"], str(tmp_path))
    assert (done.returncode, done.stdout) == (5, "__main__ ['a', '-b']\n")


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux'")
def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    (tmp_path / "sleeps.py").write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(60)\n")
    begins = f"import subprocess; subprocess.run({command_of('sleeps')!r})"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", begins], env=environment, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()
        for _ in range(100):
            if not Path(f"/proc/{child}").exists():
                break
            time.sleep(0.1)
        else:
            os.kill(child, signal.SIGKILL)
            pytest.fail("the child lives on")


def test_no_command_begins_a_module_otherwise() -> None:
    """`python -m` looks into the working folder first; the self-test of kernels sets its own."""
    found = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "relpos_fairseq").rglob("*.py")
        if re.search(r'sys\.executable,\s*"-m"', path.read_text(encoding="utf-8"))
    }
    assert found == {"relpos_fairseq/attention/triton/selftest_cache.py"}
