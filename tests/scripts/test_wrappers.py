"""The shell scripts pass options on to the commands that they are short for."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from helpers import ROOT

WRAPPERS = {
    "scripts/prepare-wmt15en2de.sh": ["prepare", "wmt", "wmt15", "en-de"],
    "scripts/prepare-wmt18en2cs.sh": ["prepare", "wmt", "wmt18", "en-cs"],
    "examples/quickstart.sh": ["quickstart"],
}


@pytest.mark.parametrize("path", WRAPPERS)
def test_shell_scripts_pass_options_on(tmp_path, path):
    """In a checkout whose Python prints what it is asked to run, and install.sh does nothing."""
    for file, text in {".venv/bin/python": 'echo python "$@"\n', "scripts/install.sh": "exit 0\n"}.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / file).chmod(0o755)
    (tmp_path / path).parent.mkdir(exist_ok=True)
    shutil.copy(ROOT / path, tmp_path / path)
    said = subprocess.run(
        ["bash", str(tmp_path / path), "--workers", "8"], env=os.environ, capture_output=True, text=True, check=True
    ).stdout.split()
    assert said[-2:] == ["--workers", "8"]
    words = " ".join(said[1:-2]).replace(str(tmp_path), "")
    for word in WRAPPERS[path]:
        assert word in words
