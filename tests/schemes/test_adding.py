"""A new scheme is one file: the example of schemes/README.md, put into a copy of the package."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

from conftest import ROOT

from helpers import processes

USE = """
import dataclasses, torch
from relpos_fairseq.core.config import PositionConfig, resolve
from relpos_fairseq.core.options import AttentionShape
from relpos_fairseq.core.placement import Placement
from relpos_fairseq.core.positions import Positions
from relpos_fairseq.schemes import scheme_names

assert "mine" in scheme_names()
(flag,) = [part for part in dataclasses.fields(PositionConfig) if part.name == "position_near"]
assert flag.metadata["help"] == "distances without penalty (mine); auto: 1"
shape = AttentionShape(embed_dim=8, num_heads=2, max_positions=4)
plan = resolve(PositionConfig("learned+mine", position_near="1"), shape, "masked_lm")
assert "mine.share=none mine.reset_cls=False mine.near=1" in plan.describe()
layer = Placement(plan).layer_schemes(0)
with torch.no_grad():
    layer[0].slope += torch.tensor([1.0, 2.0])
positions = Positions(3, 3)
(term,) = layer.evaluate(positions).terms
assert term.static.tolist() == [[-1, 0, 0, 0, -1], [-2, 0, 0, 0, -2]]
try:
    resolve(PositionConfig("m4", position_near="1"), shape, "masked_lm")
except ValueError as error:
    assert str(error).startswith("--position-near 1 does not apply to position scheme m4")
else:
    raise AssertionError("m4 took --position-near")

from relpos_fairseq.conversion import algebra, layouts
(place,) = [place for place in layouts.places(plan) if place.name == "mine"]
assert algebra.neutral_parameters(place.build(plan, 0))["slope"].tolist() == [0, 0]
"""


def test_the_example_of_the_readme_is_enough(tmp_path: Path) -> None:
    package = tmp_path / "relpos_fairseq"
    shutil.copytree(ROOT / "relpos_fairseq", package, ignore=shutil.ignore_patterns("__pycache__"))
    readme = (package / "schemes" / "README.md").read_text(encoding="utf-8")
    example = re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1)
    mine = package / "schemes" / "mine.py"
    mine.write_text(textwrap.dedent(example), encoding="utf-8")
    for words in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *words, "--no-cache", "--config", ROOT / "pyproject.toml", mine]
        subprocess.run(ruff, check=True)
    settings = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", USE]
    done = processes.run(command, cwd=tmp_path, env=settings)
    assert done.returncode == 0, done.stderr[-3000:]
