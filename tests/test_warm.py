"""A command that begins as a fork of a warm process does what it does when it is begun anew."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import warm

SAYS = """
import atexit, os, signal, sys
atexit.register(print, "end")
print(sys.argv[1:], os.getcwd(), os.environ["GIVEN"], os.environ.get("HOME"), __name__)
print(sys.stdin.read(), "ü")
print("wrong", file=sys.stderr)
"""
ENDS = {
    "well": ("", 0),
    "status": ("sys.exit(3)", 3),
    "words": ("sys.exit('no')", 1),
    "error": ("1 / 0", 1),
    "signal": ("sys.stdout.flush(); os.kill(os.getpid(), signal.SIGTERM)", -15),
    "at once": ("sys.stdout.flush(); os._exit(4)", 4),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_is_the_same(end: str, tmp_path: Path) -> None:
    """Arguments, folder, environment, both ends of the pipe, what it does at its end, and its status."""
    more, status = ENDS[end]
    (tmp_path / "said.py").write_text(SAYS + more)
    how = {"cwd": tmp_path, "env": {"GIVEN": "1", "PYTHONPATH": str(tmp_path)}, "input": "read\nü"}
    for words in (["-c", SAYS + more], ["-m", "said"], [tmp_path / "said.py"])[: 3 if end == "well" else 1]:
        here, there = (warm.run([sys.executable, *words, "a", "-b"], **how, anew=anew) for anew in (False, True))
        assert (here.returncode, here.stdout) == (there.returncode, there.stdout)
        assert here.returncode == status and here.stdout.count("end") == (end not in ("signal", "at once"))
        assert here.stderr.splitlines()[-1] == there.stderr.splitlines()[-1]


def test_errors_may_be_part_of_the_output() -> None:
    done = warm.run([sys.executable, "-c", "import sys; print('wrong', file=sys.stderr)"], joined=True)
    assert (done.stdout, done.stderr) == ("wrong\n", None)


def test_what_takes_too_long_is_killed_and_the_next_runs() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        warm.run([sys.executable, "-c", "import time; time.sleep(60)"], timeout=0.2)
    assert warm.run([sys.executable, "-c", "print(1)"], env=dict(os.environ)).stdout == "1\n"
