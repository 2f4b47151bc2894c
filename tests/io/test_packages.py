"""A package that is not installed is one line that names what installs it, wherever a command meets it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from helpers import ROOT, processes
from relpos_fairseq.io import packages
from relpos_fairseq.io.command import run_command
from relpos_fairseq.io.files import write_text

HIDING = """
import sys
class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hidden())
for name in [name for name in sys.modules if name.partition(".")[0] == sys.argv[1]]:
    del sys.modules[name]
from relpos_fairseq.cli.main import main
sys.exit(main(sys.argv[2:]))
"""
COMMANDS = {  # a module that is hidden, the command that needs it, and the extra that has it
    "fairseq": ("translate a.pt raw/train.en", "fairseq"),
    "matplotlib": ("benchmark attention --plot x.png", "plot"),
    "sacremoses": ("prepare wmt en-de --from-dir raw --out out", "data"),
    "tokenizers": ("prepare mlm --train raw/train.en --valid raw/train.en --out out", "data"),
    "yaml": ("compare report spec.yaml", "compare"),
    "sacrebleu": ("score raw/train.en --reference raw/train.en --target-lang en", None),
    "shtab": ("completion bash", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("module", COMMANDS)
def test_a_command_names_what_installs_it(module: str, tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        for language in ("en", "de"):
            write_text(tmp_path / "raw" / f"{name}.{language}", "a few words of text\n" * 4)
    write_text(tmp_path / "spec.yaml", "name: x\n")
    (tmp_path / "a.pt").touch()
    command, extra = COMMANDS[module]
    run = [sys.executable, "-c", HIDING, module, *command.split()]
    done = processes.run(run, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)})
    installs = f"'relpos_fairseq[{extra}]'" if extra else packages.INSTALLS.get(module, module)
    error = f"error: this needs {module}, which is not installed: pip install {installs}"
    assert (done.returncode, done.stderr.strip().splitlines()[-1]) == (2, error), done.stderr[-2000:]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["relpos_fairseq.nowhere", "json.nowhere", None])
def test_a_module_of_ours_is_a_bug(name: str | None) -> None:
    def run(_: object) -> None:
        raise ModuleNotFoundError("no module", name=name)

    with pytest.raises(ModuleNotFoundError):
        run_command(run, [])


def test_what_is_absent_is_named_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    known = packages.extras()
    assert {"fairseq", "data", "plot", "onnx"} <= known.keys() and not known.keys() & {"test", "all"}
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name in ("google", "onnx") else object())
    assert packages.absent() == {"data": ["protobuf"], "convert": ["protobuf"], "onnx": ["onnx"]}
    monkeypatch.setattr(packages, "extras", lambda: {})  # a copy that was not installed
    assert packages.remedy("yaml.nodes") == "pip install pyyaml"
