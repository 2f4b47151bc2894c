"""Scripts around the preparation: wrappers, the Slurm job."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from helpers import ROOT, processes


def shell(*command: object, **environment: str) -> str:
    """Runs a script to its end and returns what it printed."""
    done = processes.run(["bash", *map(str, command)], cwd=ROOT, env=os.environ | environment, anew=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"), [("15en2de", ("news-commentary-v10", "wmt15")), ("18en2cs", ("paracrawl", "--czeng"))]
)
def test_wrappers(tmp_path, name, words):
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    script = ROOT / "scripts" / f"prepare-wmt{name}.sh"
    said = shell(script, "--dry-run", "--out", tmp_path / "out", PATH=search)
    assert all(word in said for word in words) and not (tmp_path / "out").exists()


def test_slurm_job_keeps_the_papers_batch(tmp_path):
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name, body in (("scontrol", "printf 'n1\\nn2\\n'"), ("srun", 'printf "%s\\n" "$@"')):
        (stubs / name).write_text(f"#!/bin/sh\n{body}\n")
        (stubs / name).chmod(0o755)
    script = ROOT / "examples" / "translation" / "train.sbatch"
    for nodes, per_node, tokens, updates in ((1, 1, 4096, 8), (1, 8, 4096, 1), (2, 8, 2048, 1)):
        slurm = {"NNODES": nodes, "GPUS_ON_NODE": per_node, "JOB_ID": 7, "JOB_NODELIST": "n[1-2]"}
        environment = {f"SLURM_{name}": str(value) for name, value in (slurm | {"SUBMIT_DIR": tmp_path}).items()}
        environment["PATH"] = f"{stubs}{os.pathsep}{os.environ['PATH']}"
        said = shell(script, "wmt15_en_de_t5", "common.seed=2", **environment).split("\n")
        assert said[:6] == ["torchrun", "--nnodes", str(nodes), "--nproc_per_node", str(per_node), "--rdzv_id"]
        assert "n1:29500" in said and "wmt15_en_de_t5" in said and "common.seed=2" in said
        assert f"dataset.max_tokens={tokens}" in said
        assert f"optimization.update_freq=[{updates}]" in said
        assert tokens * updates * nodes * per_node == 32768
