"""`--isa` sets what the kernel and torch compute with, in a process that begins with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import ROOT
from helpers.commands import relpos
from helpers.shell import Shell
from relpos_fairseq.attention import native
from relpos_fairseq.io import processor
from relpos_fairseq.io.child import command_of
from relpos_fairseq.lab.benchmarks import workload

X86 = workload.platform.machine().lower() in workload.X86
TINY = "--heads 2 --head-dim 8 --position-clip-distance 3 --lengths 200 --batch-size 1 --schemes m4 --rounds 1"


@pytest.mark.parametrize("name", workload.SETS)
def test_the_other_process(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the set's environment and nothing of another's; its status is the command's."""
    started = []
    monkeypatch.setattr(
        workload.subprocess,
        "run",
        lambda words, env, check: started.append((words, env)) or SimpleNamespace(returncode=-11),
    )
    monkeypatch.setattr(processor, "abilities", lambda: {"avx2", "fma", "bmi2", "sse4_2"})
    monkeypatch.setattr(workload.platform, "machine", lambda: "x86_64")
    for variable in workload.VARIABLES:
        monkeypatch.setenv(variable, "left over")
    assert workload.run_under_instruction_set(None, "benchmark attention", []) is None and not started
    status = workload.run_under_instruction_set(name, "benchmark attention", ["--isa", name])
    ((words, environment),) = started
    assert status == 139 and words == [*command_of("relpos_fairseq.cli"), "benchmark", "attention", "--isa", name]
    given = {variable: environment.get(variable) for variable in workload.VARIABLES}
    assert given == workload.of_environment(name) and environment["PATH"] == os.environ["PATH"]
    for variable, value in given.items():
        if value is None:
            monkeypatch.delenv(variable)
        else:
            monkeypatch.setenv(variable, value)
    assert workload.run_under_instruction_set(name, "benchmark attention", []) is None and len(started) == 1


def test_a_set_that_the_processor_lacks(monkeypatch: pytest.MonkeyPatch, shell: Shell) -> None:
    """Its first instruction would end the process without a word."""
    monkeypatch.setattr(processor, "abilities", lambda: {"sse4_2", "avx2"})
    monkeypatch.setattr(workload.platform, "machine", lambda: "x86_64")
    assert "--isa avx2 needs fma, bmi2, which" in shell.refused(f"benchmark attention --isa avx2 {TINY}")
    monkeypatch.setattr(workload.platform, "machine", lambda: "aarch64")
    said = "a set of x86 processors, this is aarch64"
    assert said in shell.refused(f"benchmark attention --isa sse2 {TINY}")


@pytest.mark.skipif(not X86, reason="sets of x86")
def test_torch_takes_the_set() -> None:
    """Its operations are those of processors without AVX."""
    words = [sys.executable, "-c", "from relpos_fairseq.lab.benchmarks import workload as i;"]
    words[-1] += "print(i.instruction_sets_in_use())"
    given = workload.of_environment("sse2")
    paths = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, env={**os.environ, **paths, **given}, capture_output=True)
    assert done.stdout.decode().strip() == "kernel for x86-64-v2 and torch for DEFAULT"


@pytest.mark.slow
@pytest.mark.skipif(not X86 or native.build.problem() is not None, reason="x86 and a compiler")
def test_a_run_without_avx(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    """Kernel and torch alike, said at the table's head and in its rows; the numbers are right."""
    path = tmp_path / "rows.csv"
    line = f"benchmark attention --isa sse2 {TINY} --backends native --csv"
    assert relpos(*line.split(), path) == 0
    said = "kernel for x86-64-v2 and torch for DEFAULT"
    out = capfd.readouterr().out
    assert out.count(said) == 2 and "1 candidates right against fp64" in out
    assert path.read_text().count(said) == 4  # two rows a mode
