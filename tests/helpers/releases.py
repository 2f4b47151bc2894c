"""Other releases of transformers, each in an environment of its own."""

from __future__ import annotations

import os
import site
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from helpers import ROOT

ENVIRONMENTS = "RELPOS_TRANSFORMERS_ENVIRONMENTS"  # where they are kept between runs


@cache
def installed(folder: Path, release: str) -> Path:
    """Python with a release of transformers and, below it, this environment's packages."""
    home = Path(os.environ.get(ENVIRONMENTS, folder)) / f"transformers-{release}"
    python = home / "bin" / "python"
    if not python.is_file():
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)  # it has ours
        [packages] = home.glob("lib/python*/site-packages")
        (packages / "below.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    wanted = (f"transformers=={release}", "accelerate==1.15.0")
    install = [python, "-m", "pip", "install", "-q", "--no-compile", *wanted]
    done = subprocess.run(install, capture_output=True, encoding="utf-8", timeout=600)
    if done.returncode:
        pytest.skip(f"pip cannot install {' '.join(wanted)}: {done.stderr.strip()[-200:]}")
    return python


def run_in(folder: Path, *words: object) -> subprocess.CompletedProcess:
    """Run a program that finds this package, and keeps what transformers keeps in the folder."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HOME": str(folder / "home")}
    return subprocess.run(words, env=environment, capture_output=True, encoding="utf-8", cwd=folder)
