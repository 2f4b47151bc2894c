"""mypy finds no error in the files that pyproject.toml lists."""

import subprocess
import sys

from conftest import ROOT


def test_mypy_finds_no_error() -> None:
    done = subprocess.run([sys.executable, "-m", "mypy"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
