"""Names and flags of fairseq-train, all that version 7983f42 had, and the scripts' options."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

import relpos_fairseq  # noqa: F401  registers the models
from helpers import ROOT
from helpers.golden_flags import flags_of, registered_names, values_of

GOLDEN = json.loads(Path(__file__).with_name("golden_flags.json").read_text())
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


@pytest.mark.parametrize("kind", GOLDEN["names"])
def test_every_name_is_registered(kind):
    assert set(GOLDEN["names"][kind]) <= set(registered_names()[kind])


@pytest.mark.parametrize("name", GOLDEN["model_flags"])
def test_every_model_keeps_its_flags(name):
    from fairseq.models import ARCH_MODEL_REGISTRY

    assert set(GOLDEN["model_flags"][name]) <= set(flags_of(ARCH_MODEL_REGISTRY[name]))


@pytest.mark.parametrize("name", GOLDEN["values"])
def test_every_architecture_keeps_its_values(name):
    values = values_of(name)
    assert {key: values.get(key) for key in GOLDEN["values"][name]} == GOLDEN["values"][name]


@pytest.mark.parametrize("name", GOLDEN["task_flags"])
def test_every_task_keeps_its_flags(name):
    from fairseq.tasks import TASK_REGISTRY

    assert set(GOLDEN["task_flags"][name]) <= set(flags_of(TASK_REGISTRY[name]))


@pytest.mark.parametrize("name", GOLDEN["criterion_flags"])
def test_every_criterion_keeps_its_flags(name):
    from fairseq.criterions import CRITERION_REGISTRY

    assert set(GOLDEN["criterion_flags"][name]) <= set(flags_of(CRITERION_REGISTRY[name]))
